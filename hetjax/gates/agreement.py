"""Do the two forms of a gate close a round at the same moment?

`play` drives the threads' form through a round, event by event on an invented clock, as the
workers' threads would. What is done then has to be what `closes_at` says of the same times. A gate
may be any user's, and a run uses only one of its forms. So both are compared on a few invented
rounds when a run is made.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from hetjax import parts
from hetjax.gates import gate as gate_lib

_MOST_EVENTS = 20_000  # of all invented rounds together: 0.1 s
_SCALES = (1.0, 0.01, 0.1, 10.0, 0.001)  # seconds a microbatch, in turn: a deadline lies somewhere
_MOST_ROUNDS = 10
_TICK = 2.0**-28  # seconds; all invented times are multiples of it, so sums of them are exact
_LONGEST = 400  # characters of the times of a round


class Clock:
    """A clock that shows the time to which it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(live: gate_lib.Live, clock: Clock, ends: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """What each worker has finished when nothing is in flight any more: i64[W].

    Args:
        live: the threads' form, made with the clock.
        clock: is set to the time of each event; it may have shown any time before.
        ends: f64[W, K]: when each microbatch ends, seconds from the round's start; infinite: its
            worker dies in it.
        quotas: i64[W].
    """
    began, done = clock.now, np.zeros(len(quotas), int)
    live.begin(quotas.copy())
    live.is_open()  # as every worker asks before its first microbatch
    events = [(ends[worker, 0], worker) for worker in np.flatnonzero(quotas).tolist()]
    heapq.heapify(events)
    while events and np.isfinite(events[0][0]):
        now, together = events[0][0], []
        clock.now = began + now
        while events and events[0][0] == now:
            together.append(heapq.heappop(events)[1])
        for worker in together:
            done[worker] += 1
            live.finished(worker, int(done[worker]))
        for worker in together:
            if live.is_open() and done[worker] < quotas[worker]:
                heapq.heappush(events, (ends[worker, done[worker]], worker))
    return done


def check(gate: gate_lib.Gate, num_workers: int, budget: int) -> None:
    """Compares the two forms of a gate on a few invented rounds.

    Args:
        gate: the run's.
        num_workers: W, of the run.
        budget: microbatches of a round.

    Raises:
        ValueError: the forms disagree, or what one of them returns is no answer.
    """
    if not gate.closes:
        return
    clock = Clock()
    live = gate_lib.begin(gate, None, clock)
    for ends, quotas in _rounds(num_workers, budget, all_work=gate.needs_quotas):
        said = gate_lib.close(gate, ends, quotas)
        done = play(live, clock, ends, quotas)
        if not np.array_equal(done, said.microbatches_done):
            raise ValueError(
                f"gate: two forms of {parts.named(gate)} disagree, of ends {_shown(ends, quotas)}: "
                f"closes_at leaves {said.microbatches_done.tolist()}, open(board, clock) "
                f"{done.tolist()}"
            )


def _rounds(
    num_workers: int, budget: int, *, all_work: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`(ends f64[W, K], quotas i64[W])`: equal and unequal quotas, times with and without ties."""
    rng = np.random.default_rng(0x9A7E)
    for index in range(max(1, min(_MOST_ROUNDS, _MOST_EVENTS // max(budget, 1)))):
        weights = rng.random(num_workers) ** (index % 3)
        least = int(all_work and budget >= num_workers)
        quotas = least + rng.multinomial(budget - least * num_workers, weights / weights.sum())
        shape = num_workers, max(int(quotas.max()), 1)
        speeds = 1.0 + np.arange(num_workers)[:, None] % 4
        secs = speeds * (rng.exponential(size=shape) if index % 2 else np.ones(shape))
        secs = np.ceil(secs * _SCALES[index % len(_SCALES)] / _TICK) * _TICK
        yield np.cumsum(secs, axis=1), quotas


def _shown(ends: np.ndarray, quotas: np.ndarray) -> str:
    pairs = zip(ends, quotas, strict=True)
    text = str([[float(f"{x:.4g}") for x in own[:count]] for own, count in pairs])
    return text if len(text) < _LONGEST else f"{text[:_LONGEST]}…"
