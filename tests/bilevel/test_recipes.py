"""The methods of the literature, each as one expression: what they estimate, and what they ask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
SIZE, NUM_UPPER, RATE = 4, 3, 0.2
A = np.diag([1.0, 1.5, 2.0, 2.5])
B, C, T = (RNG.normal(size=shape) for shape in ((SIZE, NUM_UPPER), SIZE, SIZE))
X, Y = RNG.normal(size=NUM_UPPER), RNG.normal(size=SIZE)
EXACT_BY_MANY_STEPS = ("fhg", "rhg", "cg", "f2sa_central")


def lower(x, y, batch):
    return 0.5 * y @ A @ y - (B @ x + C) @ y


def upper(x, y, batch):
    return 0.5 * jnp.sum((y - T) ** 2)


PROBLEM = bilevel.Bilevel(upper, lower)


def given(key):
    if key == "meta_sgd":
        learned = bilevel.Learned({"rates": np.full(SIZE, RATE)}, Y)
        return bilevel.Bilevel(
            lambda x, y, batch: upper(X, y, batch), lambda x, y, batch: lower(X, y, batch)
        ), learned
    learns = bilevel.RECIPES[key].learns_start
    return PROBLEM, bilevel.Learned(X, Y) if learns else X


@pytest.mark.parametrize("key", bilevel.RECIPES)
@pytest.mark.filterwarnings("ignore:.*steps of y crossed the barrier")  # they are halved
def test_every_recipe_runs_under_jit_and_from_its_state(key):
    problem, x = given(key)
    estimator = bilevel.RECIPES[key].make(optax.sgd(RATE), 5)
    jitted = jax.jit(
        lambda x, y, state: bilevel.hypergradient(problem, estimator, x, y, None, state)
    )
    first = jitted(x, Y, None)
    second = jitted(x, Y, first.state)
    for result in (first, second):
        assert jax.tree.structure(result.grad_x) == jax.tree.structure(x)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.grad_x))
        bilevel.check(result)
    assert int(second.state.turn) == 2
    assert first.info.cost == bilevel.RECIPES[key].cost(optax.sgd(RATE), 5, x)


@pytest.mark.parametrize("key", EXACT_BY_MANY_STEPS)
def test_after_many_steps_the_gradient_is_that_of_the_best_response(key):
    y = np.linalg.solve(A, B @ X + C)
    exact = B.T @ np.linalg.solve(A, y - T)
    numbers = {"multiplier": 1e4} if key == "f2sa_central" else {}
    estimator = bilevel.RECIPES[key].make(optax.sgd(RATE), 300, **numbers)
    found = jax.jit(lambda x: bilevel.hypergradient(PROBLEM, estimator, x, Y))(X)
    np.testing.assert_allclose(found.grad_x, exact, rtol=1e-6)


def test_the_table_counts_what_the_programs_ask():
    text = bilevel.recipes.table(optax.sgd(RATE), 5, X, start=Y)
    lines = text.splitlines()
    assert len(lines) == 2 + len(bilevel.RECIPES)
    row = next(line for line in lines if line.startswith("| `rhg`"))
    assert "| 0 | 6 | 5 | 5 |" in row
    forward = next(line for line in lines if line.startswith("| `fhg`"))
    assert f"| 0 | 6 | {5 * NUM_UPPER} | 0 |" in forward


@pytest.mark.parametrize(
    "make",
    [
        lambda steps: bilevel.unroll(steps, 3),
        lambda steps: bilevel.unroll(steps, 3, checkpoint=True),
        lambda steps: bilevel.implicit(steps, 3),
        lambda steps: bilevel.value_gap(steps, 3),
    ],
)
def test_the_lower_optimiser_goes_on_where_y_does(make):
    """Two hypergradients of three steps reach what plain momentum reaches in six."""
    tx = optax.sgd(0.1, momentum=0.9)
    twice = bilevel.hypergradient(PROBLEM, make(bilevel.descent(tx)), X, Y)
    twice = bilevel.hypergradient(PROBLEM, make(bilevel.descent(tx)), X, Y, None, twice.state)
    y, opt = jnp.asarray(Y), tx.init(jnp.asarray(Y))
    for _ in range(6):
        updates, opt = tx.update(jax.grad(lower, 1)(X, y, None), opt, y)
        y = optax.apply_updates(y, updates)
    memory = twice.state.memory
    reached = memory[1] if isinstance(memory, tuple) and memory else twice.state.y
    np.testing.assert_allclose(reached, y, rtol=1e-12)
    of_x = bilevel.descent(lambda x: tx)
    anew = bilevel.hypergradient(PROBLEM, make(of_x), X, Y)
    anew = bilevel.hypergradient(PROBLEM, make(of_x), X, Y, None, anew.state)
    assert np.abs(anew.state.y - twice.state.y).max() > 1e-3
