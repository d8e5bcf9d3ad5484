"""Which quotas make the slowest worker's round shortest?

The exact integer problem: minimise max_i t_i(k_i) over 0 ≤ k_i ≤ cap_i with Σ k_i = total, for
the affine costs of `costs.WorkerCosts`. A greedy that gives one microbatch at a time to the worker
whose t_i(k_i + 1) is least is exact for any non-decreasing t_i. Every worker's microbatches come in
the order of their times. So the greedy takes the `total` microbatches that are smallest by (time,
not held, rank). Of many microbatches this module finds the same set without taking the steps.
`estimate.py` knows the costs, and `adaptive.py` decides whether a move is worth it.
"""

import heapq
import numbers

import numpy as np
from numpy.typing import ArrayLike

from hetjax.quota import costs as costs_lib

_BISECTIONS = 64
_FEW = 128  # microbatches, which are faster placed one by one


def solve_quotas(
    costs: costs_lib.WorkerCosts,
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
      >>> from hetjax.quota import costs
      >>> solve_quotas(costs.WorkerCosts(0.0, [1.0, 2.0, 4.0]), 14).tolist()
      [8, 4, 2]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272, sets the task; the exact solution is not from there.
    """
    total, limits = checked_counts(costs.num_workers, total, caps)
    held = np.zeros_like(limits) if current is None else _counts("current", current, limits.size)
    if total <= _FEW:
        return _one_by_one(costs, total, limits, held)
    low = _water_level(costs, total, limits)
    # The microbatches up to the continuous level are at most `total`. Raise a second level until
    # it has enough, then close in until few microbatches lie between the two.
    base = top = _ended_by(costs, low, limits)
    high, step = low, limits.size / (1.0 / costs.secs_per_microbatch).sum()
    while top.sum() < total:
        high, step = high + step + np.spacing(high), 2 * step
        top = _ended_by(costs, high, limits)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if (top - base).sum() <= 2 * limits.size or not low < middle < high:
            break
        ended = _ended_by(costs, middle, limits)
        if ended.sum() < total:
            low, base = middle, ended
        else:
            high, top = middle, ended
    # Divisions round: one microbatch of guard on each side, doubled if it proves too little.
    guard = np.ones_like(limits)
    while True:
        first = np.maximum(np.minimum(base, total) - guard, 0)
        last = np.minimum(top + guard, limits)
        quotas, level = _fill(costs, first, last, held, total)
        doubtful = (first > 0) & (costs.round_secs(first) >= level)
        doubtful |= (last < limits) & (costs.round_secs(last + 1) <= level)
        if not doubtful.any():
            return quotas
        guard = np.where(doubtful, 2 * guard, guard)


def _one_by_one(
    costs: costs_lib.WorkerCosts, total: int, limits: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """The greedy itself, of which a heap gives the next microbatch."""
    overhead, secs = costs.overhead_secs.tolist(), costs.secs_per_microbatch.tolist()
    caps, holds = limits.tolist(), held.tolist()
    quotas = [0] * len(caps)

    def following(worker: int) -> tuple[float, bool, int]:
        number = quotas[worker] + 1
        return overhead[worker] + secs[worker] * number, number > holds[worker], worker

    heap = [following(worker) for worker, cap in enumerate(caps) if cap]
    heapq.heapify(heap)
    for _ in range(total):
        worker = heap[0][2]
        quotas[worker] += 1
        if quotas[worker] < caps[worker]:
            heapq.heapreplace(heap, following(worker))
        else:
            heapq.heappop(heap)
    return np.array(quotas, limits.dtype)


def solve_with_all(
    costs: costs_lib.WorkerCosts,
    total: int,
    *,
    caps: np.ndarray,
    current: np.ndarray,
    held: float,
    returning: float,
) -> np.ndarray:
    """The exact quotas, but for workers whose one microbatch would hardly make the round longer.

    With quota 0 a worker is seen no more, and clocks are not exact to some percent. So those of
    which one microbatch ends within the allowed part beyond the shortest round get one, and the
    others divide what is left. The round is at most that part longer.

    Args:
      costs, total, caps: as for `solve_quotas`.
      current: i64[n], the quotas held now; all 0: none yet.
      held: the part of the round allowed for who holds microbatches, or where nobody does.
      returning: the part allowed for who holds none; less, so that noise moves nobody to and fro.

    Returns:
      i64[n], the quotas.

    Example:
      >>> from hetjax.quota import costs
      >>> both = {"caps": np.array([8, 8]), "held": 0.05, "returning": 0.02}
      >>> near = costs.WorkerCosts(0.0, [1.0, 8.2])
      >>> solve_quotas(near, 8).tolist()
      [8, 0]
      >>> solve_with_all(near, 8, current=np.array([7, 1]), **both).tolist()
      [7, 1]
      >>> solve_with_all(near, 8, current=np.array([8, 0]), **both).tolist()
      [8, 0]
    """
    quotas = solve_quotas(costs, total, caps=caps, current=current)
    if quotas[caps > 0].all():
        return quotas
    allowed = np.where((current > 0) | (current.sum() == 0), held, returning)
    round_secs = costs.round_secs(quotas).max()
    alone = costs.overhead_secs + costs.secs_per_microbatch
    given = (caps > 0) & ((quotas > 0) | (alone <= (1.0 + allowed) * round_secs))
    if (quotas > 0).sum() == given.sum() or given.sum() > total:
        return quotas
    more = costs_lib.WorkerCosts(alone, costs.secs_per_microbatch)
    rest, room = total - int(given.sum()), np.where(given, caps - 1, 0)
    return given + solve_quotas(more, rest, caps=room, current=np.maximum(current - given, 0))


def optimal_round_secs(
    costs: costs_lib.WorkerCosts, total: int, *, caps: ArrayLike | None = None
) -> float:
    """Returns the shortest round possible with whole microbatches, in seconds.

    Args:
      costs: of n workers, in seconds.
      total: microbatches of the round, at least 0.
      caps: i64[n], the most that each worker may do; None: no limit.

    Raises:
      ValueError: the caps hold less than the total, or an argument has the wrong shape or sign.

    Example:
      >>> from hetjax.quota import costs
      >>> optimal_round_secs(costs.WorkerCosts(0.0, [1.0, 2.0]), 4)
      3.0
    """
    return float(costs.round_secs(solve_quotas(costs, total, caps=caps)).max())


def continuous_bound_secs(
    costs: costs_lib.WorkerCosts, total: int, *, caps: ArrayLike | None = None
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
      >>> from hetjax.quota import costs
      >>> round(continuous_bound_secs(costs.WorkerCosts(0.0, [1.0, 2.0]), 4), 6)
      2.666667
    """
    total, limits = checked_counts(costs.num_workers, total, caps)
    return _water_level(costs, total, limits) if total else 0.0


def _water_level(costs: costs_lib.WorkerCosts, total: int, limits: np.ndarray) -> float:
    overhead, secs = costs.overhead_secs, costs.secs_per_microbatch
    full = overhead + secs * limits
    levels = np.sort(np.concatenate([overhead, full]))

    def amount(level: float) -> float:
        # A full worker counts exactly its limit: its division may be off by more than the others'.
        part = np.clip((level - overhead) / secs, 0, limits)
        return float(np.where(full <= level, limits, part).sum())

    below, above = 0, levels.size - 1  # amount(levels[below]) < total ≤ amount(levels[above])
    while above - below > 1:
        middle = (below + above) // 2
        if amount(levels[middle]) < total:
            below = middle
        else:
            above = middle
    level = levels[below]
    rate = (1.0 / secs)[(overhead <= level) & (full > level)].sum()
    if rate == 0:
        return float(level)
    return float(min(level + max(total - amount(level), 0.0) / rate, levels[above]))


def _ended_by(costs: costs_lib.WorkerCosts, level: float, limits: np.ndarray) -> np.ndarray:
    """Microbatches of each worker that end by `level`, up to rounding, i64[n]."""
    microbatches = np.floor((level - costs.overhead_secs) / costs.secs_per_microbatch)
    return np.clip(microbatches, 0, limits).astype(np.int64)


def _fill(
    costs: costs_lib.WorkerCosts,
    first: np.ndarray,
    last: np.ndarray,
    held: np.ndarray,
    total: int,
) -> tuple[np.ndarray, float]:
    """Adds to `first` the best microbatches up to `last`; also the time of the last one taken."""
    num_left = total - int(first.sum())
    counts = last - first
    rank = np.repeat(np.arange(first.size), counts)
    position = np.arange(rank.size) - np.repeat(np.cumsum(counts) - counts, counts)
    number = first[rank] + 1 + position  # of the microbatch in its worker's round
    secs = costs.overhead_secs[rank] + costs.secs_per_microbatch[rank] * number
    if not 0 < num_left <= secs.size:  # the guards will be doubled
        return first, (-np.inf if num_left <= 0 else np.inf)
    level = np.partition(secs, num_left - 1)[num_left - 1]
    taken = np.bincount(rank[secs < level], minlength=first.size)
    tied = np.flatnonzero(secs == level)
    best = tied[np.lexsort((rank[tied], number[tied] > held[rank[tied]]))]
    taken += np.bincount(rank[best[: num_left - taken.sum()]], minlength=first.size)
    return first + taken, float(level)


def checked_counts(num_workers: int, total: int, caps: ArrayLike | None) -> tuple[int, np.ndarray]:
    if not isinstance(total, numbers.Integral) or total < 0:
        raise ValueError(
            f"total is {total!r}; it must be a whole number of microbatches, 0 or more."
        )
    if caps is None:
        return int(total), np.full(num_workers, int(total), np.int64)
    limits = _counts("caps", caps, num_workers)
    if limits.sum() < total:
        raise ValueError(
            f"total is {total} microbatches, but the caps of the {num_workers} workers hold "
            f"only {limits.sum()}. Raise the caps, lower the budget, or bring workers back."
        )
    return int(total), np.minimum(limits, int(total))


def _counts(name: str, values: ArrayLike, num_workers: int) -> np.ndarray:
    counts = np.asarray(values)
    if counts.shape != (num_workers,) or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(
            f"{name} is {values!r}; it must be {num_workers} whole numbers, 0 or more, one for "
            "each worker."
        )
    return counts.astype(np.int64)
