"""The methods of the literature, each as one expression: what they estimate, and what they ask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import problems

pytestmark = pytest.mark.usefixtures("float64")
RATE = 0.2
P1 = problems.quadratic()
PROBLEM, X, Y = P1.problem, P1.x, P1.y
EXACT_BY_MANY_STEPS = ("fhg", "rhg", "cg", "f2sa_central")


def given(key):
    if key == "meta_sgd":
        learned = bilevel.Learned({"rates": np.full(len(Y), RATE)}, Y)
        of_x = (functools.partial(loss, X) for loss in PROBLEM)
        return bilevel.Bilevel(*(lambda x, y, b, own=own: own(y, b) for own in of_x)), learned
    learns = bilevel.RECIPES[key].learns_start
    return PROBLEM, bilevel.Learned(X, Y) if learns else X


@pytest.mark.parametrize("key", bilevel.RECIPES)
@pytest.mark.filterwarnings("ignore:.*steps of y crossed the barrier")  # they are halved
def test_every_recipe_runs_under_jit_and_from_its_state(key):
    problem, x = given(key)
    estimator = bilevel.RECIPES[key].make(optax.sgd(RATE), 5)
    jitted = jax.jit(functools.partial(bilevel.hypergradient, problem, estimator))
    first = jitted(x, Y, None, None)
    second = jitted(x, Y, None, first.state)
    for result in (first, second):
        assert jax.tree.structure(result.grad_x) == jax.tree.structure(x)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.grad_x))
        bilevel.check(result)
    assert int(second.state.turn) == 2
    assert first.info.cost == bilevel.RECIPES[key].cost(optax.sgd(RATE), 5, x)


@pytest.mark.parametrize("key", EXACT_BY_MANY_STEPS)
def test_after_many_steps_the_gradient_is_that_of_the_best_response(key):
    numbers = {"multiplier": 1e4} if key == "f2sa_central" else {}
    estimator = bilevel.RECIPES[key].make(optax.sgd(RATE), 300, **numbers)
    found = jax.jit(lambda x: bilevel.hypergradient(PROBLEM, estimator, x, Y))(X)
    np.testing.assert_allclose(found.grad_x, P1.exact, rtol=1e-6)


def test_the_table_counts_what_the_programs_ask():
    lines = bilevel.recipes.table(optax.sgd(RATE), 5, X, start=Y).splitlines()
    assert len(lines) == 2 + len(bilevel.RECIPES)
    for key, cost in (("rhg", "0 | 6 | 5 | 5"), ("fhg", f"0 | 6 | {5 * len(X)} | 0")):
        (row,) = [line for line in lines if line.startswith(f"| `{key}`")]
        assert f"| {cost} |" in row


@pytest.mark.parametrize(
    "make",
    [
        lambda steps: bilevel.unroll(steps, 3),
        lambda steps: bilevel.unroll(steps, 3, checkpoint=True),
        lambda steps: bilevel.unroll(steps, 3, mode="forward"),
        lambda steps: bilevel.implicit(steps, 3),
        lambda steps: bilevel.implicit(steps, 3, warm=False),
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
        updates, opt = tx.update(jax.grad(PROBLEM.lower, 1)(X, y, None), opt, y)
        y = optax.apply_updates(y, updates)
    memory = twice.state.memory
    reached = memory[1] if isinstance(memory, tuple) and memory else twice.state.y
    np.testing.assert_allclose(reached, y, rtol=1e-12)
    of_x = bilevel.descent(lambda x: tx)
    anew = bilevel.hypergradient(PROBLEM, make(of_x), X, Y)
    anew = bilevel.hypergradient(PROBLEM, make(of_x), X, Y, None, anew.state)
    assert np.abs(anew.state.y - twice.state.y).max() > 1e-3
