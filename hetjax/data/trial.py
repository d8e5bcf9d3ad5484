"""A few examples are read before the run: are they the same again, and do several threads help?

A source that changes what it gives (random augmentation) must not be read once for all epochs.
Several threads help if a source waits for a disk or a network. They break a source that is not made
for them, such as a file with one position that is moved and then read. That cannot be seen from
outside. So the threads read examples that are known already, and the two readings are compared.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import leaves, readers, sources

NUM_READERS = 8  # that read a slow source
SLOW_SECS = 2e-4  # an example; below, threads cost more than they save

_GAIN = 1.5  # several threads read only if one takes so many times as long
_BLOCK, _LEAST, _MOST = 4, 8, 64  # examples that are read twice: at a time, at least, at most
_LIMIT_SECS = 0.25  # after which no more than `_LEAST` are read
_PATIENCE = 20.0  # threads that take so many times what one needs, and so many seconds, are stuck


class Difference(NamedTuple):
    """An example that was another one when it was read again."""

    example_id: int
    field: str  # its path, such as ['image']; '' if the item is an array


class Trial(NamedTuple):
    """What was found out about a source."""

    difference: Difference | None = None
    """None: the examples were the same again."""
    secs_per_example: float = 0.0
    """Seconds that one thread needs to read one."""
    num_readers: int = 1
    """Threads that are to read it."""
    unsafe: str = ""
    """Why several threads cannot read it, if they were tried."""
    example_bytes: int = 0
    """Of one in memory; 0: not looked at."""


def look(source: Any, *, num_readers: int = 0, narrow: bool = False) -> Trial:
    """Reads 8 to 64 examples twice, and those of a slow source by several threads, too.

    The global generators of NumPy and Python are afterwards as before.

    Args:
        source: a data source.
        num_readers: threads that are to read it; 0: as many as are found to help.
        narrow: whether whole numbers must fit into 32 bits.

    Raises:
        ValueError: an example cannot be read or holds a number that does not fit, or several
            threads are asked for although the source says `thread_safe = False`.
    """
    is_safe = getattr(source, "thread_safe", None)
    if num_readers > 1 and is_safe is False:
        raise ValueError(
            f"data.readers: got {num_readers}, but {type(source).__name__} says thread_safe = "
            "False, so that one thread reads it. Set data.readers to 1, or to 0"
        )
    if isinstance(source, sources.ArraySource):
        of_all = sum(leaf.nbytes for _, leaf in leaves.walk(source.arrays))
        return Trial(num_readers=num_readers or 1, example_bytes=of_all // len(source))
    with global_generators_as_they_are():
        found, kept = _read_twice(source, narrow=narrow)
        if num_readers:
            return found._replace(num_readers=num_readers)
        if found.secs_per_example < SLOW_SECS or is_safe is False:
            return found
        if found.difference is not None:  # examples that change cannot be compared
            return found._replace(num_readers=NUM_READERS if is_safe else 1)
        return _read_together(source, found, kept)


def _read_twice(source: Any, *, narrow: bool) -> tuple[Trial, dict[int, list[bytes]]]:
    """What two readings of the same examples show, and the examples."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.unique(rng.integers(0, len(source), _MOST)))
    like = sources.read(source, int(ids[0]))
    kept: dict[int, list[bytes]] = {}
    secs, found, began = np.inf, None, time.perf_counter()
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        first = sources.fetch(source, block, like=like)
        if narrow:
            leaves.check_narrow(first, block)
        before = time.perf_counter()
        second = sources.fetch(source, block, like=like)
        now = time.perf_counter()
        secs = min(secs, (now - before) / len(block))
        kept |= {int(id_): _bytes_of(first, place) for place, id_ in enumerate(block)}
        found = difference(first, second, block)
        if found or (start + _BLOCK >= _LEAST and now - began > _LIMIT_SECS):
            break
    example_bytes = sum(leaf.nbytes for _, leaf in leaves.walk(like))
    return Trial(found, float(secs), example_bytes=example_bytes), kept


def _bytes_of(examples: Any, place: int) -> list[bytes]:
    """The leaves of an example, to be compared to the bit: so a NaN is itself."""
    return [leaf[place].tobytes() for _, leaf in leaves.walk(examples)]


def difference(first: Any, second: Any, ids: np.ndarray) -> Difference | None:
    """The first of the examples `ids i64[k]` that differs between two readings of them.

    Leaves of both readings are `[k, ...]`, and are compared to the bit.
    """
    pairs = zip(leaves.walk(first), leaves.walk(second), strict=True)
    changed = [
        (p, one, other) for (p, one), (_, other) in pairs if one.tobytes() != other.tobytes()
    ]
    for place, id_ in enumerate(ids if changed else ()):
        for path, one, other in changed:
            if one[place].tobytes() != other[place].tobytes():
                return Difference(int(id_), path)
    return None


def _read_together(source: Any, found: Trial, kept: dict[int, list[bytes]]) -> Trial:
    """Has several threads read examples that are known."""
    like = sources.read(source, next(iter(kept)))
    ids = (list(kept) * NUM_READERS)[: 2 * NUM_READERS]
    alone_secs = found.secs_per_example * len(ids)
    with readers.Readers(sources.Reading(source, like), NUM_READERS) as threads:
        began = time.perf_counter()
        futures = [threads.submit(np.array([id_])) for id_ in ids]
        try:
            read = [f.result(timeout=_PATIENCE * (1 + alone_secs)) for f in futures]
        except Exception as error:
            return found._replace(unsafe=str(error) or type(error).__name__)
        secs = time.perf_counter() - began
    for id_, example in zip(ids, read, strict=True):
        if _bytes_of(example, 0) != kept[id_]:
            return found._replace(unsafe=f"example {id_} was another one")
    return found._replace(num_readers=NUM_READERS if secs * _GAIN <= alone_secs else 1)


@contextlib.contextmanager
def global_generators_as_they_are() -> Iterator[None]:
    """Puts NumPy's and Python's global generators back to where they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
