"""The page of each public name: it is there, and says shapes, units and errors."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import hetjax
from docs.extensions import reference
from hetjax import ordering, parts
from tests.pages import said

NAMES = dict(reference.public_names())


def test_every_public_name_has_a_page():
    rooms = ("bilevel", "gates", "ordering", "parts", "quota", "ray", "topology", "writers")
    public = {f"hetjax.{name}" for name in hetjax.__all__ if name not in rooms}
    for room in rooms:
        public |= {f"hetjax.{room}.{name}" for name in getattr(hetjax, room).__all__}
    assert public <= NAMES.keys()
    assert len(NAMES) > 140


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_shapes_units_and_errors(name):
    assert list(said.lacks(NAMES[name])) == []


def test_a_page_has_the_options_of_a_factory():
    text = said.full_docstring(ordering.pair_balance)
    assert "block_pairs: pairs that get their signs at once, by the running sum before" in text
    assert "them; an integer of at least 1." in text
    assert set(parts.options_of(ordering.pair_balance)) == set(said.arguments_of(text))
    assert "ValueError: an argument is out of range" in text


class Record(NamedTuple):
    """A record, with `told` fields."""

    told: Any
    commented: np.ndarray  # f64[n]
    silent: np.ndarray
    plain_secs: float = 0.0

    def method(self, x: np.ndarray) -> np.ndarray:
        """It does something."""
        return x


def refusing(count: int, x: np.ndarray) -> tuple[int, np.ndarray]:
    """It counts.

    Args:
        x: f64[n].
    """
    if count < 0:
        raise ValueError("negative")
    return count, x


def calling(count: int) -> None:
    """It counts.

    Args:
        count: of things.
    """
    refusing(count, np.zeros(1))


def test_what_a_docstring_lacks_is_found():
    assert list(said.lacks(Record)) == [
        "the field silent",
        "method: the argument x",
        "method: what it returns, np.ndarray",
    ]
    assert list(said.lacks(refusing)) == [
        "the argument count",
        "what it returns, tuple[int, np.ndarray]",
        "its errors",
    ]
    assert said.raises(refusing)
    assert reference.fields(Record)["commented"] == ("np.ndarray", "", "f64[n]")


def test_a_record_of_code_is_a_table():
    (title, *_, last) = reference.additions(Record)
    assert title == "Fields:"
    assert last == "    plain_secs (float):  By default `0.0`."
