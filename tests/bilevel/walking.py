"""Runs an estimator: under `jit`, or on the host one request at a time, and notes the requests."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import bilevel
from hetjax.bilevel import problem as problem_lib


class Note(NamedTuple):
    what: problem_lib.What
    batch: int


QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiled in a fraction of the time, for what runs once."""


@functools.lru_cache(maxsize=8)
def compiled(problem, estimator):
    """Jitted `hypergradient` of `(x, y, batches, state)`: one function for calls in a row."""

    def call(x, y, batches, state):
        return bilevel.hypergradient(problem, estimator, x, y, batches, state)

    return jax.jit(call, compiler_options=QUICKLY)


def jitted(problem, estimator, x, y, batches=None, state=None) -> bilevel.Result:
    """`hypergradient` under `jit`."""
    return compiled(problem, estimator)(x, y, batches, state)


@functools.cache
def answering(problem, what):
    """The answers to one kind of request, jitted."""
    return jax.jit(lambda at, batch: problem_lib.answer(problem, what, at, batch))


def on_host(
    problem, estimator, x, y, batches=None, state=None
) -> tuple[bilevel.Result, list[Note]]:
    """The same, and the requests in their order."""
    given = bilevel.Batches() if batches is None else batches
    notes, position = [], estimator.init(x, y, state)
    while not position.is_done:
        what, at = estimator.request(position)
        notes.append(Note(what, int(at.batch)))
        batch = problem_lib.batch_of(given, what, at)
        position = estimator.receive(position, answering(problem, what)(at, batch))
    return estimator.result(position), notes


def counted(notes: list[Note]) -> bilevel.Cost:
    """The calls behind some requests, by hand."""
    count = np.zeros(4, int)
    for what, _ in notes:
        match what.kind.value:
            case "loss":
                count += (1, 0, 0, 0)
            case "gradient":
                count += (0, 1, 0, 0)
            case "products":
                count += (0, 0, "y" in what.wrt, "x" in what.wrt)
            case "tangents":
                count += (0, 1, what.num_tangents, 0)
    return bilevel.Cost(*count.tolist())


def plain(problem, tx, num_steps, x, y, *, direction=None, batches=None, upper=None):
    """`F(x, y_T)` by a Python loop, and y_T; differentiate it with `jax.grad`.

    Args:
        tx: an optax optimiser.
        direction: `(upper gradient, lower gradient, k) -> gradient`; the lower one by default.
        batches: the lower batch of each step.
        upper: the upper batch.
    """
    state = tx.init(y)
    for k in range(num_steps):
        batch = None if batches is None else batches[k]
        gradient = jax.grad(problem.lower, 1)(x, y, batch)
        if direction is not None:
            gradient = direction(jax.grad(problem.upper, 1)(x, y, upper), gradient, k)
        updates, state = tx.update(gradient, state, y)
        y = optax.apply_updates(y, updates)
    return problem.upper(x, y, upper), y


def apart(*trees: Any) -> float:
    """The largest distance of any tree's numbers from the first one's, over its largest number."""
    ravelled = ([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)] for tree in trees)
    vectors = [np.concatenate(leaves) for leaves in ravelled]
    assert len({vector.shape for vector in vectors}) == 1
    if not all(np.isfinite(vector).all() for vector in vectors):
        return np.inf
    size = float(np.abs(vectors[0]).max()) or 1.0
    return max(float(np.abs(vector - vectors[0]).max()) for vector in vectors[1:]) / size


def descended(problem, estimator, x, y, *, tx, num_steps, bounds=None):
    """x after so many upper steps, in one `lax.scan` that carries the estimator's state.

    Returns:
        x, and the last result.
    """

    def step(carry, _):
        x, opt, state = carry
        result = bilevel.hypergradient(problem, estimator, x, y, None, state)
        updates, opt = tx.update(result.grad_x, opt, x)
        x = optax.apply_updates(x, updates)
        if bounds is not None:
            x = jax.tree.map(lambda leaf: jnp.clip(leaf, *bounds), x)
        return (x, opt, result.state), None

    def run(x, y):
        (x, opt, state), _ = step((x, tx.init(x), None), None)
        x, _, state = jax.lax.scan(step, (x, opt, state), length=num_steps - 1)[0]
        return x, bilevel.hypergradient(problem, estimator, x, y, None, state)

    return jax.jit(run)(jax.tree.map(jnp.asarray, x), jax.tree.map(jnp.asarray, y))
