"""The identities between the families, each at 1e-10 or tighter, and the slopes of their errors."""

import pytest

from tests.bilevel import identities, slopes

# What Adam does in the same place, with more state, asks for all that these two do.
WITHIN_OTHERS = {
    "reverse, checkpoints, forward and a plain loop agree on the MLP, rate in x",
    "the same for the aggregate of both levels, sgd",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in identities.IDENTITIES if n not in WITHIN_OTHERS])
def test_identity_holds(name, float64):
    assert identities.IDENTITIES[name]() < 1e-11


@pytest.mark.parametrize("name", slopes.SLOPES)
def test_the_slope_of_the_error_is_that_of_theory(name, float64):
    fitted, wanted = slopes.SLOPES[name]()
    assert fitted == pytest.approx(wanted, rel=0.02)
