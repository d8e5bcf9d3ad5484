"""What a round costs each worker.

Answers: how many seconds does worker i compute in a round in which its quota is k microbatches?
Assumes an affine cost with a free zero,

    t_i(k) = overhead_i + secs_per_microbatch_i · k   for k > 0,   t_i(0) = 0,

This fits a device with a fixed expense a round (dispatch, transfer, a synchronisation's share).
`estimate.py` finds the numbers, `solver.py` uses them.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerCosts:
    """Seconds a round costs each of n workers: `overhead_secs + secs_per_microbatch · k`.

    Args:
      overhead_secs: f64[n], seconds a round costs a worker beside its microbatches, ≥ 0. A
        single number counts for every worker.
      secs_per_microbatch: f64[n], seconds of one microbatch, > 0.

    Raises:
      ValueError: the two differ in length, there is no worker, or a number is negative, zero
        where it may not be, or not finite.

    Example:
      >>> costs = WorkerCosts(overhead_secs=[0.5, 0.0], secs_per_microbatch=[1.0, 2.0])
      >>> costs.round_secs([4, 0]).tolist()
      [4.5, 0.0]
    """

    overhead_secs: np.ndarray
    secs_per_microbatch: np.ndarray

    def __init__(self, overhead_secs: ArrayLike, secs_per_microbatch: ArrayLike):
        secs = np.asarray(secs_per_microbatch, np.float64)
        overhead = np.asarray(overhead_secs, np.float64)
        if secs.ndim != 1 or not secs.size:
            raise ValueError(
                f"secs_per_microbatch has shape {secs.shape}; it must be one number for each "
                "worker, f64[n] with n at least 1."
            )
        if overhead.ndim == 0:
            overhead = np.full(secs.shape, overhead)
        if overhead.shape != secs.shape:
            raise ValueError(
                f"overhead_secs has shape {overhead.shape} and secs_per_microbatch "
                f"{secs.shape}; give both for the same workers, or one number as overhead."
            )
        _refuse(~(np.isfinite(secs) & (secs > 0)), "secs_per_microbatch", secs, "above 0")
        _refuse(~(np.isfinite(overhead) & (overhead >= 0)), "overhead_secs", overhead, "≥ 0")
        object.__setattr__(self, "overhead_secs", overhead)
        object.__setattr__(self, "secs_per_microbatch", secs)

    @property
    def num_workers(self) -> int:
        """The number of workers n."""
        return self.secs_per_microbatch.size

    def round_secs(self, quotas: ArrayLike) -> np.ndarray:
        """Returns the seconds each worker computes with these quotas, f64[n]; 0 at quota 0.

        Args:
          quotas: i64[n], microbatches.
        """
        counts = np.asarray(quotas)
        return np.where(counts > 0, self.overhead_secs + self.secs_per_microbatch * counts, 0.0)


def _refuse(wrong: np.ndarray, name: str, values: np.ndarray, allowed: str) -> None:
    if wrong.any():
        worker = int(np.argmax(wrong))
        raise ValueError(
            f"{name} of worker {worker} is {values[worker]}; it must be a finite number of "
            f"seconds {allowed}. A worker that cannot compute gets cap 0 instead."
        )
