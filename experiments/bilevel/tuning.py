"""Learning rate and weight decay by hypergradients in forward mode, against random search.

Softmax regression on 200 digits, three labels in ten drawn anew, by 100 steps of gradient
descent; the logarithms of rate and decay are tuned for the loss of 400 clean validation digits.
Both ways begin at random points from the same box, and are compared at equal work: a product
counts as two gradients.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bilevel import cleaning, models, settings
from experiments.bilevel import data as data_lib
from hetjax import bilevel
from hetjax.types import PyTree

STEPS = 100
NUM_HYPERGRADIENTS = 16
RATE = 0.6  # of Adam on the logarithms
BOX = {"log_rate": (math.log(1e-3), math.log(2.0)), "log_decay": (math.log(1e-5), math.log(1.0))}
DATA = settings.Data(num_train=200, num_validation=400, num_test=797, polluted_fraction=0.3)


def upper(x: PyTree, y: PyTree, batch: data_lib.Images) -> jax.Array:
    """The mean validation loss."""
    del x
    return jnp.mean(models.losses(y, batch))


def lower(x: PyTree, y: PyTree, batch: data_lib.Images) -> jax.Array:
    """The mean training loss with its decay."""
    return jnp.mean(models.losses(y, batch)) + jnp.exp(x["log_decay"]) / 2 * models.squares(y)


def run(seed: int) -> list[dict[str, Any]]:
    """A record for either way: the best validation loss so far against work."""
    data = data_lib.make(DATA, seed)
    batches = bilevel.Batches(data.validation, data.train)
    y = models.init(settings.Model(), data.train.images.shape[1], data.num_classes, seed)
    problem = bilevel.Bilevel(upper, lower)
    dynamics = bilevel.descent(lambda x: optax.sgd(jnp.exp(x["log_rate"])))
    forward = bilevel.unroll(dynamics, STEPS, mode="forward", start="cold")
    plain = bilevel.unroll(dynamics, STEPS, back=0, start="cold")
    rng = np.random.default_rng(seed)
    points = [
        {name: jnp.float32(rng.uniform(*box)) for name, box in BOX.items()} for _ in range(200)
    ]
    tuned = jax.jit(lambda x: bilevel.hypergradient(problem, forward, x, y, batches))
    tried = jax.jit(lambda x: bilevel.hypergradient(problem, plain, x, y, batches))
    x, tx = points[0], optax.adam(RATE)
    state, ours = tx.init(x), _Best(data)
    for _ in range(NUM_HYPERGRADIENTS):
        result = tuned(x)
        ours.add(result, x)
        updates, state = tx.update(result.grad_x, state)
        x = optax.apply_updates(x, updates)
    random = _Best(data)
    for point in points:
        if random.work >= ours.work:
            break
        random.add(tried(point), point)
    arms = {"forward mode": ours, "random search": random}
    return [{"arm": arm, "seed": seed, **best.record()} for arm, best in arms.items()]


class _Best:
    """The best point so far."""

    def __init__(self, data: data_lib.Data) -> None:
        self.data, self.work, self.loss = data, 0.0, math.inf
        self.curve: list[tuple[float, float]] = []

    def add(self, result: Any, x: PyTree) -> None:
        self.work += cleaning.work(result.info.cost)
        loss = float(result.info.upper_loss)
        if loss < self.loss:
            self.loss, self.y, self.x = loss, result.state.y, x
        self.curve.append((self.work, self.loss))

    def record(self) -> dict[str, Any]:
        return {
            "validation_loss": self.loss,
            "test_accuracy": float(models.accuracy(self.y, self.data.test)),
            "rate": float(jnp.exp(self.x["log_rate"])),
            "decay": float(jnp.exp(self.x["log_decay"])),
            "points": len(self.curve),
            "curve": self.curve,
        }
