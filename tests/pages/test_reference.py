"""The page of each public name: it is there, and says shapes, units and errors."""

import numpy as np
import pytest

import hetjax
from docs.extensions import reference
from tests.pages import said

NAMES = dict(reference.public_names())


def test_every_public_name_has_a_page():
    rooms = hetjax._ROOMS
    public = {f"hetjax.{name}" for name in hetjax.__all__ if name not in rooms}
    for room in rooms:
        found = vars(getattr(hetjax, room))
        of_us = {n for n, x in found.items() if getattr(x, "__module__", "").startswith("hetjax.")}
        ours = [name for name in of_us if not name.startswith("_")]
        public |= {f"hetjax.{room}.{name}" for name in found.get("__all__", ours)}
    assert public <= NAMES.keys()
    assert len(NAMES) > 140


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_shapes_units_and_errors(name):
    assert list(said.lacks(NAMES[name])) == []


def refusing(count: int, x: np.ndarray) -> tuple[int, np.ndarray]:
    """It counts.

    Args:
        x: f64[n].
    """
    if count < 0:
        raise ValueError("negative")
    return count, x


def test_what_a_docstring_lacks_is_found():
    assert list(said.lacks(refusing)) == [
        "the argument count",
        "what it returns, tuple[int, np.ndarray]",
        "its errors",
    ]
