"""Adversarial learning: a generator of eight Gaussians on a circle, and its discriminator.

x is the generator, y the discriminator. f is the discriminator's loss with a penalty on its
gradient at real points, without which a mode is left and found again; F is the generator's loss
`-log D(G(noise))` against the discriminator that training reaches. Points and noise are new for
each hypergradient, and the same for all of its requests.

A mode is found if it has `LEAST_SHARE` of the generator's points within three deviations. The
problem is solved if all eight are found at the end.

References: the eight Gaussians and unrolled discriminators are those of Metz, Poole, Pfau,
Sohl-Dickstein, "Unrolled generative adversarial networks", 2016, arXiv 1611.02163; the penalty that
of Mescheder, Geiger, Nowozin, "Which training methods for GANs do actually converge?", 2018, arXiv
1801.04406.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bilevel import estimators, networks, one_device, settings
from hetjax import bilevel
from hetjax.types import PyTree

NUM_MODES, RADIUS = 8, 2.0
NUM_SEEN = 2_000  # points of the generator that modes are counted among
LEAST_SHARE = 0.02  # of them; an eighth would be even


def centres() -> np.ndarray:
    """`f32[8, 2]`."""
    angles = 2 * np.pi * np.arange(NUM_MODES) / NUM_MODES
    return (RADIUS * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)


def make_problem(penalty: float, ridge: float) -> bilevel.Bilevel:
    """The two losses, f[n]; a batch has `real` points, `f[n, 2]`, and `noise`."""

    def upper(x: PyTree, y: PyTree, batch: dict[str, jax.Array]) -> jax.Array:
        return jax.nn.softplus(-networks.apply(y, networks.apply(x, batch["noise"])))[:, 0]

    def lower(x: PyTree, y: PyTree, batch: dict[str, jax.Array]) -> jax.Array:
        slopes = jax.vmap(jax.grad(lambda a: networks.apply(y, a[None])[0, 0]))(batch["real"])
        of_real = jax.nn.softplus(-networks.apply(y, batch["real"]))[:, 0]
        of_made = jax.nn.softplus(networks.apply(y, networks.apply(x, batch["noise"])))[:, 0]
        squares = sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(y)), jnp.zeros(()))
        return of_real + of_made + penalty / 2 * jnp.sum(slopes**2, -1) + ridge / 2 * squares

    return bilevel.Bilevel(upper, lower)


def batch(config: settings.Gan, key: jax.Array) -> dict[str, jax.Array]:
    """New real points and noise."""
    first, second, third = jax.random.split(key, 3)
    num = config.batch_size
    middle = jnp.asarray(centres())[jax.random.randint(first, (num,), 0, NUM_MODES)]
    real = middle + config.deviation * jax.random.normal(second, (num, 2))
    return {"real": real, "noise": jax.random.normal(third, (num, config.noise_size))}


def shares(points: jax.Array, deviation: float) -> jax.Array:
    """The share of the points within three deviations of each centre, f[8]."""
    away = jnp.linalg.norm(points[:, None] - jnp.asarray(centres())[None], axis=-1)
    return jnp.mean(away < 3 * deviation, 0)


def make(config: settings.TrainConfig) -> one_device.Made:
    """Of the problem gan."""
    gan = config.gan
    problem, estimator = make_problem(gan.penalty, config.lower.ridge), estimators.make(config)
    rng = np.random.default_rng(config.seed)
    x0 = networks.init((gan.noise_size, gan.hidden, gan.hidden, 2), rng)
    y0 = networks.init((2, gan.hidden, gan.hidden, 1), rng)

    def hypergradient(x: PyTree, state: PyTree, key: jax.Array) -> Any:
        drawn = batch(gan, key)
        return bilevel.hypergradient(
            problem, estimator, x, y0, bilevel.Batches(drawn, drawn), state
        )

    def of_modes(x: PyTree, key: jax.Array) -> jax.Array:
        points = networks.apply(x, jax.random.normal(key, (NUM_SEEN, gan.noise_size)))
        return shares(points, gan.deviation)

    def measure(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, jax.Array]:
        del state
        found = of_modes(x, key)
        return {"modes": jnp.sum(found >= LEAST_SHARE), "share_near": jnp.sum(found)}

    def finish(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, Any]:
        del state
        found = np.asarray(of_modes(x, key))
        modes = int(np.sum(found >= LEAST_SHARE))
        return {"shares": found.tolist(), "modes": modes, "solved": modes == NUM_MODES}

    return one_device.Made(x0, hypergradient, measure, finish)
