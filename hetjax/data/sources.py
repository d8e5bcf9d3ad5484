"""Where examples come from: anything with a length and an index.

A source has `__len__` and `__getitem__(i)`, and may have `__getitems__(ids)`: NumPy arrays (as
an `ArraySource`), `tfds.data_source`, a Grain source, a Hugging Face data set, a list. An item
is an array, a number, or a nested dict, tuple or list of them (`leaves`). Every item of a source
has the same structure, shapes and dtypes. A source that several threads may not read at once says
so by an attribute `thread_safe = False`.

This module turns items into batches, `fetch` for the streamed feed and `load_all` for the resident
one. It names a record that cannot be read. `hetjax.data.stream` says which ids make a batch,
`hetjax.zoo.datasets` has data sets by name, and `hetjax.data.source_checks` says what can be a
source. It needs NumPy alone.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hetjax.data import leaves, readers, source_checks

LOAD_CHUNK = 1024  # most records that load_all reads at once: a few MB of images
_PIECE = 16  # records that load_all, or each of its threads, reads at once at first
_CHUNK_SECS = 0.1  # if a chunk takes longer, chunks grow no more, so that progress is seen

PyTree = Any


class Source(Protocol):
    """What hetjax asks of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...


class ArraySource:
    """Examples that lie in memory: a pytree of arrays with a common leading axis.

    Args:
      arrays: an array `[n, ...]`, or a nested dict or tuple of arrays with equal `n`; a list of
        numbers, or of equally long lists of them, is an array.
      notes: sentences that the report of a run on these examples says.

    Raises:
      ValueError: no array, a leaf that is not an array of numbers, unequal lengths, or n = 0.

    Example:
      >>> source = ArraySource({"x": np.eye(3), "y": [0, 1, 2]})
      >>> len(source), int(source[1]["y"])
      (3, 1)
    """

    def __init__(self, arrays: PyTree, *, notes: Sequence[str] = ()):
        self.notes = tuple(notes)
        if not (found := leaves.of_arrays(arrays)):
            raise ValueError("a source of arrays needs at least one array")
        lengths = {path or "array": array.shape[0] for path, array in found}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arrays of a source must have equal lengths, axis 0; got {lengths}")
        self._len = found[0][1].shape[0]
        if self._len == 0:
            raise ValueError("a source needs at least one example; it has length 0")
        self.arrays = leaves.rebuild(arrays, iter([array for _, array in found]))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int, /) -> PyTree:
        if not -self._len <= index < self._len:  # IndexError ends `for x in source`
            raise IndexError(f"example {index} of a source of {self._len}")
        return self._take(index)

    def __getitems__(self, ids: Sequence[int] | np.ndarray) -> PyTree:
        """The examples of `ids` as one pytree with leading axis k, not as a list."""
        return self._take(np.asarray(ids, dtype=np.int64))

    def _take(self, ids: int | np.ndarray) -> PyTree:
        taken = iter([leaf[ids] for _, leaf in leaves.walk(self.arrays)])
        return leaves.rebuild(self.arrays, taken)

    def __repr__(self) -> str:
        shapes = {path: (leaf.dtype.name, leaf.shape) for path, leaf in leaves.walk(self.arrays)}
        return f"ArraySource({shapes})"


def as_source(data: Any) -> Source:
    """Makes a source of what a user has.

    Args:
      data: an array, or a nested dict or tuple of arrays or lists of numbers, with a common
        leading axis (becomes an `ArraySource`); a table of pandas, Polars or pyarrow, whose columns
        become arrays, and so do the fields of a structured array; or anything else with `__len__`
        and `__getitem__` (returned as is).

    Raises:
      ValueError: `data` is none of these, its arrays do not fit together, or it has no examples or
        no end. The message says what to give instead.
    """
    data = source_checks.opened(data)
    if isinstance(data, np.ndarray | Mapping | tuple):
        return ArraySource(data)
    return data


def of_epoch(source: Any, epoch: int) -> Source:
    """The source as it is in an epoch, counted from 0: one that knows epochs says it itself."""
    return source.of_epoch(epoch) if knows_epochs(source) else source


def of_run(source: Any, seed: int) -> Source:
    """The source of a run, where what it draws begins with the run's seed."""
    return source.of_run(seed) if hasattr(source, "of_run") else source


def knows_epochs(source: Source) -> bool:
    """Whether it has other views of its examples in each epoch, and the same ones in each run."""
    return hasattr(source, "of_epoch")


class Reading:
    """Reads examples of a source; what readers call.

    Args:
      source: the source.
      like: an example from `read`, to compare the shapes with.
    """

    def __init__(self, source: Source, like: PyTree) -> None:
        self._source, self._like = source, like

    def __call__(self, ids: np.ndarray, epoch: int = 0) -> PyTree:
        return fetch(of_epoch(self._source, epoch), ids, like=self._like)


def read(source: Source, index: int) -> PyTree:
    """Reads one example as a pytree of NumPy arrays.

    Python numbers become what JAX makes of them: int32, float32, bool.

    Raises:
      ValueError: the record cannot be read or has a leaf that is not a number. The message names
        it.
    """
    record, item = _record(source, index)
    return leaves.rebuild(item, iter([leaf for _, leaf in record]))


def fetch(source: Source, ids: np.ndarray, *, like: PyTree = None) -> PyTree:
    """Reads examples and stacks them, leaf by leaf.

    Args:
      source: the source, of n examples.
      ids: `i64[k]`, each in 0..n-1, in any order, repeated or not (padding is the caller's).
      like: an example from `read`, to compare the shapes with; None: the first of `ids`.

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
    outside = (ids < 0) | (ids >= len(source))
    if outside.any():
        raise ValueError(f"id {ids[outside][0]} is outside the source of {len(source)} examples")
    if isinstance(source, ArraySource):
        return source.__getitems__(ids)
    if like is None:
        like = read(source, int(ids[0]) if len(ids) else 0)
    columns = _columns(like, len(ids))
    _read_into(columns, source, ids.tolist(), like)
    return leaves.rebuild(like, iter(columns))


def load_all(
    source: Source,
    *,
    crew: readers.Crew = readers.ALONE,
    on_read: Callable[[int], object] = lambda count: None,
) -> ArraySource:
    """Reads a whole source into memory, for the resident feed.

    Allocates once, from the shapes of example 0, and fills in pieces of at most 1,024 records.

    Args:
      source: the source.
      crew: who reads; of one thread the calling one does.
      on_read: called with the number of records that were read since the last call.

    Raises:
      ValueError: a record cannot be read or differs from example 0. The message names its index.
    """
    if isinstance(source, ArraySource):
        return source
    like = read(source, 0)
    columns = _columns(like, len(source))
    if crew == readers.ALONE:
        _load(columns, source, like, on_read)
    else:
        _load_together(columns, source, like, on_read, crew)
    return ArraySource(leaves.rebuild(like, iter(columns)))


def _columns(like: PyTree, count: int) -> list[np.ndarray]:
    return [np.empty((count, *leaf.shape), leaf.dtype) for _, leaf in leaves.walk(like)]


def _load(
    columns: list[np.ndarray], source: Source, like: PyTree, on_read: Callable[[int], object]
) -> None:
    start, size = 0, _PIECE
    while start < len(source):
        ids = list(range(start, min(start + min(size, LOAD_CHUNK), len(source))))
        began = time.perf_counter()
        _read_into([column[start:] for column in columns], source, ids, like)
        if time.perf_counter() - began < _CHUNK_SECS:
            size = min(2 * size, LOAD_CHUNK)
        start += len(ids)
        on_read(len(ids))


def _load_together(
    columns: list[np.ndarray],
    source: Source,
    like: PyTree,
    on_read: Callable[[int], object],
    crew: readers.Crew,
) -> None:
    """Begins and takes pieces in order, so that the message names the first bad record."""
    starts = iter(range(0, len(source), _PIECE))
    begun: collections.deque = collections.deque()
    with contextlib.closing(readers.Readers(Reading(source, like), crew)) as threads:
        while True:
            while len(begun) < 2 * crew.size and (start := next(starts, None)) is not None:
                ids = np.arange(start, min(start + _PIECE, len(source)))
                begun.append((ids, threads.submit(ids)))
            if not begun:
                return
            ids, future = begun.popleft()
            for column, (_, part) in zip(columns, leaves.walk(threads.result(future)), strict=True):
                column[ids[0] : ids[-1] + 1] = part
            on_read(len(ids))


def _read_into(columns: list[np.ndarray], source: Source, ids: list[int], like: PyTree) -> None:
    """Writes the leaves of record `ids[j]` to place j of the columns."""
    expected = _shapes(leaves.walk(like))
    for place, (index, record) in enumerate(zip(ids, _records(source, ids), strict=True)):
        _check_shapes(record, index, expected, source)
        for column, (_, leaf) in zip(columns, record, strict=True):
            column[place] = leaf


def checked(item: PyTree, index: int, like: PyTree, name: str) -> list[np.ndarray]:
    """The leaves of an example that was read already, compared with those of `like`.

    Raises:
      ValueError: it has other leaves, or one that is not a number; with its index and source.
    """
    record, expected = leaves.of_item(item, index), _shapes(leaves.walk(like))
    _check_shapes(record, index, expected, name)
    return [leaf for _, leaf in record]


def _shapes(record: Iterable[tuple[str, np.ndarray]]) -> list[Any]:
    return [(path, leaf.shape, leaf.dtype) for path, leaf in record]


def _check_shapes(
    record: list[tuple[str, np.ndarray]], index: int, expected: list[Any], source: Any
) -> None:
    if (found := _shapes(record)) != expected:
        raise ValueError(
            f"example {index} differs from the first of the {_described(source)}: it has "
            f"{leaves.describe(found)}, the first has {leaves.describe(expected)}"
        )


def _records(source: Any, ids: list[int]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """The leaves of each record, by one call of `__getitems__` if the source has it."""
    if hasattr(source, "__getitems__") and ids:
        try:
            items = source.__getitems__(ids)
        except Exception as error:
            # One bad record fails the whole call. Reading them one by one finds and names it.
            for index in ids:
                _record(source, index)
            raise ValueError(
                f"examples {ids[0]} to {ids[-1]} cannot be read together, though one by one: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(items, Sequence) or len(items) != len(ids):
            raise ValueError(
                f"__getitems__ of {type(source).__name__} must return a list of {len(ids)} items"
            )
        return (_of_item(item, index, source) for item, index in zip(items, ids, strict=True))
    return (_record(source, index)[0] for index in ids)


def _described(source: Any) -> str:
    """The source's type or name, and where a prepared data set's files are, maybe damaged."""
    name = source if isinstance(source, str) else type(source).__name__
    if (folder := getattr(getattr(source, "dataset_info", None), "data_dir", None)) is None:
        return name
    return f"{name} in {folder} (if its files are damaged, delete that and prepare it again)"


def _record(source: Source, index: int) -> tuple[list[tuple[str, np.ndarray]], PyTree]:
    try:
        item = source[index]
    except Exception as error:
        raise ValueError(
            f"example {index} of {_described(source)} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _of_item(item, index, source), item


def _of_item(item: PyTree, index: int, source: Source) -> list[tuple[str, np.ndarray]]:
    try:
        return leaves.of_item(item, index)
    except ValueError as error:
        raise ValueError(f"{error} (a {_described(source)})") from error.__cause__
