"""Which fixed quotas would have had the shortest rounds lately?

The mean of a maximum is not the maximum of the means: if times vary much, the best quotas give
fast workers more than their speed's part. How much depends on how the times vary, and on how they
vary together, which no cost model of single workers says. So this module keeps what each worker
took in the last rounds, and computes the rounds that quotas would have had. It moves single
microbatches as long as the mean of these rounds falls. `adaptive.py` decides whether its quotas are
used.
"""

from typing import NamedTuple

import numpy as np

_MOST_KEPT, _LEAST_KEPT = 256, 32  # rounds
_MOST_VALUES = 2**16  # kept rounds times workers
_COLD_ROUNDS = 3  # first rounds, which are not kept
_FIRST_LOOK = 8  # kept rounds before quotas are first looked for
_EVERY = 4  # rounds between two looks, once many are kept
_MOVES = 4  # most moves of a look
_MIN_GAIN = 0.002  # part of the mean round that a move must save
_LATE_MIN_GAIN = 0.01  # the same, once as many rounds are kept as may be
_LAST_GAIN = 0.05  # the same, if it takes a worker's last microbatch, with which it is seen no more
_CONFIDENCE = 1.0  # standard errors of what it saves that a move must save


class SampledState(NamedTuple):
    quotas: np.ndarray  # i64[n]; all 0: none yet
    levels: np.ndarray  # f64[kept, n], seconds a microbatch of a round, newest last; NaN: no work
    rounds: int  # rounds seen


def init(num_workers: int) -> SampledState:
    """Returns a state that has seen nothing."""
    num_kept = int(np.clip(_MOST_VALUES // num_workers, _LEAST_KEPT, _MOST_KEPT))
    levels = np.full((num_kept, num_workers), np.nan)
    return SampledState(np.zeros(num_workers, np.int64), levels, 0)


def observe(
    state: SampledState,
    levels: np.ndarray,
    ratios: np.ndarray,
    usual: np.ndarray,
    *,
    start: np.ndarray,
    caps: np.ndarray,
) -> SampledState:
    """Adds k rounds, and moves the quotas if that shortens the mean round.

    Args:
      state: what is known so far.
      levels: f64[k, n], compute of a round over (microbatches + ratio); NaN: it did nothing.
      ratios: f64[n], overhead over seconds a microbatch.
      usual: f64[n], the level of each worker in rounds in which it did nothing.
      start: i64[n], quotas to begin with if there are none, or if `caps` forbid them.
      caps: i64[n].
    """
    num_rounds = len(levels)
    state = state._replace(rounds=state.rounds + num_rounds)
    num_seen = state.rounds - _COLD_ROUNDS
    if num_seen <= 0:
        return state
    kept = np.concatenate([state.levels[num_rounds:], levels])
    quotas = state.quotas
    if quotas.sum() != start.sum() or (quotas > caps).any():
        quotas = start
    is_time = num_seen < len(kept) // 4 or num_seen % _EVERY < num_rounds
    if num_seen >= _FIRST_LOOK and is_time:
        seen = kept[-num_seen:]
        levels = np.where(np.isnan(seen), usual, seen)
        min_gain = _LATE_MIN_GAIN if num_seen >= len(kept) else _MIN_GAIN
        quotas = improved(quotas, levels, ratios, caps, min_gain=min_gain)
    return SampledState(quotas, kept, state.rounds)


def improved(
    quotas: np.ndarray,
    levels: np.ndarray,
    ratios: np.ndarray,
    caps: np.ndarray,
    *,
    min_gain: float = _MIN_GAIN,
) -> np.ndarray:
    """Returns quotas of the same sum, up to `_MOVES` single moves better, i64[n].

    Worker i would have taken levels[r, i]·(k_i + ratio_i) in round r. The giver is the worker with
    whom one microbatch less saves most, the taker the one with whom one more then adds least.

    Args:
      quotas: i64[n].
      levels: f64[kept, n].
      ratios: f64[n].
      caps: i64[n].
      min_gain: part of the mean round that a move must save, beside a standard error.

    Example:
      >>> levels = np.array([[1.0, 3.0], [1.0, 3.0]])
      >>> improved(np.array([4, 4]), levels, np.zeros(2), np.array([8, 8])).tolist()
      [6, 2]
    """
    every = np.arange(len(levels))
    for _ in range(_MOVES):
        secs = np.where(quotas > 0, levels * (quotas + ratios), 0.0)
        last = secs.argmax(axis=1)
        longest = secs[every, last]
        secs[every, last] = 0.0
        without = np.where(quotas[last] > 1, longest - levels[every, last], 0.0)
        without = np.maximum(without, secs.max(axis=1))
        giver = int(np.argmax(np.bincount(last, longest - without, quotas.size)))
        secs[every, last] = longest
        rest = np.where(last == giver, without, longest)
        added = np.where(quotas > 0, secs + levels, levels * (1.0 + ratios))
        total = np.maximum(added, rest[:, None]).sum(axis=0)
        total[quotas >= caps] = np.inf
        total[giver] = np.inf
        taker = int(np.argmin(total))
        least = max(min_gain, _LAST_GAIN) if quotas[giver] == 1 else min_gain
        if not total[taker] < (1.0 - least) * longest.sum():
            break
        saved = longest - np.maximum(added[:, taker], rest)
        if saved.sum() < _CONFIDENCE * np.sqrt((saved**2).sum()):
            break
        quotas = quotas.copy()
        quotas[giver] -= 1
        quotas[taker] += 1
    return quotas
