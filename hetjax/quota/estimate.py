"""What does a worker's round cost, as its clock has shown so far, and since when?

Weighted least squares for t = overhead·[holds the round's start] + secs·m for every worker at
once, from sufficient statistics. A round of k microbatches gives two observations of ([start], m,
t): (1, 1, first secs) and (0, k − 1, the rest). If only the total is known, it gives (1, k, total).
The variance of an observation is taken in proportion to its microbatches.

Observations may not tell overhead and secs apart (k always 1, or only totals at one quota). Then
their last known ratio is kept, 0 at first. For a worker that slows down mostly does so in
everything, and a kept overhead would leave microbatches that look almost free.

The detector of changes is a two-sided CUSUM on the log residual of each worker's compute against
its expectation, in standard deviations of the worker's own noise. The residual is clipped: one or
two late rounds never raise the alarm, while a worker that became twice as slow does in three. On an
alarm the most likely first round of the change is found, and only what came from then on is kept.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from hetjax.quota import solver

_SINGULAR = 1e-9  # least determinant over the product of the diagonal
_LEAST_SLOPE = 1e-3  # the least part of a worker's mean time that a microbatch may cost

PRIOR_NOISE = 0.1  # relative noise of a round's compute, assumed before anything was seen
_PRIOR_ROUNDS = 4.0  # rounds that this assumption counts as
_LEAST_NOISE = 0.01
_MEMORY_ROUNDS = 512.0  # the noise level is a mean over about so many rounds
_CLIP = 3.0  # most standard deviations of a residual that the noise level counts
_CLIPPED = 6.0  # the same of the CUSUM
_FEW_WORKERS = 3  # with so many or more, the workers tell how noisy a round is
_INNER = 0.3  # part of the workers that hardly all changed at once
_INNER_NORMAL = 0.385  # standard deviations within which that part of a normal variable lies
_WINDOW = 32  # rounds among which a change can have begun

StateT = TypeVar("StateT", bound=NamedTuple)


class Samples(NamedTuple):
    """Normal equations of every worker, x = ([start], m), weights 1/m, and counts."""

    start_start: np.ndarray  # f64[n], Σ [start]²/m
    start_count: np.ndarray  # f64[n], Σ [start]: rounds observed
    microbatches: np.ndarray  # f64[n], Σ m
    start_secs: np.ndarray  # f64[n], Σ [start]·t/m
    total_secs: np.ndarray  # f64[n], Σ t


class Detector(NamedTuple):
    """What the detector remembers of n workers; w is its window."""

    variance: np.ndarray  # f64[n], of a round's log residual
    rounds: np.ndarray  # f64[n], rounds in the variance
    slower: np.ndarray  # f64[n], CUSUM upwards
    faster: np.ndarray  # f64[n], CUSUM downwards
    done: np.ndarray  # i64[n, w], microbatches of the last rounds, newest last; 0: not used
    first_secs: np.ndarray  # f64[n, w]
    compute_secs: np.ndarray  # f64[n, w]
    scores: np.ndarray  # f64[n, w], residuals in standard deviations, clipped


def no_samples(num_workers: int) -> Samples:
    """Returns samples of nothing for n workers."""
    return Samples(*(np.zeros(num_workers) for _ in Samples._fields))


def no_watch(num_workers: int) -> Detector:
    """Returns the state of a detector that has seen nothing."""
    zeros = np.zeros(num_workers)
    window = np.zeros((num_workers, _WINDOW))
    variance = np.full(num_workers, PRIOR_NOISE**2)
    return Detector(variance, zeros, zeros, zeros, window.astype(np.int64), window, window, window)


def choose(where: np.ndarray, new: Any, old: Any) -> Any:
    """Returns `new` for the workers where bool[n] is true, `old` for the others.

    Both are arrays whose first axis is that of the workers, or records of such.
    """
    if where.all():
        return new
    if isinstance(old, tuple):
        return type(old)(*(choose(where, a, b) for a, b in zip(new, old, strict=True)))
    return np.where(where.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def with_fields_of(
    other: StateT, state: StateT, workers: np.ndarray, fields: tuple[str, ...]
) -> StateT:
    """Returns the state, but with these fields of another for the workers where bool[n] is true."""
    chosen = {name: choose(workers, getattr(other, name), getattr(state, name)) for name in fields}
    return state._replace(**chosen)


def samples_of(done: np.ndarray, first_secs: np.ndarray, compute_secs: np.ndarray) -> Samples:
    """Returns what rounds contribute, elementwise: f64 of the inputs' shape.

    Args:
      done: i64[...], microbatches computed; 0 contributes nothing.
      first_secs: f64[...], seconds to the end of the first microbatch; NaN: unknown.
      compute_secs: f64[...], seconds of all of them.
    """
    busy = done > 0
    count = np.where(busy, done, 1).astype(np.float64)
    split = busy & ~np.isnan(first_secs)
    first_count = np.where(split, 1.0, count)
    first = np.where(split, first_secs, compute_secs)
    return Samples(
        np.where(busy, 1.0 / first_count, 0.0),
        busy.astype(np.float64),
        np.where(busy, count, 0.0),
        np.where(busy, first / first_count, 0.0),
        np.where(busy, compute_secs, 0.0),
    )


def fit(
    samples: Samples, overhead_secs: np.ndarray, secs_per_microbatch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (overhead_secs f64[n] ≥ 0, secs_per_microbatch f64[n] > 0), NaN without samples.

    Args:
      samples: of n workers.
      overhead_secs: f64[n], as fitted last; NaN: never.
      secs_per_microbatch: f64[n], the same. If the samples cannot tell, the ratio is kept.

    Example:
      >>> done, first, compute = np.array([4]), np.array([3.0]), np.array([9.0])
      >>> unknown = np.array([np.nan])
      >>> overhead, secs = fit(samples_of(done, first, compute), unknown, unknown)
      >>> overhead.item(), secs.item()
      (1.0, 2.0)
    """
    start, rounds, count, start_secs, total_secs = samples
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = start * count - rounds**2
        apart = determinant > _SINGULAR * start * count
        solved = (count * start_secs - rounds * total_secs) / determinant
        ratio = overhead_secs / secs_per_microbatch
        ratio = np.where(np.isnan(ratio), 0.0, ratio)
        kept = ratio * total_secs / (ratio * rounds + count)
        overhead = np.where(apart, solved, kept)
        most = (1.0 - _LEAST_SLOPE) * total_secs / rounds
        overhead = np.clip(overhead, 0.0, most)
        return overhead, (total_secs - rounds * overhead) / count


def costs_of(
    overhead_secs: np.ndarray, secs_per_microbatch: np.ndarray, factors: ArrayLike = 1.0
) -> solver.WorkerCosts:
    """Returns the costs times the factors; a worker that is not known gets the cost 1."""
    known = ~np.isnan(secs_per_microbatch)
    return solver.WorkerCosts(
        np.where(known, overhead_secs * factors, 0.0),
        np.where(known, secs_per_microbatch * factors, 1.0),
    )


def noise(watch: Detector) -> np.ndarray:
    """Returns the relative noise of a round's compute, f64[n], at least 1 %."""
    return np.maximum(np.sqrt(watch.variance), _LEAST_NOISE)


def watched(
    watch: Detector,
    times: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    log_ratios: np.ndarray,
    scales: np.ndarray,
    seen: np.ndarray,
    usual: np.ndarray,
    drift: float,
    alarm: float,
) -> tuple[Detector, np.ndarray, np.ndarray, np.ndarray]:
    """Adds k rounds to what the detector remembers, and says which workers have changed.

    If all but a few workers are off by more than their noise, the noise was underestimated and
    none has changed. So deviations are at least what three in ten workers are within. The logarithm
    of a gamma variable of mean one has a mean of about minus half its variance. That much is added,
    so noise of any size drifts neither way. A change began at the round j of the window for which
    Σ_{l ≥ j} (s·score_l − δ/2) is largest. That is the likelihood ratio of a shift δ (the mean of
    the last two scores) in direction s.

    Args:
      watch: the detector's state.
      times: microbatches i64[k, n], first seconds f64[k, n], seconds f64[k, n]; no microbatches,
        no change; only where k is 1.
      log_ratios: f64[k, n], log of the compute over its expectation.
      scales: f64[k, n], by how much a round is noisier than a usual one of the worker.
      seen: bool[n], which computed and have an expectation.
      usual: bool[n], whose residuals tell how noisy the round was.
      drift: standard deviations a round that are no change.
      alarm: the CUSUM at which a worker has changed.

    Returns:
      `(watch, changed bool[n], scores f64[k, n], deviations f64[k, n])`: the residuals in standard
      deviations, and these. Of one that has changed, what came before is gone.
    """
    deviations, num_rounds = noise(watch), len(log_ratios)
    if (num_usual := np.count_nonzero(usual)) >= _FEW_WORKERS:
        sizes = np.sort(np.where(usual, np.abs(log_ratios) / scales, np.inf))
        inner = sizes[:, int(_INNER * (num_usual - 1)), None]
        deviations = np.maximum(deviations, inner / _INNER_NORMAL)
    deviations = deviations * scales
    residuals = log_ratios + np.minimum(0.5 * deviations**2, 0.58)
    scores = np.where(seen, residuals / deviations, 0.0)
    clipped = np.clip(scores, -_CLIPPED, _CLIPPED)
    rounds = np.minimum(watch.rounds + num_rounds * seen, _MEMORY_ROUNDS)
    squares = np.minimum(residuals**2, (_CLIP * deviations) ** 2) / scales**2
    step = np.where(seen, (squares - watch.variance).sum(axis=0) / (rounds + _PRIOR_ROUNDS), 0.0)
    sums = np.stack([watch.slower, watch.faster])
    for score in clipped:
        sums = np.maximum(sums + np.stack([score, -score]) - drift, 0.0)
    windows = zip(watch[4:], (*times, clipped), strict=True)
    newer = Detector(
        watch.variance + step,
        rounds,
        *sums,
        *(np.concatenate([old[:, num_rounds:], new.T], axis=1) for old, new in windows),
    )
    busy = times[0][-1] > 0
    watch = choose(busy, newer, watch)
    changed = np.maximum(watch.slower, watch.faster) > alarm
    if changed.any():
        sign = np.where(watch.slower > watch.faster, 1.0, -1.0)[:, None]
        shift = np.maximum((sign * watch.scores)[:, -2:].mean(axis=1, keepdims=True), 1.0)
        gains = np.where(watch.done > 0, sign * watch.scores - 0.5 * shift, -np.inf)
        sums = np.cumsum(gains[:, ::-1], axis=1)[:, ::-1]
        newest = np.arange(_WINDOW) >= np.argmax(sums, axis=1)[:, None]
        watch = watch._replace(
            slower=np.where(changed, 0.0, watch.slower),
            faster=np.where(changed, 0.0, watch.faster),
            done=np.where(newest | ~changed[:, None], watch.done, 0),
            scores=np.where(changed[:, None], 0.0, watch.scores),
        )
    return watch, changed, scores, deviations
