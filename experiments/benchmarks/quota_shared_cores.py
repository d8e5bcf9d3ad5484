"""Are adaptive quotas never worse than equal split, where workers share cores?

There a worker's seconds depend on what the others do, and no cost model of single workers is
right. The figures compare `adaptive` with and without its guard, on simulated cores.
"""

import heapq
import itertools

import numpy as np

from experiments.benchmarks.rows import Row
from hetjax import quota


def shared_core_rows(num_rounds: int = 400, skipped: int = 60, num_seeds: int = 6) -> list[Row]:
    """Workers that share cores: mean round with and without the guard, over equal and best.

    A core computes a slice of one worker's round, then of the next one's in the queue; who comes
    first is random. A worker's seconds so depend on the others', and no costs of single workers
    are right. Noise is 30 % a microbatch; the first round is cold, 10 s more of each worker's
    on average.
    """
    equal, unequal = (1.0,) * 4, (1.0, 1.0, 2.0, 3.0)
    cases = {
        "4 equal workers on 2 cores, 2 microbatches each, slices of 1 s": (equal, 2, 8, 1.0),
        "the same, slices of 2 s": (equal, 2, 8, 2.0),
        "the same, slices as long as a round": (equal, 2, 8, np.inf),
        "the same, 4 microbatches each": (equal, 2, 16, np.inf),
        "4 workers of 1 to 3 s on 2 cores, 4 each, slices of 1 s": (unequal, 2, 16, 1.0),
        "the same on 4 cores": (unequal, 4, 16, 1.0),
    }
    contenders = {"without the guard": quota.adaptive(guard=False), "with it": quota.adaptive()}
    rows = []
    for name, case in cases.items():
        references = (quota.equal(), quota.static(_best_shared(*case)))
        reached = []
        for contender, policy in contenders.items():
            ratios = []
            for seed in range(num_seeds):
                own, even, best = (
                    _shared_round_secs(each, *case, num_rounds, seed)[skipped:].mean()
                    for each in (policy, *references)
                )
                ratios.append((own / even, own / min(even, best)))
            mean, most = np.mean(ratios, axis=0), np.max(ratios, axis=0)
            reached.append(f"{contender} {mean[0]:.3f}, {most[0]:.3f}; {mean[1]:.3f}")
        rows.append(
            Row(
                f"{name}: mean round after {skipped} rounds over equal split: mean, most; over "
                "the best fixed quotas: mean",
                "≤ 1.02 of equal split with the guard",
                "; ".join(reached),
            )
        )
    return rows


def _shared_round_secs(
    policy: quota.QuotaPolicy,
    secs: tuple[float, ...],
    num_cores: int,
    budget: int,
    slice_secs: float,
    num_rounds: int,
    seed: int,
    noise: float = 0.3,
    cold_secs: float = 10.0,
) -> np.ndarray:
    """Rounds of a policy on shared cores, f64[num_rounds]."""
    rng = np.random.default_rng(seed)
    num_workers, caps = len(secs), np.full(len(secs), budget)
    state, round_secs = policy.init(num_workers, budget), np.zeros(num_rounds)
    for round in range(num_rounds):
        quotas, state = policy.assign(state, budget, caps)
        work = rng.standard_gamma(noise**-2, (num_workers, budget)) * noise**2
        work[:, 0] += (round == 0) * rng.exponential(cold_secs, num_workers)
        order = rng.permutation(num_workers)
        ends = _shared_ends(quotas, work * np.array(secs)[:, None], order, num_cores, slice_secs)
        first = np.array([own[0] if own else np.nan for own in ends])
        total = np.array([own[-1] if own else 0.0 for own in ends])
        state = policy.observe(state, quota.RoundTimes(quotas, first, total))
        round_secs[round] = total.max()
    return round_secs


def _shared_ends(
    quotas: np.ndarray, work: np.ndarray, order: np.ndarray, num_cores: int, slice_secs: float
) -> list[list[float]]:
    """When each microbatch ends, seconds from the round's start, with the cores shared in turn.

    Args:
      quotas: i64[n].
      work: f64[n, ≥ quota], seconds of each microbatch alone on a core.
      order: i64[n], who comes first.
      num_cores: how many workers compute at a time.
      slice_secs: how long one computes before it goes to the end of the queue.
    """
    ends: list[list[float]] = [[] for _ in quotas]
    cores = [0.0] * num_cores
    queue = [(0.0, place, int(worker)) for place, worker in enumerate(order) if quotas[worker]]
    left = work[:, 0].copy()
    turn = len(queue)
    while queue:
        ready, _, worker = heapq.heappop(queue)
        now = max(heapq.heappop(cores), ready)
        until = now + slice_secs
        while len(ends[worker]) < quotas[worker] and now < until:
            step = min(left[worker], until - now)
            now, left[worker] = now + step, left[worker] - step
            if left[worker] <= 1e-9:
                ends[worker].append(now)
                left[worker] = work[worker, min(len(ends[worker]), work.shape[1] - 1)]
        heapq.heappush(cores, now)
        if len(ends[worker]) < quotas[worker]:
            heapq.heappush(queue, (now, turn, worker))
        turn += 1
    return ends


def _best_shared(
    secs: tuple[float, ...], num_cores: int, budget: int, slice_secs: float
) -> np.ndarray:
    """The quotas with the shortest round without noise, among all."""
    work = np.repeat(np.array(secs)[:, None], budget, axis=1)
    best, best_secs = np.zeros(len(secs), np.int64), np.inf
    for quotas in itertools.product(range(budget + 1), repeat=len(secs) - 1):
        if sum(quotas) > budget:
            continue
        full = np.array([*quotas, budget - sum(quotas)])
        longest = max(
            own[-1]
            for own in _shared_ends(full, work, np.arange(len(secs)), num_cores, slice_secs)
            if own
        )
        if longest < best_secs:
            best, best_secs = full, longest
    return best
