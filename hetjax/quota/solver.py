"""What does a round cost each worker, and which quotas make the slowest worker's round shortest?

A cost is affine with a free zero,

    t_i(k) = overhead_i + secs_per_microbatch_i · k   for k > 0,   t_i(0) = 0,

which fits a device with a fixed expense a round (dispatch, transfer, a synchronisation's share).

The exact integer problem: minimise max_i t_i(k_i) over 0 ≤ k_i ≤ cap_i with Σ k_i = total. A greedy
that gives one microbatch at a time to the worker whose t_i(k_i + 1) is least is exact for any
non-decreasing t_i. Of many microbatches most end so early that the greedy is sure to take them, so
only the others are placed one by one. `largest_remainder` divides in proportions that are given.
`estimate.py` finds the costs, and `fitted.py` decides whether a move is worth it.
"""

import bisect
import dataclasses
import heapq
import numbers

import numpy as np
from numpy.typing import ArrayLike

_FEW = 128  # microbatches, which are faster placed one by one
_HOLDING, _RETURNING = 0.05, 0.02  # parts of the round that one microbatch of a worker may add
_SURELY = 1.0 - 1e-9  # part of the shortest round, beyond all rounding: what ends by then is taken


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
        if overhead.ndim == 0:
            overhead = np.full(secs.shape, overhead)
        if secs.ndim != 1 or not secs.size or overhead.shape != secs.shape:
            raise ValueError(
                f"secs_per_microbatch has shape {secs.shape} and overhead_secs {overhead.shape}; "
                "give both for each worker"
            )
        right = (secs > 0) & (secs < np.inf) & (overhead >= 0) & (overhead < np.inf)
        if not right.all():
            i = int(np.argmin(right))
            raise ValueError(
                f"secs_per_microbatch of worker {i} is {secs[i]}, overhead_secs {overhead[i]}; "
                "they must be finite, above 0 and ≥ 0"
            )
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


def solve_quotas(
    costs: WorkerCosts,
    total: int,
    *,
    caps: ArrayLike | None = None,
    current: ArrayLike | None = None,
) -> np.ndarray:
    """Returns the quotas with the shortest round, min max_i t_i(k_i) with Σ k_i = total.

    The result is exactly that of the greedy, microbatch by microbatch. So every process that has
    the same numbers computes the same quotas.

    Args:
      costs: what a round costs each of the n workers.
      total: microbatches to place, ≥ 0.
      caps: i64[n], the most each worker may get; 0 for one that is absent. None: no limit.
      current: i64[n], the quotas held now. Of microbatches of equal time one that is already held
        (k ≤ current_i) comes first, then that of the worker of lower rank.

    Returns:
      i64[n], the quotas.

    Raises:
      ValueError: the caps hold less than the total, or an argument has the wrong shape or sign.

    Example:
      >>> solve_quotas(WorkerCosts(0.0, [1.0, 2.0, 4.0]), 14).tolist()
      [8, 4, 2]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272, sets the task; the exact solution is not from there.
    """
    total, limits, held = _checked(costs.secs_per_microbatch.size, total, caps, current)
    first = np.zeros_like(limits)
    if total > _FEW:
        level = _SURELY * continuous_bound_secs(costs, total, caps=limits)
        ended = np.floor((level - costs.overhead_secs) / costs.secs_per_microbatch)
        first = np.clip(ended, 0, limits).astype(np.int64)
    quotas, most, holds = first.tolist(), limits.tolist(), held.tolist()
    overhead, secs = costs.overhead_secs.tolist(), costs.secs_per_microbatch.tolist()
    following = [  # of each worker that has room: when it ends, whether it is new, whose it is
        (overhead[i] + secs[i] * (k + 1), k >= holds[i], i)
        for i, k in enumerate(quotas)
        if k < most[i]
    ]
    heapq.heapify(following)
    for _ in range(total - sum(quotas)):
        i = following[0][2]
        quotas[i] = k = quotas[i] + 1
        if k < most[i]:
            heapq.heapreplace(following, (overhead[i] + secs[i] * (k + 1), k >= holds[i], i))
        else:
            heapq.heappop(following)
    return np.array(quotas, np.int64)


def solve_with_all(
    costs: WorkerCosts, total: int, *, caps: np.ndarray, current: np.ndarray
) -> np.ndarray:
    """The exact quotas, but for workers whose one microbatch would hardly make the round longer.

    With quota 0 a worker is seen no more, and clocks are not exact to some percent. So those of
    which one microbatch ends at most 5 % beyond the shortest round get one, and the others divide
    what is left. For a worker that holds none it is 2 %, so that noise moves none to and fro.

    Args:
      costs, total, caps: as for `solve_quotas`.
      current: i64[n], the quotas held now; all 0: none yet.

    Returns:
      i64[n], the quotas.

    Example:
      >>> near, caps = WorkerCosts(0.0, [1.0, 8.2]), np.array([8, 8])
      >>> solve_quotas(near, 8).tolist()
      [8, 0]
      >>> solve_with_all(near, 8, caps=caps, current=np.array([7, 1])).tolist()
      [7, 1]
      >>> solve_with_all(near, 8, caps=caps, current=np.array([8, 0])).tolist()
      [8, 0]
    """
    quotas = solve_quotas(costs, total, caps=caps, current=current)
    if quotas[caps > 0].all():
        return quotas
    allowed = np.where((current > 0) | (current.sum() == 0), _HOLDING, _RETURNING)
    round_secs = costs.round_secs(quotas).max()
    alone = costs.overhead_secs + costs.secs_per_microbatch
    given = (caps > 0) & ((quotas > 0) | (alone <= (1.0 + allowed) * round_secs))
    if (quotas > 0).sum() == given.sum() or given.sum() > total:
        return quotas
    more = WorkerCosts(alone, costs.secs_per_microbatch)
    rest, room = total - int(given.sum()), np.where(given, caps - 1, 0)
    return given + solve_quotas(more, rest, caps=room, current=np.maximum(current - given, 0))


def optimal_round_secs(costs: WorkerCosts, total: int, *, caps: ArrayLike | None = None) -> float:
    """Returns the shortest round possible with whole microbatches, in seconds.

    Args:
      costs: of n workers, in seconds.
      total: microbatches of the round, at least 0.
      caps: i64[n], the most that each worker may do; None: no limit.

    Raises:
      ValueError: the caps hold less than the total, or an argument has the wrong shape or sign.

    Example:
      >>> optimal_round_secs(WorkerCosts(0.0, [1.0, 2.0]), 4)
      3.0
    """
    return float(costs.round_secs(solve_quotas(costs, total, caps=caps)).max())


def continuous_bound_secs(
    costs: WorkerCosts, total: int, *, caps: ArrayLike | None = None
) -> float:
    """Returns the shortest round if microbatches could be divided, in seconds.

    It is the T with Σ_i clip((T − overhead_i)/secs_i, 0, cap_i) = total. No quotas are faster.

    Args:
      costs: of n workers, in seconds.
      total: microbatches of the round, at least 0.
      caps: i64[n], the most that each worker may do; None: no limit.

    Raises:
      ValueError: the caps hold less than the total, or an argument has the wrong shape or sign.

    Example:
      >>> round(continuous_bound_secs(WorkerCosts(0.0, [1.0, 2.0]), 4), 6)
      2.666667
    """
    total, limits, _ = _checked(costs.secs_per_microbatch.size, total, caps)
    if not total:
        return 0.0
    overhead, secs = costs.overhead_secs, costs.secs_per_microbatch
    full = overhead + secs * limits
    levels = np.sort(np.concatenate([overhead, full]))

    def amount(level: float) -> float:
        # A full worker counts exactly its limit: its division may be off by more than the others'.
        part = np.clip((level - overhead) / secs, 0, limits)
        return float(np.where(full <= level, limits, part).sum())

    # amount(levels[above - 1]) < total ≤ amount(levels[above])
    above = bisect.bisect_left(levels, float(total), 1, levels.size - 1, key=amount)
    level = levels[above - 1]
    rate = (1.0 / secs)[(overhead <= level) & (full > level)].sum()
    if rate == 0:
        return float(level)
    return float(min(level + max(total - amount(level), 0.0) / rate, levels[above]))


def largest_remainder(
    proportions: ArrayLike, total: int, *, caps: ArrayLike | None = None
) -> np.ndarray:
    """Returns whole shares in the given proportions, whose sum is exactly `total`.

    Worker i gets ⌊total·p_i/Σp⌋. The things still left go to the largest fractions, ties to the
    lowest rank. A worker whose share is above its cap gets its cap, and the others share the rest
    in their proportions. If only workers of proportion 0 have room, they share equally.

    Args:
      proportions: f64[n], ≥ 0 and not all 0; they need not sum to 1.
      total: number of things to divide, ≥ 0.
      caps: i64[n], the most each may get. None: no limit.

    Returns:
      i64[n], the shares.

    Raises:
      ValueError: a proportion is negative or not finite, all are 0, or the caps hold less.

    Example:
      >>> largest_remainder([4, 3, 2, 1], 16).tolist()
      [6, 5, 3, 2]
      >>> largest_remainder([4, 3, 2, 1], 16, caps=[4, 16, 16, 16]).tolist()
      [4, 6, 4, 2]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272: static allocation in given proportions.
    """
    weights = np.asarray(proportions, np.float64)
    right = weights.ndim == 1 and np.isfinite(weights).all() and (weights >= 0).all()
    if not right or not weights.any():
        raise ValueError(f"proportions are {weights.tolist()}; give finite ones, ≥ 0, not all 0")
    total, limits, _ = _checked(weights.size, total, caps)
    shares = np.zeros_like(limits)
    free = limits > 0
    while shares.sum() < total:
        if not weights[free].any():
            weights = np.ones_like(weights)
        open_weights = np.where(free, weights, 0.0)
        ideal = open_weights / open_weights.sum() * (total - shares[~free].sum())
        over = free & (ideal > limits)
        if over.any():
            shares[over] = limits[over]
            free &= ~over
            continue
        shares[free] = np.floor(ideal[free])
        room = np.flatnonzero(free & (shares < limits))
        order = room[np.argsort(shares[room] - ideal[room], kind="stable")]
        shares[order[: total - shares.sum()]] += 1
        free &= shares < limits
    return shares


def equal_split(total: int, caps: np.ndarray) -> np.ndarray:
    """The same share for every worker whose cap is above 0, i64[n]."""
    present = caps > 0
    return largest_remainder(present | ~present.any(), total, caps=caps)


def are_allowed(quotas: np.ndarray, total: int, caps: np.ndarray) -> bool:
    """Whether the quotas have this sum and keep to the caps."""
    return bool(quotas.sum() == total and (quotas <= caps).all())


def _checked(
    num_workers: int, total: int, caps: ArrayLike | None, current: ArrayLike | None = None
) -> tuple[int, np.ndarray, np.ndarray]:
    """The total, the most of each worker, and what it holds, i64[n]."""
    if not isinstance(total, numbers.Integral) or total < 0:
        raise ValueError(f"total is {total!r}; it must be a whole number, 0 or more")
    counts = {"caps": np.full(num_workers, int(total)), "current": np.zeros(num_workers, np.int64)}
    for name, given in (("caps", caps), ("current", current)):
        if given is None:
            continue
        count = np.asarray(given)
        if count.shape != (num_workers,) or count.dtype.kind not in "iu" or (count < 0).any():
            raise ValueError(f"{name} is {given!r}; must be {num_workers} whole numbers, 0 or more")
        counts[name] = count.astype(np.int64)
    limits, held = counts.values()
    if limits.sum() < total:
        raise ValueError(
            f"total is {total}, but the caps of {num_workers} workers hold only {limits.sum()}"
        )
    return int(total), np.minimum(limits, int(total)), held
