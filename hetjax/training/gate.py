"""What closes a round before every quota is done.

Each worker asks the gate before it begins a microbatch. What is in flight when the gate closes is
always finished, since a dispatched program cannot be taken back, and counts; what was not begun
goes back to the head of the order. Assumes that when a microbatch is finished does not depend on
its examples: then every update is an unbiased one.

A gate has two forms that agree (`tests/training/test_gate.py`): an object that the workers' threads
share, and over a board the processes, on the wall clock; and the time at which it closes, from the
times at which the microbatches would end, on the virtual clock and in the simulator. The first
microbatch of a worker is always begun, so that no shard of private data is ever left out.

References:
    He, Dube, "Accelerating parallel stochastic gradient descent via non-blocking mini-batches",
    2022, arXiv 2211.00889: updates from what is finished.
    Ferdinand et al., "Anytime MiniBatch: exploiting stragglers in online distributed
    optimization", 2020, arXiv 2006.05752: the deadline.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np


class Gate(Protocol):
    """One gate serves all workers of a process, from their own threads."""

    def begin(self, quotas: np.ndarray) -> None:
        """A round begins, with quotas i64[W]."""

    def is_open(self) -> bool:
        """Whether a worker may begin another microbatch; asked before the first one too, which
        is begun whatever it says."""

    def finished(self, worker: int, microbatches_done: int) -> None:
        """A worker has finished its microbatch number `microbatches_done` of the round."""

    def closes_at(self, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        """Seconds into the round at which the gate closes, infinite for never.

        Args:
            ends: f64[..., W, K]: when each microbatch would end; beyond a quota infinite.
            quotas: i64[..., W].

        Returns:
            f64[...]; microbatches that would begin then, or later, are not begun.
        """


class Board(Protocol):
    """Values that the processes of a run share: `hetjax.cluster.processes.Board`."""

    def post(self, key: str, value: Any) -> None: ...

    def read(self, key: str) -> Any: ...

    def add(self, key: str, amount: int = 1) -> int: ...

    def remove(self, key: str) -> None: ...


class Options(NamedTuple):
    """What the factories of `GATES` are given; each takes what it needs."""

    quorum: int = 0  # microbatches
    deadline_secs: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    board: Board | None = None  # where the workers are in several processes


class _Open:
    """Never closes; and the parts that the gates share."""

    def __init__(self, board: Board | None = None) -> None:
        self._lock = threading.Lock()
        self._quotas = np.zeros(0, int)
        self._closed = False
        self._board, self._rounds = board, 0

    def begin(self, quotas: np.ndarray) -> None:
        self._quotas, self._closed = np.asarray(quotas), False
        self._rounds += 1
        if self._board is not None and self._rounds > 2:  # all have left that round
            for what in ("closed", "done"):
                self._board.remove(f"{self._rounds - 2}/{what}")

    def is_open(self) -> bool:
        if not self._closed and self._board is not None:
            self._closed = self._board.read(f"{self._rounds}/closed") is not None
        return not self._closed

    def _close(self) -> None:
        if not self._closed and self._board is not None:
            self._board.post(f"{self._rounds}/closed", True)
        self._closed = True

    def finished(self, worker: int, microbatches_done: int) -> None:
        pass

    def closes_at(self, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        return np.full(np.shape(quotas)[:-1], np.inf)


class _First(_Open):
    def finished(self, worker: int, microbatches_done: int) -> None:
        if microbatches_done >= self._quotas[worker]:
            self._close()

    def closes_at(self, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        last = np.take_along_axis(ends, np.maximum(quotas - 1, 0)[..., None], axis=-1)[..., 0]
        return np.min(np.where(quotas > 0, last, np.inf), axis=-1, initial=np.inf)


class _Quorum(_Open):
    def __init__(self, quorum: int, board: Board | None) -> None:
        super().__init__(board)
        self._quorum = quorum

    def begin(self, quotas: np.ndarray) -> None:
        super().begin(quotas)
        self._left = self._quorum

    def finished(self, worker: int, microbatches_done: int) -> None:
        with self._lock:
            if self._board is None:
                self._left -= 1
            else:
                self._left = self._quorum - self._board.add(f"{self._rounds}/done")
            if self._left <= 0:
                self._close()

    def closes_at(self, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        flat = ends.reshape(*np.shape(ends)[:-2], -1)
        if flat.shape[-1] < self._quorum:
            return np.full(np.shape(flat)[:-1], np.inf)
        return np.partition(flat, self._quorum - 1, axis=-1)[..., self._quorum - 1]


class _Deadline(_Open):
    def __init__(self, deadline_secs: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._deadline_secs, self._clock = deadline_secs, clock

    def begin(self, quotas: np.ndarray) -> None:
        self._began: float | None = None

    def is_open(self) -> bool:
        with self._lock:
            if self._began is None:  # by the first worker that has the round's parameters
                self._began = self._clock()
            return self._clock() - self._began < self._deadline_secs

    def closes_at(self, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        return np.full(np.shape(quotas)[:-1], self._deadline_secs)


def none(options: Options) -> Gate:
    """Never closes: every worker does its whole quota."""
    del options
    return _Open()


def first(options: Options) -> Gate:
    """Closes when the first worker has finished its quota; quotas of 0 do not count."""
    return _First(options.board)


def quorum(options: Options) -> Gate:
    """Closes when `quorum` microbatches of all workers are finished: a batch of nearly one size.

    What is in flight then is added: at most one microbatch of each other worker.
    """
    return _Quorum(options.quorum, options.board)


def deadline(options: Options) -> Gate:
    """Closes `deadline_secs` after the round began; what is in flight is finished.

    Each process has a clock of its own: they begin a round when its parameters are there.
    """
    return _Deadline(options.deadline_secs, options.clock)


class Closing(NamedTuple):
    """A round on the virtual clock, with a gate."""

    microbatches_done: np.ndarray  # i64[..., W]
    compute_secs: np.ndarray  # f64[..., W]: until each worker has finished its last one
    round_secs: np.ndarray  # f64[...]: until the last worker has


def close(gate: Gate, ends: np.ndarray, quotas: np.ndarray, *, drop: bool = False) -> Closing:
    """What the workers have done when the gate has closed, on the virtual clock.

    Args:
        gate: whose `closes_at` decides.
        ends: f64[..., W, K]: when each microbatch would end; what is beyond a quota is ignored.
        quotas: i64[..., W].
        drop: what is in flight when the gate closes is given up, not finished. No device can do
            that with a program; it exists to compare with.
    """
    within = np.arange(ends.shape[-1]) < quotas[..., None]
    ends = np.where(within, ends, np.inf)
    closes = np.asarray(gate.closes_at(ends, quotas))[..., None, None]
    if drop:
        counted = within & (ends <= closes)
    else:
        begins = np.concatenate([np.full_like(ends[..., :1], -np.inf), ends[..., :-1]], axis=-1)
        counted = within & (begins < closes)
    done = counted.sum(axis=-1)
    secs = np.max(np.where(counted, ends, 0.0), axis=-1, initial=0.0)
    closed = closes[..., 0, 0]
    if drop:  # a worker that has work left was at it until the gate closed
        secs = np.where((done < quotas) & np.isfinite(closed[..., None]), closed[..., None], secs)
    return Closing(done, secs, np.max(secs, axis=-1, initial=0.0))


GATES: dict[str, Callable[..., Gate]] = {
    "none": none,
    "first": first,
    "quorum": quorum,
    "deadline": deadline,
}
