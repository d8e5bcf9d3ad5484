"""Memory that processes share, with two halves that rounds write in turn; it outlives its writer.

A half carries its round before and behind what is written. Who has read looks at both again: a
process that slept may have read what was overwritten meanwhile.
"""

import mmap
import os
import pathlib

import jax
import numpy as np

from hetjax import types, whole
from hetjax.comm import membership as membership_lib

ALIGNED = 64  # bytes; JAX copies what is not aligned so
READY = 4  # in `DoubleBuffer.marks`, behind those of the two halves
_NEVER = -9  # a mark of no round


class DoubleBuffer:
    """A file in memory with two halves, of which each round writes one; as its writer or a reader.

    Args:
        path: of the file.
        num_bytes: of a half.
        make: write it; else it is there already.

    Raises:
        OSError: there is no room, or no such file.
    """

    def __init__(self, path: pathlib.Path, num_bytes: int, *, make: bool = False) -> None:
        num_bytes = -(-num_bytes // ALIGNED) * ALIGNED
        size = ALIGNED + 2 * num_bytes
        if make:
            with whole.written(path) as new, new.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # or no room would be SIGBUS later
                file.write(np.full(ALIGNED // 8, _NEVER).tobytes())
        with path.open("r+b") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        self.marks = mapped[:ALIGNED].view(np.int64)
        """Of each half before and behind what is written; then `READY`, the newest round of which
        its writer is ready."""
        self.halves = mapped[ALIGNED:].reshape(2, -1)

    def begin(self, number: int) -> np.ndarray:
        """The half of a round, which is being written from now on."""
        self.marks[2 * (number % 2)] = number
        return self.halves[number % 2]

    def end(self, number: int) -> None:
        self.marks[2 * (number % 2) + 1] = number

    def has(self, number: int) -> bool:
        """Whether its half is a round's, whole."""
        before = 2 * (number % 2)
        return bool((self.marks[before : before + 2] == number).all())


def of(
    member: membership_lib.Member,
    name: str,
    num_bytes: int,
    roster: membership_lib.MembershipClient,
) -> DoubleBuffer:
    """What a member writes; made where that is this process, whose membership it is.

    Raises:
        FileNotFoundError: the other has not made it yet, or it is put away.
        OSError: there is no room any more.
    """
    path = roster.directory / f"{name}.{member.incarnation}"
    try:
        return DoubleBuffer(path, num_bytes, make=member == roster.own)
    except OSError as error:
        told = f"{error.strerror} for {2 * num_bytes >> 20} MB of shared memory"
        raise OSError(error.errno, told, str(path)) from None


class Turn:
    """Which round it is, for all that has halves."""

    def __init__(self) -> None:
        self.number, self.is_warm_up = 0, True


def digest(tree: types.PyTree) -> int:
    """Of the bytes of all leaves: their sums as 64-bit integers."""
    found = np.int64(0)
    with np.errstate(over="ignore"):
        for leaf in jax.tree.leaves(tree):
            content = np.asarray(leaf.addressable_data(0)).reshape(-1).view(np.uint8)
            whole = content[: content.size // 8 * 8].view(np.int64)
            found = found * np.int64(31) + whole.sum() + content[whole.nbytes :].sum(dtype=np.int64)
    return int(found)
