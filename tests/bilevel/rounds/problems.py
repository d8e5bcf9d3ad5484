"""A small bilevel problem with losses of one number an example, and estimators of each kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import bilevel
from hetjax.bilevel import RECIPES, Batches, Learned, PerExample
from hetjax.bilevel.rounds import run as run_lib
from tests.bilevel import walking

NUM_LOWER, NUM_UPPER, SIZE = 42, 30, 3


def sources(seed=0):
    """(upper, lower); weights of the lower examples are part of the data."""
    rng = np.random.default_rng(seed)

    def drawn(num):
        return {
            "inputs": rng.normal(size=(num, SIZE)),
            "targets": rng.normal(size=num),
            "weights": rng.uniform(0.5, 2.0, size=num),
        }

    return drawn(NUM_UPPER), drawn(NUM_LOWER)


def _residual(y, batch):
    return batch["inputs"] @ y["slope"] + y["shift"] - batch["targets"]


def upper(x, y, batch):
    direct = jnp.sum(x["ridge"] ** 2) / 10
    return jnp.log(jnp.cosh(_residual(y, batch))) + direct, batch["weights"]


def lower(x, y, batch):
    """Not quadratic in y; a weight for each example, and a ridge."""
    squares = jnp.sum(y["slope"] ** 2) + y["shift"] ** 2
    loss = jax.nn.sigmoid(x["weight"]) * (1 + _residual(y, batch) ** 2) ** 0.75
    return loss + jnp.exp(x["ridge"][0]) * squares, batch["weights"]


PROBLEM = bilevel.Bilevel(upper, lower)


def upper_weighing(x, y, batch):
    losses, weights = upper(x, y, batch)
    return losses, weights * jnp.exp(x["ridge"][0] * jnp.tanh(_residual(y, batch)))


def lower_weighing(x, y, batch):
    losses, weights = lower(x, y, batch)
    return losses, weights * jax.nn.sigmoid(x["weight"]) / (1 + _residual(y, batch) ** 2)


WEIGHING = bilevel.Bilevel(upper_weighing, lower_weighing)  # its weights depend on x and y


def start(seed=1):
    """(x, y)"""
    rng = np.random.default_rng(seed)
    x = {"weight": PerExample(rng.normal(size=NUM_LOWER)), "ridge": rng.normal(size=1) - 1}
    return x, {"slope": rng.normal(size=SIZE), "shift": np.array(0.3)}


@functools.cache
def without_rows(problem=PROBLEM):
    """The same without per-example variables, for forward mode and learned rates."""

    def plain(loss):
        return lambda x, y, batch: loss({"weight": batch["targets"], **x}, y, batch)

    return bilevel.Bilevel(plain(problem.upper), plain(problem.lower))


LOWER = bilevel.descent(optax.sgd(0.05, momentum=0.5))
NEUMANN = bilevel.neumann(3, 0.05)
KINDS = {
    "value_gap": lambda: bilevel.value_gap(LOWER, 3, multiplier=4.0),
    "central": lambda: bilevel.value_gap(LOWER, 2, central=True),
    "cg": lambda: bilevel.implicit(LOWER, 2, solve=bilevel.cg(3, 0.1)),
    "finite_differences": lambda: bilevel.implicit(LOWER, 2, solve=NEUMANN, cross="fd"),
    "reverse": lambda: bilevel.unroll(LOWER, 3),
    "checkpointed": lambda: bilevel.unroll(LOWER, 5, checkpoint=True, start="cold"),
    "worst": lambda: bilevel.unroll(LOWER, 3, pick="worst", start="learned"),
    "aggregated": lambda: bilevel.unroll(bilevel.aggregate(optax.sgd(0.05)), 3),
}
FORWARD = lambda: bilevel.unroll(LOWER, 2, mode="forward")  # noqa: E731


@functools.cache
def given(name, seed=1, problem=PROBLEM):
    """(problem, x, y, estimator) of a kind, `forward`, or a recipe."""
    x, y = start(seed)
    if name == "forward":
        return without_rows(problem), {"ridge": x["ridge"]}, y, FORWARD()
    if name in KINDS:
        return problem, Learned(x, y) if name == "worst" else x, y, KINDS[name]()
    recipe = RECIPES[name]
    estimator = recipe.make(optax.sgd(0.05), 2)
    if name in ("fhg", "meta_sgd"):
        problem, x = without_rows(problem), {"ridge": x["ridge"]}
    if name == "meta_sgd":
        x = {**x, "rates": jax.tree.map(lambda leaf: np.full_like(leaf, 0.05), y)}
    return problem, Learned(x, y) if recipe.learns_start else x, y, estimator


def ridge():
    """(problem, x, y, sources by their names) of a ridge, whose logarithm is x."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(96, 3)).astype(np.float32)
    targets = inputs @ np.ones(3, np.float32) + rng.normal(size=96).astype(np.float32)

    def upper(x, y, batch):
        return (batch["inputs"] @ y - batch["targets"]) ** 2

    def lower(x, y, batch):
        return upper(x, y, batch) + jnp.exp(x) * jnp.sum(y**2)

    parts = {"upper_source": slice(32, None), "lower_source": slice(32)}
    sources = {k: {"inputs": inputs[part], "targets": targets[part]} for k, part in parts.items()}
    return bilevel.Bilevel(upper, lower), np.float32(1.0), np.zeros(3, np.float32), sources


def alone(problem, x, y, estimator, tx, batches, steps):
    """x and y after some outer steps on one device, and the last info."""
    x, state, opt = jax.tree.map(jnp.asarray, x), None, tx.init(x)
    step = walking.compiled(problem, estimator)
    for each in batches if isinstance(batches, list) else [batches] * steps:
        found = step(x, y, each, state)
        updates, opt = tx.update(found.grad_x, opt, x)
        x, state = optax.apply_updates(x, updates), found.state
    return x, state.y, found.info


def run_of(problem, x, y, estimator, tx, *, sets=None, **fields):
    """A `BilevelRun` of four workers."""
    sets = dict(zip(("upper_source", "lower_source"), sets or sources(), strict=True))
    options = {"microbatch_size": 2, "workers": 4, "loss_over": "microbatch", **sets, **fields}
    return run_lib.BilevelRun(problem, x, y, estimator, tx, **options)


def in_rounds(problem, x, y, estimator, tx, steps, **fields):
    """(x, y, info of the last step, its rounds) after some outer steps on workers.

    A round is (what was asked, the microbatches that were done, the report).
    """
    with run_of(problem, x, y, estimator, tx, **fields) as run:
        state = run.init()
        for _ in range(steps):
            state, step = run.step(state)
        rounds = [(asked.what, asked.report.done, asked.report.read()) for asked in step.asked]
        return run.read(state.x), run.params(state)["y"], run.own_row(step.info), rounds


def whole():
    return Batches(*sources())


def moved(before, after):
    """How far x has moved: the hypergradients, by the outer optimiser."""
    return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), before, after)


distance = walking.apart
