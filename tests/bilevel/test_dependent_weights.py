"""Weights that depend on x or y: the quotient rule, in every estimator, whole and in blocks."""

import collections

import jax
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


Rows = collections.namedtuple("Rows", "inputs targets index weights")  # [n, 3], [n], i[n], [n]


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


@pytest.mark.parametrize("key", bilevel.RECIPES)
@pytest.mark.filterwarnings("ignore:.*steps of y crossed the barrier")
def test_every_recipe_is_that_of_the_quotient_as_a_scalar(key):
    """Whole batches, and constant weights, are compared by their requests, below."""
    x, y, batches = made()
    recipe = bilevel.RECIPES[key]
    estimator = recipe.make(optax.sgd(RATE), 3)
    if key == "meta_sgd":
        x = {**x, "rates": np.full(SIZE, RATE)}
    if recipe.learns_start:
        x = bilevel.Learned(x, y)
    blocks = bilevel.Batches(*(bilevel.Blocks.of(batch, 3) for batch in batches))
    expected = walking.jitted(by_hand("both of both"), estimator, x, y, batches)
    found = walking.jitted(weighted("both of both"), estimator, x, y, blocks)
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


each_request = pytest.mark.parametrize(
    "what", REQUESTS, ids=lambda w: f"{w.kind.value} {w.level} {w.wrt}"
)


@pytest.mark.parametrize("name", WEIGHTS)
@each_request
def test_every_request_in_blocks_is_that_of_the_whole(what, name):
    x, y, batches = made()
    at, batch = placed(what, x, y), getattr(batches, what.level)
    problem, asked = weighted(name), (batch, bilevel.Blocks.of(batch, 4))
    expected, *others = answers(what, at, (by_hand(name), batch), *((problem, b) for b in asked))
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


@each_request
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
