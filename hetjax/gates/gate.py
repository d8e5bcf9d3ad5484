"""What a gate is: what closes a round before every quota is done.

Each worker asks the gate before it begins a microbatch. What is in flight when the gate closes is
always finished and counts, since a dispatched program cannot be taken back. What was not begun goes
back to the head of the order. Assumes that the time at which a microbatch is finished does not
depend on its examples; then every update is unbiased. The first microbatch of a worker is always
begun, so no shard of private data is ever left out.

References:
    He, Dube, "Accelerating parallel stochastic gradient descent via non-blocking mini-batches",
    2022, arXiv 2211.00889: updates from what is finished.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetjax import parts


class Live(Protocol):
    """A gate at work: one serves all workers of a process, from their own threads."""

    def begin(self, quotas: np.ndarray) -> None:
        """A round begins, with `quotas` i64[W]."""

    def is_open(self) -> bool:
        """Whether a worker may begin another microbatch. It is also called before the first one,
        which is begun whatever it returns."""

    def finished(self, worker: int, microbatches_done: int) -> None:
        """A worker has finished its microbatch number `microbatches_done` of the round."""


class Board(Protocol):
    """Values that the processes share in a round: `hetjax.comm.key_value_store.RoundBoard`.

    Each round has keys of its own, also for a process that has come to a run that goes on."""

    def post(self, key: str, value: Any) -> None:
        """Writes a `value`, of which JSON has at most 4 KB, for all processes to read."""

    def read(self, key: str) -> Any:
        """Returns the value, or None where there is none."""

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a count that begins at 0; returns what it has become."""

    def remove(self, key: str) -> None:
        """Forgets a value or a count; harmless where there is none."""


Clock = Callable[[], float]


class Gate(NamedTuple):
    """A gate, in two forms that agree (`tests/gates/test_gates.py`).

    On the wall clock the workers' threads share the object that `open` makes; the processes share
    a board. On the virtual clock and in the simulator `closes_at` tells when the gate closes, from
    the times at which the microbatches would end.
    """

    open: Callable[[Board | None, Clock], Live]
    """`(board, clock) -> Live`; the board is None if all workers are in one process."""

    closes_at: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """`(ends f64[..., W, K], quotas i64[..., W]) -> f64[...]`: seconds into the round at which it
    closes; infinite: never. `ends` is when each microbatch would end; infinite beyond a quota.
    Microbatches that would begin at that time or later are not begun."""

    closes: bool = True
    """False for a gate that never closes a round."""

    needs_news: bool = True
    """Whether it closes by what other workers did; False: each worker's own clock is enough."""

    needs_quotas: bool = False
    """Whether a quota of 0 would make it close at once; then all workers need a quota above 0."""

    when: str = "before every quota is done"
    """When it closes a round, in words for the report."""

    problems: Callable[[parts.Facts], Iterable[str]] = parts.no_problems
    """Why it cannot work in a run: lines that begin with the option's name."""

    made_by: parts.Made | None = None


class AlwaysOpen:
    """Never closes. Other live gates share what it has: a lock, the quotas, a flag on the board.

    Args:
        board: the processes', if the workers are in several.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._lock = threading.Lock()
        self._quotas = np.zeros(0, int)
        self._closed = False
        self._board = board

    def begin(self, quotas: np.ndarray) -> None:
        """Begins a round anew.

        Args:
            quotas: i64[W], of all workers.
        """
        self._quotas, self._closed = np.asarray(quotas), False

    def is_open(self) -> bool:
        """Whether a worker may begin another microbatch."""
        if not self._closed and self._board is not None:
            self._closed = self._board.read("closed") is not None
        return not self._closed

    def _close(self) -> None:
        if not self._closed and self._board is not None:
            self._board.post("closed", True)
        self._closed = True

    def finished(self, worker: int, microbatches_done: int) -> None:
        """Takes note that a worker has finished a microbatch: here, of nothing.

        Args:
            worker: its number, from 0.
            microbatches_done: by it in this round, from 1.
        """


class Closing(NamedTuple):
    """A round on the virtual clock, with a gate."""

    microbatches_done: np.ndarray  # i64[..., W]
    compute_secs: np.ndarray  # f64[..., W]: until each worker has finished its last one
    round_secs: np.ndarray  # f64[...]: until the last worker has finished


class _Checked:
    """A live gate whose every answer is checked to be True or False.

    Args:
        gate: the gate that made it.
        live: what the gate made.
    """

    def __init__(self, gate: Gate, live: Live) -> None:
        self.begin, self.finished = live.begin, live.finished
        self._is_open, self._name = live.is_open, parts.named(gate)

    def is_open(self) -> bool:
        answer = self._is_open()
        if isinstance(answer, bool | np.bool_):
            return bool(answer)
        raise ValueError(
            f"gate: {self._name}: is_open() returned {parts.shown(answer)}, must be True or False"
        )


def begin(gate: Gate, board: Board | None = None, clock: Clock = time.perf_counter) -> Live:
    """The live gate of one process.

    Args:
        gate: whose `open` makes it.
        board: the processes'; None where all workers are in one.
        clock: seconds, a function without arguments.

    Raises:
        ValueError: what the gate opened is no live gate.
    """
    live = gate.open(board, clock)
    if missing := [n for n in ("begin", "is_open", "finished") if not hasattr(live, n)]:
        raise ValueError(
            f"gate: {parts.named(gate)}: its open(board, clock) made {parts.shown(live)} without "
            f"{', '.join(missing)}; see hetjax.gates.AlwaysOpen"
        )
    return _Checked(gate, live)


def close(gate: Gate, ends: np.ndarray, quotas: np.ndarray, *, drop: bool = False) -> Closing:
    """What the workers have done when the gate has closed, on the virtual clock.

    Args:
        gate: its `closes_at` decides.
        ends: f64[..., W, K]: when each microbatch would end; those beyond a quota are ignored.
        quotas: i64[..., W].
        drop: give up what is in flight when the gate closes, instead of finishing it. No device
            can do that with a program; it is here to compare with.

    Raises:
        ValueError: what `closes_at` returned is no time.
    """
    within = np.arange(ends.shape[-1]) < quotas[..., None]
    ends = np.where(within, ends, np.inf)
    closes = _closes_at(gate, ends, quotas)[..., None, None]
    if drop:
        counted = within & (ends <= closes)
    else:
        begins = np.concatenate([np.full_like(ends[..., :1], -np.inf), ends[..., :-1]], axis=-1)
        counted = within & (begins < closes)
    done = counted.sum(axis=-1)
    secs = np.max(np.where(counted, ends, 0.0), axis=-1, initial=0.0)
    if drop:  # a worker that has work left computed until the gate closed
        secs = np.where((done < quotas) & np.isfinite(closes[..., 0]), closes[..., 0], secs)
    return Closing(done, secs, np.max(secs, axis=-1, initial=0.0))


def _closes_at(gate: Gate, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """What `closes_at` returns, checked to be f64[...] ≥ 0. It gets views that it cannot write."""
    shown_to_it = ends.view(), quotas.view()
    for array in shown_to_it:
        array.flags.writeable = False
    closes = parts.array_of(gate.closes_at(*shown_to_it))
    if closes.shape == ends.shape[:-2] and closes.dtype.kind in "fiu" and (closes >= 0).all():
        return closes
    raise ValueError(
        f"gate: {parts.named(gate)}: closes_at(ends, quotas) returned {parts.shown(closes)}, must "
        f"return seconds, f64{list(ends.shape[:-2])} of at least 0, or infinite"
    )
