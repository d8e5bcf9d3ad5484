"""How errors fall: with the steps, with the multiplier, with the distance of differences."""

import jax.flatten_util
import numpy as np
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

LOWER = bilevel.descent(optax.sgd(identities.STEP))


def test_the_error_of_unrolling_falls_by_the_largest_factor_of_a_step(float64):
    """`log |error|` over T has the slope `log rho(I - s A)`."""
    p1 = problems.quadratic()
    steps, errors = (60, 70, 80), []
    for T in steps:
        found = walking.jitted(p1.problem, bilevel.unroll(LOWER, T), p1.x, p1.y).grad_x
        errors.append(np.log(np.linalg.norm(found - p1.exact)))
    rho = np.abs(1 - identities.STEP * np.linalg.eigvalsh(p1.A)).max()
    assert np.polyfit(steps, errors, 1)[0] == pytest.approx(np.log(rho), rel=0.02)


@pytest.mark.parametrize(("central", "slope"), [(False, -1.0), (True, -2.0)])
def test_the_error_of_a_value_gap_falls_with_its_multiplier(central, slope, float64):
    p1, errors = problems.quadratic(), []
    multipliers = (200.0, 400.0, 800.0)
    for multiplier in multipliers:
        estimator = bilevel.value_gap(LOWER, 300, multiplier=multiplier, central=central)
        found = walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x
        errors.append(np.log(np.linalg.norm(found - p1.exact)))
    fitted = np.polyfit(np.log(multipliers), errors, 1)[0]
    assert fitted == pytest.approx(slope, rel=0.02)


def test_the_error_of_differences_falls_with_the_square_of_their_step(float64):
    case = problems.mlp()

    def found(**cross):
        estimator = bilevel.implicit(LOWER, 3, solve=bilevel.scaled(0.5), **cross)
        return jax.flatten_util.ravel_pytree(
            walking.jitted(case.problem, estimator, case.x, case.y).grad_x
        )[0]

    distances, exact = (0.1, 0.05, 0.025), found()
    errors = [np.linalg.norm(found(cross="fd", fd_step=d) - exact) for d in distances]
    fitted = np.polyfit(np.log(distances), np.log(errors), 1)[0]
    assert fitted == pytest.approx(2.0, rel=0.02)
