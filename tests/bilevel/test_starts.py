"""Cold and learned starts, warm systems, and what conjugate gradients tell of themselves."""

import jax
import numpy as np
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

LOWER = bilevel.descent(optax.sgd(identities.STEP))


@pytest.mark.parametrize("options", [{"start": "cold"}, {"start": "learned", "back": 0}])
def test_a_cold_and_a_learned_start_begin_there_again_whatever_the_state_is(options, float64):
    """So `start - y_T` is the step times the gradients, of which Reptile makes its own."""
    p1, estimator = problems.quadratic(), bilevel.unroll(LOWER, 5, **options)
    x = bilevel.Learned(p1.x, p1.y) if options["start"] == "learned" else p1.x
    first = walking.jitted(p1.problem, estimator, x, p1.y)
    second = walking.jitted(p1.problem, estimator, x, p1.y, state=first.state)
    np.testing.assert_allclose(first.state.y, p1.descended(5, identities.STEP), rtol=1e-13)
    np.testing.assert_array_equal(first.state.y, second.state.y)
    jax.tree.map(np.testing.assert_array_equal, first.grad_x, second.grad_x)


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
