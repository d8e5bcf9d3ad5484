"""Warm, cold and learned starts, and what conjugate gradients tell of themselves."""

import numpy as np
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

LOWER = bilevel.descent(optax.sgd(identities.STEP))


def twice(estimator, x=None):
    """Two hypergradients of P1, one after the other."""
    p1 = problems.quadratic()
    x = p1.x if x is None else x
    first = walking.jitted(p1.problem, estimator, x, p1.y)
    return first, walking.jitted(p1.problem, estimator, x, p1.y, state=first.state)


@pytest.mark.parametrize(
    "estimator",
    [
        bilevel.unroll(LOWER, 5),
        bilevel.unroll(LOWER, 5, checkpoint=True),
        bilevel.unroll(LOWER, 5, mode="forward"),
        bilevel.implicit(LOWER, 5),
        bilevel.implicit(LOWER, 5, warm=False),
    ],
)
def test_a_warm_start_goes_on_where_the_last_one_ended(estimator, float64):
    p1 = problems.quadratic()
    first, second = twice(estimator)
    np.testing.assert_allclose(first.state.y, p1.descended(5, identities.STEP), rtol=1e-13)
    np.testing.assert_allclose(second.state.y, p1.descended(10, identities.STEP), rtol=1e-13)
    assert int(second.state.turn) == 2


def test_a_cold_start_finds_the_same_again(float64):
    first, second = twice(bilevel.unroll(LOWER, 5, start="cold"))
    np.testing.assert_array_equal(first.grad_x, second.grad_x)
    np.testing.assert_array_equal(first.state.y, second.state.y)


def test_a_learned_start_is_where_the_lower_level_begins(float64):
    """Whatever the state and y say; and `start - y_T` is the step times the gradients (Reptile)."""
    p1 = problems.quadratic()
    estimator = bilevel.unroll(LOWER, 5, start="learned", back=0)
    first, second = twice(estimator, bilevel.Learned(p1.x, p1.y))
    np.testing.assert_array_equal(first.state.y, second.state.y)
    total, y = 0.0, p1.y
    for _ in range(5):
        gradient = p1.A @ y - p1.B @ p1.x - p1.c
        total, y = total + gradient, y - identities.STEP * gradient
    np.testing.assert_allclose(p1.y - first.state.y, identities.STEP * total, rtol=1e-13)


def test_a_warm_system_begins_at_its_last_solution(float64):
    """Two steps at a time of conjugate gradients, where the lower level does not move."""
    p1 = problems.quadratic()
    p1 = p1._replace(y=p1.best)
    residuals, state = [], None
    for _ in range(6):
        estimator = bilevel.implicit(LOWER, 1, solve=bilevel.cg(2))
        result = walking.jitted(p1.problem, estimator, p1.x, p1.y, state=state)
        state = result.state
        residuals.append(float(result.info.residual))
    assert all(np.diff(residuals) < 0)
    assert residuals[-1] < 1e-3 * residuals[0]
    cold = bilevel.implicit(LOWER, 1, solve=bilevel.cg(2), warm=False)
    again = walking.jitted(p1.problem, cold, p1.x, p1.y, state=state._replace(memory=()))
    assert float(again.info.residual) == pytest.approx(residuals[0], rel=1e-9)


def test_residual_and_error_of_conjugate_gradients_fall_with_each_step(float64):
    """The residual that is told is the true one; the error falls in the norm of H."""
    p1 = problems.quadratic()
    right = p1.descended(300, identities.STEP) - p1.t
    solution = np.linalg.solve(p1.A, right)
    residuals, errors = [1.0], [solution @ p1.A @ solution]
    for Q in (1, 2, 3, 4, 5):
        estimator = bilevel.implicit(LOWER, 300, solve=bilevel.cg(Q))
        result = walking.jitted(p1.problem, estimator, p1.x, p1.y)
        v = np.asarray(result.state.memory)
        true = np.linalg.norm(right - p1.A @ v) / np.linalg.norm(right)
        assert float(result.info.residual) == pytest.approx(true, abs=1e-14)
        residuals.append(true)
        errors.append((v - solution) @ p1.A @ (v - solution))
    assert all(np.diff(residuals) < 0), residuals
    assert all(np.diff(errors) < 0), errors
    assert residuals[-1] < 1e-13
    curvatures = np.linalg.eigvalsh(p1.A)
    assert curvatures[0] <= float(result.info.curvature) <= curvatures[-1]
