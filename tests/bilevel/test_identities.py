"""The identities between the families, each at 1e-10 or tighter, and the slopes of their errors."""

import numpy as np
import optax
import pytest
from jax import flatten_util

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

LOWER = bilevel.descent(optax.sgd(identities.STEP))
ALL_BUT_ONE = [
    pytest.param(name, marks=[] if "worst" in name else pytest.mark.slow)
    for name in identities.IDENTITIES
]


@pytest.mark.parametrize("name", ALL_BUT_ONE)
def test_identity_holds(name, float64):
    assert identities.IDENTITIES[name]() < 1e-11


def check_slope(over, errors, slope):
    """Of `log error` over a log."""
    fitted = np.polyfit(np.log(over), [np.log(np.linalg.norm(each)) for each in errors], 1)[0]
    assert fitted == pytest.approx(slope, rel=0.02)


def test_the_error_of_a_central_value_gap_falls_with_the_square_of_its_multiplier(float64):
    """That of another falls with the multiplier."""
    p1, multipliers, errors = problems.quadratic(), (200.0, 400.0, 800.0), []
    for multiplier in multipliers:
        estimator = bilevel.value_gap(LOWER, 300, multiplier=multiplier, central=True)
        errors.append(walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x - p1.exact)
    check_slope(multipliers, errors, -2.0)


def test_the_error_of_finite_differences_falls_with_the_square_of_their_step(float64):
    case = problems.mlp()

    def found(**cross):
        estimator = bilevel.implicit(LOWER, 3, solve=bilevel.scaled(0.5), **cross)
        result = walking.jitted(case.problem, estimator, case.x, case.y)
        return flatten_util.ravel_pytree(result.grad_x)[0]

    distances, exact = (0.1, 0.05, 0.025), found()
    check_slope(distances, [found(cross="fd", fd_step=d) - exact for d in distances], 2.0)
