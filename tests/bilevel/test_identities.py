"""The identities between the families, each at 1e-10 or tighter, and the slopes of their errors."""

import pytest

from tests.bilevel import identities, slopes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if "worst" in name else pytest.mark.slow)
        for name in identities.IDENTITIES
    ],
)
def test_identity_holds(name, float64):
    assert identities.IDENTITIES[name]() < 1e-11


@pytest.mark.parametrize("name", slopes.SLOPES)
def test_the_slope_of_the_error_is_that_of_theory(name, float64):
    fitted, wanted = slopes.SLOPES[name]()
    assert fitted == pytest.approx(wanted, rel=0.02)
