"""Few-shot regression of sinusoids: a start from which one step on few points fits a new one.

Tasks are `amplitude sin(x + phase)`, amplitude 0.1 to 5, phase 0 to pi, points in -5 to 5, and
a network of two hidden layers of 40 rectified units, as in MAML's paper (Finn, Abbeel, Levine,
2017, arXiv 1703.03400), with fewer updates of the start than the 70,000 there.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import bilevel
from hetjax.types import PyTree

ARMS = {
    "joint training": None,
    "MAML": {"num_steps": 1},
    "FOMAML": {"num_steps": 1, "back": 0},
    "IAPTT": {"num_steps": 3, "pick": "worst"},
}
RATE = 0.01  # of the steps on a task
NUM_TASKS, NUM_TEST_TASKS = 25, 600
SIZES = (1, 40, 40, 1)
EVALUATED = (0, 1, 5, 10)  # steps
DIVERGED = 100.0  # error of a task; that of answering 0 is below 25


def network(params: PyTree, inputs: jax.Array) -> jax.Array:
    """`f[n, 1]`."""
    for weights, bias in params[:-1]:
        inputs = jax.nn.relu(inputs @ weights + bias[None])
    weights, bias = params[-1]
    return inputs @ weights + bias[None]


def init(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    return [
        (jnp.asarray(rng.normal(0, (2 / a) ** 0.5, (a, b)), jnp.float32), jnp.zeros(b))
        for a, b in itertools.pairwise(SIZES)
    ]


def loss(x: PyTree, y: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean square error; of both levels."""
    del x
    inputs, targets = batch
    return jnp.mean((network(y, inputs) - targets) ** 2)


def tasks(rng: jax.Array, num: int, shots: int, num_query: int) -> bilevel.Batches:
    """Points to fit and others to judge by, leaves `[num, points, 1]`."""
    first, second, third = jax.random.split(rng, 3)
    amplitude = jax.random.uniform(first, (num, 1, 1), minval=0.1, maxval=5.0)
    phase = jax.random.uniform(second, (num, 1, 1), maxval=jnp.pi)
    inputs = jax.random.uniform(third, (num, shots + num_query, 1), minval=-5.0, maxval=5.0)
    both = (inputs, amplitude * jnp.sin(inputs + phase))
    fit = jax.tree.map(lambda leaf: leaf[:, :shots], both)
    judge = jax.tree.map(lambda leaf: leaf[:, shots:], both)
    return bilevel.Batches(upper=judge, lower=fit)


def gradient(arm: str, start: PyTree, batches: bilevel.Batches) -> PyTree:
    """Of the mean over tasks, in the start."""
    if ARMS[arm] is None:

        def pooled(start: PyTree) -> jax.Array:
            each = jax.vmap(lambda a, b: (loss((), start, a) + loss((), start, b)) / 2)
            return jnp.mean(each(*batches))

        return jax.grad(pooled)(start)
    estimator = bilevel.unroll(bilevel.descent(optax.sgd(RATE)), start="learned", **ARMS[arm])
    x = bilevel.Learned(jnp.zeros(()), start)

    def of_task(batches: bilevel.Batches) -> PyTree:
        problem = bilevel.Bilevel(loss, loss)
        return bilevel.hypergradient(problem, estimator, x, start, batches).grad_x.start

    return jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(of_task)(batches))


@functools.partial(jax.jit, static_argnames=("arm", "shots", "num_updates"))
def train(arm: str, start: PyTree, rng: jax.Array, *, shots: int, num_updates: int) -> PyTree:
    """A start, learned by Adam."""
    tx = optax.adam(1e-3)

    def update(carry: tuple, rng: jax.Array) -> tuple[tuple, None]:
        start, state = carry
        grads = gradient(arm, start, tasks(rng, NUM_TASKS, shots, shots))
        updates, state = tx.update(grads, state)
        return (optax.apply_updates(start, updates), state), None

    return jax.lax.scan(update, (start, tx.init(start)), jax.random.split(rng, num_updates))[0][0]


@functools.partial(jax.jit, static_argnames="shots")
def errors(start: PyTree, rng: jax.Array, rate: float, *, shots: int) -> jax.Array:
    """Mean square error on each new task after 0 to 10 steps, `f[NUM_TEST_TASKS, 11]`."""

    def of_task(batches: bilevel.Batches) -> jax.Array:
        def step(y: PyTree, _: None) -> tuple[PyTree, jax.Array]:
            grads = jax.grad(loss, 1)((), y, batches.lower)
            return jax.tree.map(lambda a, g: a - rate * g, y, grads), loss((), y, batches.upper)

        return jax.lax.scan(step, start, length=max(EVALUATED) + 1)[1]

    return jax.vmap(of_task)(tasks(rng, NUM_TEST_TASKS, shots, 100))


def run(arm: str, shots: int, seed: int, *, num_updates: int) -> dict[str, Any]:
    """A record. Joint training gets the best of four rates for its steps on new tasks."""
    first, second = jax.random.split(jax.random.key(seed))
    start = train(arm, init(seed), first, shots=shots, num_updates=num_updates)
    rates = (RATE,) if ARMS[arm] else (1e-3, 3e-3, 1e-2, 2e-2)
    found = {rate: np.asarray(errors(start, second, rate, shots=shots)) for rate in rates}
    means = {rate: each.mean(0) for rate, each in found.items()}
    best = min(means, key=lambda rate: float(np.nan_to_num(means[rate][1], nan=np.inf)))
    medians = np.median(np.nan_to_num(found[best], nan=np.inf), 0)
    diverged = np.sum(~(found[best] < DIVERGED), 0)  # those that are no numbers, too
    return {
        "arm": arm,
        "seed": seed,
        "shots": shots,
        "rate": best,
        "num_updates": num_updates,
        "errors": {str(k): float(means[best][k]) for k in EVALUATED},
        "medians": {str(k): float(medians[k]) for k in EVALUATED},
        "diverged": {str(k): int(diverged[k]) for k in EVALUATED},
    }
