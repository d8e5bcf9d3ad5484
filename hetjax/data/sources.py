"""Where examples come from: anything with a length and an index.

A source has `__len__` and `__getitem__(i)`, and may have `__getitems__(ids)`: NumPy arrays (as
an `ArraySource`), `tfds.data_source`, a Grain source, a Hugging Face data set, a list. An item
is an array, a number, or a nested dict, tuple or list of them; a list of plain Python numbers
is one array. Every item of a source has the same structure, shapes and dtypes.

This module turns items into batches, `fetch` for the streamed feed and `load_all` for the
resident one, and names the record that cannot be read. Which ids make a batch is not its
business (`hetjax.data.stream`), nor are names of data sets (`hetjax.data.datasets`).
It needs NumPy alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

LOAD_CHUNK = 1024  # records read at once by load_all: a few MB of images

PyTree = Any


class Source(Protocol):
    """What hetjax asks of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...


class ArraySource:
    """Examples that lie in memory: a pytree of arrays with a common leading axis.

    Args:
      arrays: an array `[n, ...]`, or a nested dict or tuple of arrays with equal `n`.

    Raises:
      ValueError: no array, a leaf that is not an array of numbers, unequal lengths, or n = 0.

    Example:
      >>> source = ArraySource({"x": np.eye(3), "y": np.arange(3)})
      >>> len(source), int(source[1]["y"])
      (3, 1)
    """

    def __init__(self, arrays: PyTree):
        leaves = [(path, _array_leaf(path, leaf)) for path, leaf in _walk(arrays)]
        if not leaves:
            raise ValueError("a source of arrays needs at least one array; none was given")
        lengths = {path or "array": array.shape[0] for path, array in leaves}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the arrays of a source must have equal lengths along axis 0; got {lengths}"
            )
        self._len = leaves[0][1].shape[0]
        if self._len == 0:
            raise ValueError("a source needs at least one example; the arrays have length 0")
        self.arrays = _rebuild(arrays, iter([array for _, array in leaves]))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int, /) -> PyTree:
        if not -self._len <= index < self._len:  # IndexError is what ends `for x in source`
            raise IndexError(f"example {index} of a source of {self._len}")
        return self._take(index)

    def __getitems__(self, ids: Sequence[int] | np.ndarray) -> PyTree:
        """The examples of `ids` as one pytree with leading axis k, not as a list."""
        return self._take(np.asarray(ids, dtype=np.int64))

    def _take(self, ids: int | np.ndarray) -> PyTree:
        return _rebuild(self.arrays, iter([leaf[ids] for _, leaf in _walk(self.arrays)]))

    def __repr__(self) -> str:
        shapes = {path: (leaf.dtype.name, leaf.shape) for path, leaf in _walk(self.arrays)}
        return f"ArraySource({shapes})"


def as_source(data: Any) -> Source:
    """Makes a source of what a user has.

    Args:
      data: an array, or a nested dict or tuple of arrays, with a common leading axis (becomes
        an `ArraySource`); or anything else with `__len__` and `__getitem__` (returned as is).

    Raises:
      ValueError: it is neither, or the arrays do not fit together, or it has no examples.
    """
    if isinstance(data, np.ndarray | Mapping | tuple):
        return ArraySource(data)
    if isinstance(data, str | bytes) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise ValueError(
            f"a source cannot be made of {type(data).__name__}; give a NumPy array, a dict or "
            "tuple of NumPy arrays with equal lengths, or an object with __len__ and "
            "__getitem__ (tfds.data_source, a Grain source, a Hugging Face data set, a list); "
            "the name of a data set goes to hetjax.data.datasets.load"
        )
    if len(data) == 0:
        raise ValueError(f"the source has no examples: len({type(data).__name__}) is 0")
    return data


class _First:
    def __init__(self, source: Source, num_examples: int):
        self._source, self._len = source, num_examples
        if hasattr(source, "__getitems__"):  # many records at once take half the time
            self.__getitems__ = source.__getitems__

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int, /) -> PyTree:
        if not 0 <= index < self._len:
            raise IndexError(f"example {index} of a source of {self._len}")
        return self._source[index]


def first(source: Source, num_examples: int) -> Source:
    """The first `num_examples` of a source, as a source.

    Raises:
      ValueError: the source has fewer.

    Example:
      >>> len(first(as_source(np.arange(5)), 3))
      3
    """
    if not 0 < num_examples <= len(source):
        raise ValueError(
            f"num_examples must be from 1 to the {len(source)} of the source; got {num_examples}"
        )
    if isinstance(source, ArraySource):
        first_rows = iter([leaf[:num_examples] for _, leaf in _walk(source.arrays)])
        return ArraySource(_rebuild(source.arrays, first_rows))
    return _First(source, num_examples)


def read(source: Source, index: int) -> PyTree:
    """Reads one example as a pytree of NumPy arrays.

    Python numbers become what JAX makes of them: int32, float32, bool.

    Raises:
      ValueError: the record cannot be read, or has a leaf that is not a number; it names it.
    """
    leaves, item = _record(source, index)
    return _rebuild(item, iter([leaf for _, leaf in leaves]))


def fetch(source: Source, ids: np.ndarray, *, like: PyTree = None) -> PyTree:
    """Reads examples and stacks them, leaf by leaf.

    Args:
      source: the source, of n examples.
      ids: `i64[k]`, each in 0..n-1, in any order, repeated or not (padding is the caller's).
      like: an example from `read`, to hold the shapes against; the first of `ids` if absent.

    Returns:
      Pytree of arrays with leading axis k, host. Not a view of the source.

    Raises:
      ValueError: an id outside the source; a record that cannot be read or differs from the
        first in structure, shape or dtype. The message names its index.

    Example:
      >>> fetch([{"x": 1.0}, {"x": 2.0}], np.array([1, 1, 0]))
      {'x': array([2., 2., 1.], dtype=float32)}
    """
    ids = np.asarray(ids, dtype=np.int64)
    if ids.ndim != 1:
        raise ValueError(f"ids must have one axis, i64[k]; got shape {ids.shape}")
    outside = (ids < 0) | (ids >= len(source))
    if outside.any():
        raise ValueError(
            f"id {ids[outside][0]} is outside the source: allowed are 0..{len(source) - 1}"
        )
    if isinstance(source, ArraySource):
        return source.__getitems__(ids)
    if like is None:
        like = read(source, int(ids[0]) if len(ids) else 0)
    columns = [np.empty((len(ids), *leaf.shape), leaf.dtype) for _, leaf in _walk(like)]
    _read_into(columns, source, ids.tolist(), like)
    return _rebuild(like, iter(columns))


def load_all(source: Source) -> ArraySource:
    """Reads a whole source into memory, for the resident feed.

    Allocates once, from the shapes of example 0, and fills in pieces of 1,024 records.

    Raises:
      ValueError: a record that cannot be read or differs from example 0; it names its index.
    """
    if isinstance(source, ArraySource):
        return source
    if len(source) == 0:
        raise ValueError("a source needs at least one example; it has length 0")
    like = read(source, 0)
    columns = [np.empty((len(source), *leaf.shape), leaf.dtype) for _, leaf in _walk(like)]
    for start in range(0, len(source), LOAD_CHUNK):
        ids = list(range(start, min(start + LOAD_CHUNK, len(source))))
        _read_into([column[start:] for column in columns], source, ids, like)
    return ArraySource(_rebuild(like, iter(columns)))


def _read_into(columns: list[np.ndarray], source: Source, ids: list[int], like: PyTree) -> None:
    """Writes the leaves of record `ids[j]` to row j of the columns."""
    expected = [(path, leaf.shape, leaf.dtype) for path, leaf in _walk(like)]
    for row, (index, record) in enumerate(zip(ids, _records(source, ids), strict=True)):
        found = [(path, leaf.shape, leaf.dtype) for path, leaf in record]
        if found != expected:
            raise ValueError(
                f"example {index} differs from the first: it has {_describe(found)}, the "
                f"first has {_describe(expected)}; every example of a source must have the "
                "same structure, shapes and dtypes (pad or crop sequences beforehand)"
            )
        for column, (_, leaf) in zip(columns, record, strict=True):
            column[row] = leaf


def _records(source: Any, ids: list[int]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """The leaves of each record, by one `__getitems__` where there is one."""
    if hasattr(source, "__getitems__") and ids:
        try:
            items = source.__getitems__(ids)
        except Exception as error:
            # One bad record fails the whole call: reading them singly finds and names it.
            for index in ids:
                _record(source, index)
            raise ValueError(
                f"examples {ids[0]} to {ids[-1]} cannot be read together, though each can be "
                f"alone: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(items, Sequence) or len(items) != len(ids):
            raise ValueError(
                f"__getitems__ of {type(source).__name__} must return a list of {len(ids)} "
                f"items for {len(ids)} ids; got {type(items).__name__}"
                + (f" of length {len(items)}" if isinstance(items, Sequence) else "")
            )
        return (_leaves(item, index) for item, index in zip(items, ids, strict=True))
    return (_record(source, index)[0] for index in ids)


def _record(source: Source, index: int) -> tuple[list[tuple[str, np.ndarray]], PyTree]:
    try:
        item = source[index]
    except Exception as error:
        raise ValueError(
            f"example {index} of {type(source).__name__} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _leaves(item, index), item


def _leaves(item: PyTree, index: int) -> list[tuple[str, np.ndarray]]:
    leaves = []
    for path, leaf in _walk(item):
        try:
            array = _number_array(leaf)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"example {index} cannot be used: leaf {path or 'item'} {error}"
            ) from error
        leaves.append((path, array))
    return leaves


def _number_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, str | bytes):
        raise ValueError(
            f"is {type(leaf).__name__}, and training needs numbers: encode it as integers, "
            "or drop the field"
        )
    if type(leaf) is int:
        return np.asarray(leaf, np.int32)
    array = np.asarray(leaf)
    if not _is_numeric(array.dtype):
        raise ValueError(
            f"is {type(leaf).__name__} of dtype {array.dtype}, and training needs numbers: "
            "encode it as integers or floats, or drop the field"
        )
    if type(leaf) is float or (type(leaf) is list and array.dtype == np.float64):
        return array.astype(np.float32)
    if type(leaf) is list and array.dtype == np.int64:
        return np.asarray(leaf, np.int32)
    return array


def _array_leaf(path: str, leaf: Any) -> np.ndarray:
    name = f"array {path}" if path else "the array"
    if not hasattr(leaf, "__array__") or np.ndim(leaf) == 0:
        raise ValueError(
            f"a source of arrays takes NumPy arrays with a leading axis of examples; "
            f"{path or 'it'} is {type(leaf).__name__}"
        )
    array = np.asarray(leaf)
    if not _is_numeric(array.dtype):
        raise ValueError(
            f"{name} has dtype {array.dtype}, and training needs numbers: encode it as "
            "integers or floats, or drop it"
        )
    return array


def _is_numeric(dtype: np.dtype) -> bool:
    # isbuiltin == 2: types registered from outside, bfloat16 and float8 of ml_dtypes
    return dtype.kind in "biufc" or dtype.isbuiltin == 2


def _describe(leaves: list[tuple[str, tuple[int, ...], np.dtype]]) -> str:
    shown = [f"{path or 'item'} {dtype}{list(shape)}" for path, shape, dtype in leaves[:6]]
    return ", ".join(shown) + (f" and {len(leaves) - 6} more" if len(leaves) > 6 else "")


def _walk(tree: PyTree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths; dicts by sorted key, so that two items compare leaf by leaf."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _walk(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list) and not _is_number_list(tree):
        for position, child in enumerate(tree):
            yield from _walk(child, f"{path}[{position}]")
    else:
        yield path, tree


def _rebuild(tree: PyTree, leaves: Iterator[Any]) -> PyTree:
    """A tree of the same form with other leaves, given in the order of `_walk`."""
    if isinstance(tree, Mapping):
        built = {key: _rebuild(tree[key], leaves) for key in sorted(tree, key=str)}
        return {key: built[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_rebuild(child, leaves) for child in tree])
    if isinstance(tree, tuple | list) and not _is_number_list(tree):
        return type(tree)(_rebuild(child, leaves) for child in tree)
    return next(leaves)


def _is_number_list(tree: Any) -> bool:
    return (
        type(tree) is list
        and len(tree) > 0
        and all(type(child) in (bool, int, float) for child in tree)
    )
