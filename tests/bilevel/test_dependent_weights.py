"""Weights that depend on x or y: the quotient rule, in every estimator, whole and in blocks."""

import functools
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel.problem import At, Kind, What
from tests.bilevel import walking

pytestmark = pytest.mark.usefixtures("float64")
NUM, SIZE, RATE = 12, 3, 0.3
STEPS = bilevel.descent(optax.sgd(RATE))


class Rows(NamedTuple):
    inputs: np.ndarray  # [n, 3]
    targets: np.ndarray  # [n]
    index: np.ndarray  # i[n]
    weights: np.ndarray  # [n]


def misfit(y, batch):
    return jnp.sqrt(1 + (batch.inputs @ y - batch.targets) ** 2)


def lower_losses(x, y, batch):
    return misfit(y, batch) + jnp.exp(x["log_ridge"]) * jnp.sum(y**2) / 2


def of_row(x, batch):
    return jax.nn.sigmoid(x["rows"][batch.index])


def of_data(x, y, batch):
    return batch.weights


WEIGHTS = {  # of the lower level, of the upper level
    "lower of x": (lambda x, y, batch: of_row(x, batch), of_data),
    "lower of y": (lambda x, y, batch: 1 / (1 + misfit(y, batch)), of_data),
    "both of both": (
        lambda x, y, batch: of_row(x, batch) / (1 + misfit(y, batch)),
        lambda x, y, batch: jnp.exp(x["tilt"] * misfit(y, batch)),
    ),
    "upper of x": (of_data, lambda x, y, batch: jnp.exp(x["tilt"] * batch.targets)),
    "none": (of_data, of_data),
}


def weighted(name):
    """Losses of one number an example, and their weights."""
    of_lower, of_upper = WEIGHTS[name]
    return bilevel.Bilevel(
        lambda x, y, batch: (misfit(y, batch), of_upper(x, y, batch)),
        lambda x, y, batch: (lower_losses(x, y, batch), of_lower(x, y, batch)),
    )


def by_hand(name):
    """The same as scalars."""

    def scalar(loss):
        def mean(x, y, batch):
            losses, weights = loss(x, y, batch)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        return mean

    return bilevel.Bilevel(*map(scalar, weighted(name)))


def made(seed=0):
    rng = np.random.default_rng(seed)
    x = {"rows": rng.normal(size=NUM), "log_ridge": np.float64(-1), "tilt": np.float64(0.3)}

    def rows():
        weights = rng.uniform(0.2, 3, size=NUM)
        return Rows(rng.normal(size=(NUM, SIZE)), rng.normal(size=NUM), np.arange(NUM), weights)

    y, batches = rng.normal(size=SIZE), bilevel.Batches(rows(), rows())
    return jax.tree.map(jnp.asarray, x), jnp.asarray(y), batches


def in_blocks(batches, size=3):
    return bilevel.Batches(*(bilevel.Blocks.of(batch, size) for batch in batches))


def differences(function, x, step=1e-4):
    """The gradient of `function(x)` by central differences of the fourth order."""
    flat, rebuilt = jax.flatten_util.ravel_pytree(x)
    rows = jnp.concatenate([k * step * jnp.eye(flat.size) for k in (1, -1, 2, -2)])
    values = jax.lax.map(lambda d: function(rebuilt(flat + d)), rows).reshape(4, -1)
    return rebuilt((8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step))


def descended(loss, x, y, num_steps, rate=RATE):
    return jax.lax.fori_loop(0, num_steps, lambda _, y: y - rate * jax.grad(loss, 1)(x, y), y)


# --- Against finite differences of what the estimator differentiates ---

CONVERGED = 400


def after_steps(problem, batches, y, num_steps):
    return lambda x: problem.upper(
        x,
        descended(lambda x, y: problem.lower(x, y, batches.lower), x, y, num_steps),
        batches.upper,
    )


def penalised(problem, batches, y, multiplier):
    """`min_y (F + lambda f) - lambda min_z f`."""

    def lower(x, y):
        return problem.lower(x, y, batches.lower)

    def both(x, y):
        return problem.upper(x, y, batches.upper) / multiplier + lower(x, y)

    def value(x):
        y_of, z_of = (descended(loss, x, y, CONVERGED) for loss in (both, lower))
        return multiplier * (both(x, y_of) - lower(x, z_of))

    return value


EXACT = {
    "unroll": (bilevel.unroll(STEPS, 3), 3),
    "unroll, forward": (bilevel.unroll(STEPS, 3, mode="forward"), 3),
    "unroll, checkpoints": (bilevel.unroll(STEPS, 3, checkpoint=True), 3),
    "conjugate gradients": (
        bilevel.implicit(STEPS, CONVERGED, solve=bilevel.cg(SIZE)),
        CONVERGED,
    ),
    "Neumann": (bilevel.implicit(STEPS, CONVERGED, solve=bilevel.neumann(400, RATE)), CONVERGED),
    "value gap": (bilevel.value_gap(STEPS, CONVERGED, multiplier=10.0), None),
}


# An estimator sees nothing of weights or blocks: `problem_lib.answer` answers its requests. That is
# compared below for every kind of request, of weights, and of batch. So here every estimator takes
# the weights that depend on all, and all other weights meet each kind of derivative: gradients,
# products and tangents.
CASES = [
    *[(key, "both of both", cut) for key in EXACT for cut in (False, True)],
    *[
        (key, name, cut)
        for name in WEIGHTS
        if name != "both of both"
        for key, cut in (
            ("unroll", False),
            ("unroll, forward", True),
            ("conjugate gradients", True),
        )
    ],
]


@functools.cache
def by_differences(name, num_steps):
    x, y, batches = made()
    problem = by_hand(name)
    value = penalised(problem, batches, y, 10.0)
    if num_steps is not None:
        value = after_steps(problem, batches, y, num_steps)
    return jax.jit(lambda x: differences(value, x), compiler_options=walking.QUICKLY)(x)


@pytest.mark.parametrize(
    ("key", "name", "cut"),
    CASES,
    ids=[f"{key}-{name}-{'blocks' if cut else 'whole'}" for key, name, cut in CASES],
)
def test_the_hypergradient_is_that_of_differences(key, name, cut):
    x, y, batches = made()
    estimator, num_steps = EXACT[key]
    expected = by_differences(name, num_steps)
    given = in_blocks(batches) if cut else batches
    found = walking.jitted(weighted(name), estimator, x, y, given).grad_x
    assert walking.apart(expected, found) < 1e-7


# --- Every recipe, exact or not: as of the quotient written as a scalar ---


# Constant weights: one recipe for each family, and for each kind of request.
OF_RECIPES = [
    *[(key, "both of both") for key in bilevel.RECIPES],
    *[(key, "none") for key in ("fhg", "rhg", "reptile", "cg", "bvfim")],
]


@pytest.mark.parametrize(("key", "name"), OF_RECIPES)
@pytest.mark.filterwarnings("ignore:.*steps of y crossed the barrier")
def test_every_recipe_is_that_of_the_quotient_as_a_scalar(key, name):
    x, y, batches = made()
    recipe = bilevel.RECIPES[key]
    estimator = recipe.make(optax.sgd(RATE), 3)
    if key == "meta_sgd":
        x = {**x, "rates": np.full(SIZE, RATE)}
    if recipe.learns_start:
        x = bilevel.Learned(x, y)
    given = batches if name == "none" else in_blocks(batches)  # whole ones are compared above, too
    expected = walking.jitted(by_hand(name), estimator, x, y, batches)
    found = walking.jitted(weighted(name), estimator, x, y, given)
    assert walking.apart(expected, found) < 1e-12


# --- Each kind of request ---

VECTOR = np.arange(1.0, 1 + SIZE)
REQUESTS = [
    What(Kind.LOSS, "lower"),
    What(Kind.GRADIENT, "upper", ("x",)),
    What(Kind.GRADIENT, "lower", ("x", "y")),
    What(Kind.PRODUCTS, "lower", ("y",)),
    What(Kind.PRODUCTS, "upper", ("x",)),
    What(Kind.PRODUCTS, "lower", ("x", "y")),
    What(Kind.TANGENTS, "lower", num_tangents=2),
]


def placed(what, x, y):
    """Where a request is made, and along what."""
    rows = jax.tree.map(lambda a: jnp.stack([a + 1, 2 * a - 1]), (x, y))
    tangents = rows if what.kind is Kind.TANGENTS else ()
    return At(x, y, vector=VECTOR if what.kind is Kind.PRODUCTS else (), tangents=tangents)


def answers(what, at, *asked):
    """Of each (problem, batch), in one program."""

    def of_all(at, batches):
        pairs = zip(asked, batches, strict=True)
        return [problem_lib.answer(problem, what, at, batch) for (problem, _), batch in pairs]

    batches = [batch for _, batch in asked]
    return jax.jit(of_all, compiler_options=walking.QUICKLY)(at, batches)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("what", REQUESTS, ids=lambda w: f"{w.kind.value} {w.level} {w.wrt}")
def test_every_request_in_blocks_is_that_of_the_whole(what, name):
    x, y, batches = made()
    at, batch = placed(what, x, y), getattr(batches, what.level)
    blocks, problem = bilevel.Blocks.of(batch, 4), weighted(name)
    expected, *others = answers(
        what, at, (by_hand(name), batch), (problem, batch), (problem, blocks)
    )
    for found in others:
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert walking.apart(expected, found) < 1e-12


def test_the_mean_of_blocks_of_unequal_weight_is_that_of_all():
    """By hand: losses 1 and 3 of weights 3 and 1: (3 + 3) / 4, and not (1 + 3) / 2."""
    problem = bilevel.Bilevel(
        lambda x, y, batch: y**2, lambda x, y, batch: (y * batch["loss"], batch["weight"])
    )
    blocks = bilevel.Blocks({"loss": np.array([[1.0], [3.0]]), "weight": np.array([[3.0], [1.0]])})
    what = What(Kind.GRADIENT, "lower")
    found = problem_lib.answer(problem, what, At(jnp.zeros(()), jnp.ones(())), blocks)
    assert float(found.loss) == float(found.y) == 1.5


def test_masked_blocks_count_by_what_is_left_of_them():
    """A mask of truths; one block is all padding."""
    x, y, batches = made()
    mask = np.arange(NUM) < 7

    def masked(loss):
        return lambda x, y, rows: (loss(x, y, rows["batch"])[0], rows["mask"])

    problem = bilevel.Bilevel(*map(masked, weighted("none")))
    rows = {"batch": batches.lower, "mask": mask}
    some = jax.tree.map(lambda leaf: leaf[mask], rows)
    for what in REQUESTS[1:4]:
        at = placed(what, x, y)
        with jax.numpy_dtype_promotion("standard"):
            blocks = bilevel.Blocks.of(rows, 4)
            expected, found = answers(what, at, (problem, some), (problem, blocks))
        assert walking.apart(expected, found) < 1e-12


# --- Constant weights cost nothing ---


def test_stopped_weights_are_constant():
    x, y, batches = made()
    of_lower, of_upper = WEIGHTS["both of both"]
    stop = jax.lax.stop_gradient

    def fixed(x, y, batch):
        return jax.tree.map(stop, (of_lower(x, y, batch), of_upper(x, y, batch)))

    lower_weights, upper_weights = fixed(x, y, batches.lower)[0], fixed(x, y, batches.upper)[1]
    stopped = bilevel.Bilevel(
        lambda x, y, batch: (misfit(y, batch), fixed(x, y, batch)[1]),
        lambda x, y, batch: (lower_losses(x, y, batch), fixed(x, y, batch)[0]),
    )
    numbers = bilevel.Bilevel(
        lambda x, y, batch: (misfit(y, batch), upper_weights),
        lambda x, y, batch: (lower_losses(x, y, batch), lower_weights),
    )
    for what in REQUESTS[1:6]:
        at = placed(what, x, y)
        batch = getattr(batches, what.level)
        blocks = bilevel.Blocks.of(batch, 4)
        found = answers(what, at, (numbers, batch), (stopped, batch), (stopped, blocks))
        assert walking.apart(*found) < 1e-12


@pytest.mark.parametrize("what", REQUESTS, ids=lambda w: f"{w.kind.value} {w.level} {w.wrt}")
def test_constant_weights_have_the_program_of_a_number_that_divides(what):
    """No gradient of the denominator: the program is that of a denominator that is held."""
    x, y, batches = made()
    problem = weighted("none")

    def held(loss):
        def mean(x, y, batch):
            losses, weights = loss(x, y, batch)
            total = jax.lax.stop_gradient(jnp.sum(weights))
            return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1)

        return mean

    at = placed(what, x, y)

    def program(problem):
        batch = getattr(batches, what.level)
        return jax.jit(lambda at, b: problem_lib.answer(problem, what, at, b)).lower(at, batch)

    by_number = program(bilevel.Bilevel(*map(held, problem)))
    assert program(problem).as_text() == by_number.as_text()
