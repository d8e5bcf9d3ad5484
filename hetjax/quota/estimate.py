"""What does a worker's round cost, as its clock has shown so far?

Weighted least squares for t = overhead·[holds the round's start] + secs·m for every worker at
once, from sufficient statistics. A round of k microbatches gives two observations of ([start], m,
t): (1, 1, first secs) and (0, k − 1, the rest). If only the total is known, it gives (1, k, total).
The variance of an observation is taken in proportion to its microbatches.

Observations may not tell overhead and secs apart (k always 1, or only totals at one quota). Then
their last known ratio is kept, 0 at first. For a worker that slows down mostly does so in
everything, and a kept overhead would leave microbatches that look almost free. Assumes that
outliers are clipped and change points cut before: `changes.py`.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from hetjax.quota import costs as costs_lib

_SINGULAR = 1e-9  # least determinant over the product of the diagonal
_LEAST_SLOPE = 1e-3  # the least part of a worker's mean time that a microbatch may cost

RecordT = TypeVar("RecordT", bound=tuple[Any, ...])


class Samples(NamedTuple):
    """Normal equations of every worker, x = ([start], m), weights 1/m, and counts."""

    start_start: np.ndarray  # f64[n], Σ [start]²/m
    start_count: np.ndarray  # f64[n], Σ [start]: rounds observed
    microbatches: np.ndarray  # f64[n], Σ m
    start_secs: np.ndarray  # f64[n], Σ [start]·t/m
    total_secs: np.ndarray  # f64[n], Σ t


def no_samples(num_workers: int) -> Samples:
    """Returns samples of nothing for n workers."""
    return Samples(*(np.zeros(num_workers) for _ in Samples._fields))


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


def add(samples: Samples, more: Samples) -> Samples:
    """Returns the samples of both."""
    return Samples(*(a + b for a, b in zip(samples, more, strict=True)))


def choose(where: np.ndarray, new: RecordT, old: RecordT) -> RecordT:
    """Returns `new` for the workers where bool[n] is true, `old` for the others.

    Both are records of arrays whose first axis is that of the workers.
    """
    fields = zip(new, old, strict=True)
    return type(old)(*(np.where(where.reshape(-1, *[1] * (b.ndim - 1)), a, b) for a, b in fields))


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
) -> costs_lib.WorkerCosts:
    """Returns the costs times the factors; a worker that is not known gets the cost 1."""
    known = ~np.isnan(secs_per_microbatch)
    return costs_lib.WorkerCosts(
        np.where(known, overhead_secs * factors, 0.0),
        np.where(known, secs_per_microbatch * factors, 1.0),
    )
