"""The gates that there are: when the first worker is done, at a number of microbatches, at a time.

References:
    Ferdinand et al., "Anytime MiniBatch: exploiting stragglers in online distributed
    optimization", 2020, arXiv 2006.05752: the deadline.
"""

from collections.abc import Callable, Iterable
from typing import Annotated

import numpy as np

from hetjax import parts
from hetjax.gates.gate import AlwaysOpen, Board, Clock, Gate


def _at(secs: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`closes_at` of a gate that closes at a time, whatever the workers do."""
    return lambda ends, quotas: np.full(np.shape(quotas)[:-1], secs)


@parts.factory
def none() -> Gate:
    """Never closes: every worker does its whole quota."""
    return Gate(lambda board, clock: AlwaysOpen(), _at(np.inf), closes=False, needs_news=False)


class _First(AlwaysOpen):
    def finished(self, worker: int, microbatches_done: int) -> None:
        if microbatches_done >= self._quotas[worker]:
            self._close()


@parts.factory
def first() -> Gate:
    """Closes when the first worker has finished its quota; quotas of 0 do not count."""

    def closes_at(ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        last = np.take_along_axis(ends, np.maximum(quotas - 1, 0)[..., None], axis=-1)[..., 0]
        return np.min(np.where(quotas > 0, last, np.inf), axis=-1, initial=np.inf)

    return Gate(
        lambda board, clock: _First(board),
        closes_at,
        needs_quotas=True,
        when="when the first worker has finished its quota",
    )


class _Quorum(AlwaysOpen):
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
                self._left = self._quorum - self._board.add("done")
            if self._left <= 0:
                self._close()


@parts.factory
def quorum(
    quorum: Annotated[
        int,
        parts.integer(unit="microbatches", says="of all workers, that close the round; ≤ budget"),
    ] = 0,
) -> Gate:
    """Closes when `quorum` microbatches of all workers are finished: a batch of nearly one size.

    What is in flight then is added: at most one microbatch of each other worker.

    Args:
        quorum: microbatches, from 1 to the budget; a run refuses other numbers.
    """

    def closes_at(ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
        flat = ends.reshape(*np.shape(ends)[:-2], -1)
        if flat.shape[-1] < quorum:
            return np.full(np.shape(flat)[:-1], np.inf)
        return np.partition(flat, quorum - 1, axis=-1)[..., quorum - 1]

    def problems(facts: parts.Facts) -> Iterable[str]:
        if not 1 <= quorum <= facts.budget:
            yield f"quorum: got {quorum}, must be from 1 to budget={facts.budget}."

    return Gate(
        lambda board, clock: _Quorum(quorum, board),
        closes_at,
        when="when enough microbatches of all workers are finished",
        problems=problems,
    )


class _Deadline(AlwaysOpen):
    def __init__(self, deadline_secs: float, clock: Clock) -> None:
        super().__init__()
        self._deadline_secs, self._clock = deadline_secs, clock

    def begin(self, quotas: np.ndarray) -> None:
        self._began: float | None = None

    def is_open(self) -> bool:
        with self._lock:
            if self._began is None:  # the first worker that has the round's parameters sets it
                self._began = self._clock()
            return self._clock() - self._began < self._deadline_secs


@parts.factory
def deadline(
    deadline_secs: Annotated[
        float,
        parts.number(at_least=0.0, unit="seconds", says="after which a round closes; above 0"),
    ] = 0.0,
) -> Gate:
    """Closes `deadline_secs` after the round began; what is in flight is finished.

    Each process has a clock of its own, and begins a round when its parameters are there.

    Args:
        deadline_secs: above 0. If speeds are emulated, no shorter than the first microbatch. A run
            refuses other values.
    """

    def problems(facts: parts.Facts) -> Iterable[str]:
        shortest = facts.shortest_secs
        if not deadline_secs:
            yield "deadline_secs: got 0.0, must be above 0."
        elif deadline_secs < shortest:
            yield (
                f"deadline_secs: got {deadline_secs}, must be at least {shortest:g}, the mean "
                "time of the fastest first microbatch."
            )

    return Gate(
        lambda board, clock: _Deadline(deadline_secs, clock),
        _at(deadline_secs),
        needs_news=False,
        when="at a deadline",
        problems=problems,
    )
