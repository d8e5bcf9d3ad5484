"""Has a worker's speed changed, and since when?

A two-sided CUSUM on the log residual of each worker's compute against its expectation, in
standard deviations of the worker's own noise. The residual is clipped: one or two late rounds never
raise the alarm, while a worker that became twice as slow does in three. On an alarm the most likely
first round of the change is found, and only what came from then on is kept. `estimate.py` has the
expectation.
"""

from typing import NamedTuple

import numpy as np

from hetjax.quota import estimate

PRIOR_NOISE = 0.1  # relative noise of a round's compute, assumed before anything was seen
_PRIOR_ROUNDS = 4.0  # rounds that this assumption counts as
_LEAST_NOISE = 0.01
_MEMORY_ROUNDS = 512.0  # the noise level is a mean over about so many rounds
_CLIP = 3.0  # most standard deviations of a residual that the noise level counts
_FEW_WORKERS = 3  # with so many or more, the workers tell how noisy a round is
_INNER = 0.3  # part of the workers that hardly all changed at once
_INNER_NORMAL = 0.385  # standard deviations within which that part of a normal variable lies
_WINDOW = 32  # rounds among which a change can have begun


class Watch(NamedTuple):
    """What the detector remembers of n workers; w is its window."""

    variance: np.ndarray  # f64[n], of a round's log residual
    rounds: np.ndarray  # f64[n], rounds in the variance
    slower: np.ndarray  # f64[n], CUSUM upwards
    faster: np.ndarray  # f64[n], CUSUM downwards
    done: np.ndarray  # i64[n, w], microbatches of the last rounds, newest last; 0: not used
    first_secs: np.ndarray  # f64[n, w]
    compute_secs: np.ndarray  # f64[n, w]
    scores: np.ndarray  # f64[n, w], residuals in standard deviations, clipped


def init(num_workers: int) -> Watch:
    """Returns the state of a detector that has seen nothing."""
    zeros = np.zeros(num_workers)
    window = np.zeros((num_workers, _WINDOW))
    variance = np.full(num_workers, PRIOR_NOISE**2)
    return Watch(variance, zeros, zeros, zeros, window.astype(np.int64), window, window, window)


def forget(watch: Watch, workers: np.ndarray) -> Watch:
    """Returns the state with the workers where bool[n] is true as if never seen."""
    return estimate.choose(workers, init(workers.size), watch)


def noise(watch: Watch) -> np.ndarray:
    """Returns the relative noise of a round's compute, f64[n], at least 1 %."""
    return np.maximum(np.sqrt(watch.variance), _LEAST_NOISE)


def median(values: np.ndarray) -> float:
    """The median of a few values, f64[≥ 1], at a tenth of what NumPy's costs."""
    ordered, half = np.sort(values), values.size // 2
    return float(ordered[half] if values.size % 2 else 0.5 * (ordered[half - 1] + ordered[half]))


def score(
    watch: Watch, log_ratios: np.ndarray, scales: np.ndarray, usual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log residuals, bias removed, and the standard deviation of each, f64[n].

    Args:
      watch: the detector's state.
      log_ratios: f64[n], log of the compute over its expectation.
      scales: f64[n], by how much this round is noisier than a usual one of the worker.
      usual: bool[n], whose residuals tell how noisy the round was.

    If all but a few workers are off by more than their noise, the noise was underestimated and
    none has changed. So deviations are at least what three in ten workers are within. The logarithm
    of a gamma variable of mean one has a mean of about minus half its variance. That much is added,
    so noise of any size drifts neither way.
    """
    deviations = noise(watch)
    if np.count_nonzero(usual) >= _FEW_WORKERS:
        sizes = np.sort(np.abs(log_ratios[usual]) / scales[usual])
        inner = sizes[int(_INNER * (sizes.size - 1))]
        deviations = np.maximum(deviations, inner / _INNER_NORMAL)
    deviations = deviations * scales
    return log_ratios + np.minimum(0.5 * deviations**2, 0.58), deviations


def learn_noise(
    watch: Watch, residuals: np.ndarray, deviations: np.ndarray, busy: np.ndarray
) -> Watch:
    """Adds the residuals f64[n] of a usual round to the noise of the workers in busy bool[n]."""
    rounds = np.minimum(watch.rounds + busy, _MEMORY_ROUNDS)
    squares = np.minimum(residuals**2, _CLIP**2 * deviations**2)
    step = np.where(busy, (squares - watch.variance) / (rounds + _PRIOR_ROUNDS), 0.0)
    return watch._replace(variance=watch.variance + step, rounds=rounds)


def push(
    watch: Watch,
    done: np.ndarray,
    first_secs: np.ndarray,
    compute_secs: np.ndarray,
    scores: np.ndarray,
    *,
    drift: float,
) -> Watch:
    """Adds a round: every argument is [n]; workers with done 0 stay as they are."""
    busy = done > 0
    all_busy = bool(busy.all())

    def shifted(window: np.ndarray, newest: np.ndarray) -> np.ndarray:
        moved = np.concatenate([window[:, 1:], newest[:, None]], axis=1)
        return moved if all_busy else np.where(busy[:, None], moved, window)

    return watch._replace(
        slower=np.where(busy, np.maximum(watch.slower + scores - drift, 0.0), watch.slower),
        faster=np.where(busy, np.maximum(watch.faster - scores - drift, 0.0), watch.faster),
        done=shifted(watch.done, done),
        first_secs=shifted(watch.first_secs, first_secs),
        compute_secs=shifted(watch.compute_secs, compute_secs),
        scores=shifted(watch.scores, scores),
    )


def cut(watch: Watch, alarm: float) -> tuple[np.ndarray, Watch]:
    """Returns which workers have changed, bool[n], and the state without what came before.

    The change began at the round j of the window for which Σ_{l ≥ j} (s·score_l − δ/2) is largest.
    That is the likelihood ratio of a shift δ (the mean of the last two scores) in direction s.
    """
    changed = np.maximum(watch.slower, watch.faster) > alarm
    if not changed.any():
        return changed, watch
    sign = np.where(watch.slower > watch.faster, 1.0, -1.0)[:, None]
    shift = np.maximum((sign * watch.scores)[:, -2:].mean(axis=1, keepdims=True), 1.0)
    gains = np.where(watch.done > 0, sign * watch.scores - 0.5 * shift, -np.inf)
    sums = np.cumsum(gains[:, ::-1], axis=1)[:, ::-1]
    newer = np.arange(_WINDOW) >= np.argmax(sums, axis=1)[:, None]
    kept = newer | ~changed[:, None]
    return changed, watch._replace(
        slower=np.where(changed, 0.0, watch.slower),
        faster=np.where(changed, 0.0, watch.faster),
        done=np.where(kept, watch.done, 0),
        scores=np.where(changed[:, None], 0.0, watch.scores),
    )
