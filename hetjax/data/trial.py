"""A few examples are read twice before the run: are they the same again?

A source that changes what it gives (random augmentation) must not be read once for all epochs.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import leaves, sources

_MOST = 48  # examples that are read twice; of sources that flip one in ten, 1 in 1e4 escapes


class Difference(NamedTuple):
    """An example that was another one when it was read again."""

    example_id: int
    field: str  # its path, such as ['image']; '' if the item is an array


class Trial(NamedTuple):
    """What was found out about a source."""

    difference: Difference | None
    """None: the examples were the same again."""
    example_bytes: int
    """Of one in memory."""
    examples: Any = None
    """Those that were read twice, as they were first; None of arrays in memory."""


def look(source: Any) -> Trial:
    """Reads at most 48 examples twice.

    The global generators of NumPy and Python are afterwards as before.

    Args:
        source: a data source.

    Raises:
        ValueError: an example cannot be read.
    """
    if isinstance(source, sources.ArraySource):
        return Trial(None, _num_bytes(source.arrays) // len(source))
    ids = np.unique(np.random.default_rng(0).integers(0, len(source), _MOST))
    with global_generators_as_they_are():
        like = sources.read(source, int(ids[0]))
        first, second = (sources.fetch(source, ids, like=like) for _ in range(2))
    return Trial(difference(first, second, ids), _num_bytes(like), first)


def _num_bytes(examples: Any) -> int:
    return sum(leaf.nbytes for _, leaf in leaves.walk(examples))


def difference(first: Any, second: Any, ids: np.ndarray) -> Difference | None:
    """The first of the examples `ids i64[k]` that differs between two readings of them.

    Leaves of both readings are `[k, ...]`, and are compared to the bit.
    """
    pairs = list(zip(leaves.walk(first), leaves.walk(second), strict=True))
    for place, id_ in enumerate(ids):
        for (path, one), (_, other) in pairs:
            if one[place].tobytes() != other[place].tobytes():
                return Difference(int(id_), path)
    return None


@contextlib.contextmanager
def global_generators_as_they_are() -> Iterator[None]:
    """Puts NumPy's and Python's global generators back to where they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
