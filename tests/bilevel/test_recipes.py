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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*steps of y crossed the barrier")  # they are halved
def test_descent_by_every_recipe_lowers_the_upper_loss():
    """From the same start; DARTS of the first order has no direct gradient here, and stays.

    But IGA, whose quotient means little near the lower minimum, where warm steps soon are.
    """
    for key, recipe in bilevel.RECIPES.items():
        if key == "iga":
            continue
        problem, x = given(key)
        numbers = {"steps": 10} if key == "v_pbgd" else {}
        estimator = recipe.make(optax.sgd(RATE), 10, **numbers)
        rate = 0.002 if key == "meta_sgd" else 0.02  # rates of steps move fast

        def step(carry, _, problem=problem, estimator=estimator, rate=rate):
            x, state = carry
            found = bilevel.hypergradient(problem, estimator, x, Y, None, state)
            return (
                jax.tree.map(lambda a, g: a - rate * g, x, found.grad_x),
                found.state,
            ), found.state.y

        first = bilevel.hypergradient(problem, estimator, x, Y)
        (end, _), _ = jax.lax.scan(step, (x, first.state), length=200)
        if key == "darts_first_order":
            np.testing.assert_array_equal(end, x)
        elif key == "reptile":
            target = np.linalg.solve(A, B @ X + C)
            before, after = (np.linalg.norm(s - target) for s in (x.start, end.start))
            assert after < 0.7 * before
        else:
            before, after = (true_upper(key, each) for each in (x, end))
            assert after < 0.9 * before, key


def true_upper(key, x):
    """F after ten steps where the start is learned; else at the lower minimum."""
    if not bilevel.RECIPES[key].learns_start:
        return float(upper(x, np.linalg.solve(A, B @ x + C), None))
    rates = x.x["rates"] if key == "meta_sgd" else RATE
    inner = X if key == "meta_sgd" else x.x
    y = np.array(x.start)
    for _ in range(10):
        y = y - rates * (A @ y - B @ inner - C)
    return float(upper(inner, y, None))


def test_the_table_counts_what_the_programs_ask():
    text = bilevel.recipes.table(optax.sgd(RATE), 5, X, start=Y)
    lines = text.splitlines()
    assert len(lines) == 2 + len(bilevel.RECIPES)
    row = next(line for line in lines if line.startswith("| `rhg`"))
    assert "| 0 | 6 | 5 | 5 |" in row
    forward = next(line for line in lines if line.startswith("| `fhg`"))
    assert f"| 0 | 6 | {5 * NUM_UPPER} | 0 |" in forward
    assert len(bilevel.recipes.table(optax.sgd(RATE), 5, X).splitlines()) == len(lines) - 5
    for recipe in bilevel.RECIPES.values():
        assert recipe.paper
        assert recipe.assumes


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
