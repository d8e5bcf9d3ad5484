"""The identities between the families, each at 1e-10 or tighter."""

import pytest

from tests.bilevel import identities


@pytest.mark.parametrize("name", identities.IDENTITIES)
def test_identity_holds(name, float64):
    assert identities.IDENTITIES[name]() < 1e-11
