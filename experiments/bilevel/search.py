"""Architecture search: a DARTS cell whose right operations are known.

The upper half of a digit is one input of the cell, the lower half the other, and the sign of every
pixel is drawn at random. So no linear function of the pixels tells digits apart: only a convolution
with a full-wave rectifier sees through the signs. Each of the two edges mixes six operations by the
softmax of its row of x; the decoys are nothing, noise, the input, its average over 3 × 3 pixels,
and a learned convolution without a rectifier. A node sums the edges, and a softmax regression reads
it. What an operation makes, and the node, are divided by their root mean square over an example, as
DARTS normalises them over a batch: else filters and regression make up for any weight.

f is the training loss with a ridge, F the validation loss. The problem is solved if the rectified
convolution has the largest weight on both edges. The cell and its continuous form are those of Liu,
Simonyan, Yang, "DARTS: differentiable architecture search", 2018, arXiv 1806.09055.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bilevel import data as data_lib
from experiments.bilevel import estimators, one_device, settings
from hetjax import bilevel
from hetjax.types import PyTree

OPERATIONS = (
    "zero",
    "noise",
    "skip",
    "average pool",
    "linear convolution",
    "rectified convolution",
)
RIGHT = OPERATIONS.index("rectified convolution")
NUM_EDGES, SIDE, WINDOW = 2, 8, 9
NOISE = 0.5  # its deviation
TRAIN_STEPS, TRAIN_RATE = 300, 0.01  # of Adam, of a network of chosen operations


class Signed(NamedTuple):
    """Examples; a window is the 3 × 3 pixels around one."""

    windows: Any  # f[n, edges, pixels, 9]
    noise: Any  # f[n, edges, pixels, channels]
    labels: Any  # i32[n]


def signed(images: data_lib.Images, channels: int, rng: np.random.Generator) -> Signed:
    """Halves of digits with the sign of every pixel drawn."""
    num = len(images.labels)
    drawn = images.images.reshape(num, SIDE, SIDE) * rng.choice([-1.0, 1.0], (num, SIDE, SIDE))
    halves = np.zeros((num, NUM_EDGES, SIDE, SIDE))
    halves[:, 0, : SIDE // 2], halves[:, 1, SIDE // 2 :] = np.split(drawn, 2, axis=1)
    padded = np.pad(halves, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    noise = rng.normal(0, NOISE, (num, NUM_EDGES, SIDE * SIDE, channels))
    return Signed(
        windows.reshape(num, NUM_EDGES, SIDE * SIDE, WINDOW).astype(np.float32),
        noise.astype(np.float32),
        images.labels,
    )


def init(channels: int, seed: int) -> PyTree:
    """Filters of both convolutions of each edge, and zeros for the regression."""
    rng = np.random.default_rng(seed)

    def filters() -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.4, (NUM_EDGES, WINDOW, channels)), jnp.float32)

    out = jnp.zeros((SIDE * SIDE * channels, 10))
    return {"linear": filters(), "rectified": filters(), "out": out}


def logits(weights: jax.Array, y: PyTree, batch: Signed) -> jax.Array:
    """`f[n, 10]`, of the weights of the operations, `f[edges, operations]`."""
    shape = batch.noise.shape
    skip = jnp.broadcast_to(batch.windows[..., WINDOW // 2, None], shape)
    pool = jnp.broadcast_to(batch.windows.mean(-1, keepdims=True), shape)
    linear, rectified = (
        jnp.einsum("nepw,ewc->nepc", batch.windows, y[name]) for name in ("linear", "rectified")
    )
    made = (jnp.zeros(shape), batch.noise, skip, pool, linear, jnp.abs(rectified))
    node = jnp.einsum("eo,onepc->npc", weights, _even(jnp.stack(made), (-2, -1)))
    return _even(node, (-2, -1)).reshape(len(node), -1) @ y["out"]


def _even(values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Over the root of their mean square: so no filter makes up for a small weight."""
    return values / jnp.sqrt(jnp.mean(values**2, axes, keepdims=True) + 1e-6)


def losses(weights: jax.Array, y: PyTree, batch: Signed) -> jax.Array:
    """Cross-entropy of each example, f[n]."""
    scores = logits(weights, y, batch)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels)


def make_problem(ridge: float) -> bilevel.Bilevel:
    """The two losses, f[n]; x is `f[edges, operations]`, whose softmax weighs."""

    def upper(x: PyTree, y: PyTree, batch: Signed) -> jax.Array:
        return losses(jax.nn.softmax(x, -1), y, batch)

    def lower(x: PyTree, y: PyTree, batch: Signed) -> jax.Array:
        squares = sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(y)), jnp.zeros(()))
        return upper(x, y, batch) + ridge / 2 * squares

    return bilevel.Bilevel(upper, lower)


def parts(config: settings.TrainConfig) -> tuple[Signed, Signed, Signed]:
    """Training, validation and test examples."""
    search = config.search
    sizes = settings.Data(
        num_train=search.num_train, num_validation=search.num_validation, polluted_fraction=0
    )
    data = data_lib.make(sizes, config.seed)
    rng = np.random.default_rng(config.seed)
    train, validation, test = (
        signed(part, search.channels, rng) for part in (data.train, data.validation, data.test)
    )
    return jax.device_put((train, validation, test))


def make(config: settings.TrainConfig) -> one_device.Made:
    """Of the problem search."""
    train, validation, test = parts(config)
    problem, estimator = make_problem(config.lower.ridge), estimators.make(config)
    y0 = init(config.search.channels, config.seed)
    batches = bilevel.Batches(validation, train)

    def hypergradient(x: PyTree, state: PyTree, key: jax.Array) -> Any:
        del key
        return bilevel.hypergradient(problem, estimator, x, y0, batches, state)

    def measure(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, jax.Array]:
        del key
        weights = jax.nn.softmax(x, -1)
        right = logits(weights, state.y, test).argmax(-1) == test.labels
        least = weights[:, RIGHT].min()
        return {"test_accuracy": jnp.mean(right), "least_right_weight": least}

    def finish(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, Any]:
        del state, key
        weights = np.asarray(jax.nn.softmax(x, -1))
        found = weights.argmax(-1)

        def accuracy(chosen: np.ndarray) -> float:
            one = jnp.asarray(np.eye(len(OPERATIONS), dtype=np.float32)[chosen])
            return float(trained_accuracy(problem, one, y0, (train, validation), test))

        decoys = np.where(np.arange(len(OPERATIONS)) == RIGHT, -1, weights).argmax(-1)
        return {
            "weights": weights.tolist(),
            "found": [OPERATIONS[edge] for edge in found],
            "found_accuracy": accuracy(found),
            "right_accuracy": accuracy(np.full(NUM_EDGES, RIGHT)),
            "best_decoys_accuracy": accuracy(decoys),
            "solved": bool(np.all(found == RIGHT)),
        }

    return one_device.Made(jnp.zeros((NUM_EDGES, len(OPERATIONS))), hypergradient, measure, finish)


def trained_accuracy(
    problem: bilevel.Bilevel,
    weights: jax.Array,
    y: PyTree,
    seen: tuple[Signed, Signed],
    test: Signed,
) -> jax.Array:
    """On the test set, of a network of single operations trained on all else."""
    logs = jnp.log(jnp.maximum(weights, 1e-30))  # whose softmax they are
    batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *seen)
    tx = optax.adam(TRAIN_RATE)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        y, state = carry
        grads = jax.grad(lambda y: jnp.mean(problem.lower(logs, y, batch)))(y)
        updates, state = tx.update(grads, state)
        return (optax.apply_updates(y, updates), state), None

    @jax.jit
    def trained(y: PyTree) -> jax.Array:
        y = jax.lax.scan(step, (y, tx.init(y)), length=TRAIN_STEPS)[0][0]
        return jnp.mean(logits(weights, y, test).argmax(-1) == test.labels)

    return trained(y)
