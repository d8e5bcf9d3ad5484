"""Are adaptive quotas near the best ones, whatever the workers' speeds do?

Rounds on a virtual clock, from tables of speeds (`speed_traces`): noise without change, against
the best fixed quotas; speeds that change, against the plain rule and equal split; workers that are
slow for a few rounds.
"""

import concurrent.futures
import multiprocessing

import numpy as np

from experiments.benchmarks import speed_traces
from experiments.benchmarks.rows import Row
from hetjax import quota
from hetjax.cluster import emulate

_JOBS = 2  # processes
_MOST_ROUNDS = 200  # in which a worker may have its part again


def _pool() -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        _JOBS, mp_context=multiprocessing.get_context("spawn")
    )


def stationary_rows(num_rounds: int = 500, num_seeds: int = 10) -> list[Row]:
    """Noise without a change: mean round over that of the fixed quotas best on other seeds."""
    laws = {
        "no noise": ("none", 0.0, True),
        "gamma 10 % a microbatch": ("gamma", 0.1, False),
        "gamma 10 % a round": ("gamma", 0.1, True),
        "gamma 30 % a microbatch": ("gamma", 0.3, False),
        "gamma 30 % a round": ("gamma", 0.3, True),
        "log-normal 50 % a microbatch": ("log-normal", 0.5, False),
        "log-normal 50 % a round": ("log-normal", 0.5, True),
        "exponential, a microbatch": ("exponential", 1.0, False),
        "log-normal 100 % a microbatch": ("log-normal", 1.0, False),
        "exponential, a round": ("exponential", 1.0, True),
        "log-normal 100 % a round": ("log-normal", 1.0, True),
    }
    rows = []
    jobs = [(law, cluster) for law in laws for cluster in range(len(_clusters()))]
    work = [(*laws[law], cluster, num_rounds, num_seeds) for law, cluster in jobs]
    with _pool() as pool:
        ratios = dict(zip(jobs, pool.map(_over_best_fixed, work), strict=True))
    for law, (_, cv, per_round) in laws.items():
        each = [ratios[law, cluster] for cluster in range(len(_clusters()))]
        heaviest = cv == 1.0 and per_round
        rows.append(
            Row(
                f"{law}, {num_rounds} rounds, {num_seeds} seeds: mean round over the best fixed "
                "quotas of other seeds, 4 workers of 1 : 4/3 : 2 : 4, 8 mixed, 8 equal: mean "
                "(most)",
                "≤ 1.05" if heaviest else "≤ 1.03",
                ", ".join(f"{np.mean(x):.3f} ({max(x):.3f})" for x in each),
            )
        )
    return rows


def _clusters() -> list[tuple[np.ndarray, int, float]]:
    """`(mean seconds, budget, overhead)` of each."""
    mixed = np.random.default_rng(5).uniform(1, 4, 8)
    return [(np.array([1.0, 4 / 3, 2.0, 4.0]), 20, 0.0), (mixed, 64, 0.1), (np.ones(8), 64, 0.1)]


def _over_best_fixed(job: tuple[str, float, bool, int, int, int]) -> list[float]:
    noise, cv, per_round, cluster, num_rounds, num_seeds = job
    secs, budget, overhead = _clusters()[cluster]

    def trace(seed: int, rounds: int) -> speed_traces.Trace:
        table = np.tile(secs, (rounds, 1))
        return speed_traces.Trace("", table, budget, noise, cv, per_round, overhead, seed)

    best = _best_fixed(trace(1000, 2000), secs)
    ratios = []
    for seed in range(num_seeds):
        fixed = trace(seed, num_rounds).play(quota.static(best)).mean()
        ratios.append(trace(seed, num_rounds).play(quota.adaptive()).mean() / fixed)
    return ratios


def _best_fixed(trace: speed_traces.Trace, secs: np.ndarray) -> np.ndarray:
    """Fixed quotas that no move of one microbatch makes better, i64[n]."""
    every, most = np.arange(secs.size), min(4 * trace.budget // secs.size, trace.budget)
    table = trace.table(most)

    def mean_secs(quotas: np.ndarray) -> float:
        return table[:, every, quotas].max(axis=1).mean()

    start = trace.overhead * trace.budget / secs.size * secs
    caps = np.full(secs.size, most)
    best = quota.solve_quotas(quota.WorkerCosts(start, secs), trace.budget, caps=caps)
    best_secs, improved = mean_secs(best), True
    while improved:
        improved = False
        for giver in every:
            for taker in every:
                moved = best.copy()
                moved[giver] -= 1
                moved[taker] += 1
                if giver == taker or moved.min() < 0 or moved.max() > most:
                    continue
                moved_secs = mean_secs(moved)
                if moved_secs < best_secs * (1 - 1e-9):
                    best, best_secs, improved = moved, moved_secs, True
    return best


def changing_rows(num_rounds: int = 400) -> list[Row]:
    """Changing speeds: mean round over the better of the plain rule and equal split."""
    sizes = (8, 64, 256)
    names = [trace.name for trace in speed_traces.changing(8, num_rounds)]
    jobs = [(n, index, num_rounds) for index in range(len(names)) for n in sizes]
    with _pool() as pool:
        ratios = np.array(list(pool.map(_over_plain_rules, jobs))).reshape(len(names), len(sizes))
    rows = [
        Row(f"{name}: n = 8, 64, 256", "≤ 1.02", ", ".join(f"{x:.3f}" for x in each))
        for name, each in zip(names, ratios, strict=True)
    ]
    summary = Row(
        f"changing speeds, {ratios.size} traces of {num_rounds} rounds: mean round over the "
        "better of the plain rule and equal split: mean, most, part below 0.95",
        "≤ 1.02 on each, < 0.95 on a third",
        f"{ratios.mean():.3f}, {ratios.max():.3f}, {(ratios < 0.95).mean():.0%}",
    )
    return [summary, *rows]


def _over_plain_rules(job: tuple[int, int, int]) -> float:
    num_workers, index, num_rounds = job
    trace = speed_traces.changing(num_workers, num_rounds)[index]
    plain = min(trace.play(speed_traces.plain_rule()).mean(), trace.play(quota.equal()).mean())
    return float(trace.play(quota.adaptive()).mean() / plain)


def hiccup_rows() -> list[Row]:
    """A worker is slow for a few rounds: rounds from then on until it has its part again."""
    rows = []
    for num_workers in (2, 4, 8):
        for factor in (5, 20, 100):
            jobs = [
                (num_workers, factor, length, cv, start)
                for length in range(1, 11)
                for cv in (0.0, 0.1)
                for start in (40, 137)
            ]
            with _pool() as pool:
                rounds = list(pool.map(_rounds_until_back, jobs))
            rows.append(
                Row(
                    f"one of {num_workers} workers {factor}x slower for 1 to 10 rounds: rounds "
                    "after that until it has its part again: median, most",
                    "≤ 20",
                    f"{np.median(rounds):.3g}, {max(rounds)}",
                )
            )
    for factor in (20.0, 100.0):
        excess = []
        for num_workers in (2, 4, 8):
            cluster = emulate.EmulatedCluster(
                (1.0,) * num_workers, changes=(emulate.Change(40, 0, factor),)
            )
            budget = 8 * num_workers
            _, _, secs = emulate.simulate_policy(quota.adaptive(), cluster, budget, 4040)
            optimum = quota.optimal_round_secs(cluster.costs_at(40), budget)
            excess.append(secs[45:].mean() / optimum - 1)
        rows.append(
            Row(
                f"one of 2, 4, 8 workers {factor:.0f}x slower for good: what probing it costs "
                "in 4,000 rounds",
                "≤ 1 %",
                ", ".join(f"{x:.2%}" for x in excess),
            )
        )
    return rows


def _rounds_until_back(job: tuple[int, float, int, float, int]) -> int:
    num_workers, factor, length, cv, start = job
    secs = np.ones(num_workers)
    if length % 2 == 0:
        secs = np.random.default_rng(length).uniform(1, 3, num_workers)
    end = start + length
    cluster = emulate.EmulatedCluster(
        tuple(secs),
        delay="gamma" if cv else "constant",
        delay_cv=cv or 0.1,
        delay_per="round",
        seed=length,
        changes=(emulate.Change(start, 0, factor * secs[0]), emulate.Change(end, 0, secs[0])),
    )
    quotas, _, _ = emulate.simulate_policy(
        quota.adaptive(), cluster, 8 * num_workers, end + _MOST_ROUNDS
    )
    enough = quotas[end:, 0] >= 0.75 * quotas[start - 20 : start, 0].min()
    steady = enough[:-2] & enough[1:-1] & enough[2:]
    return int(np.argmax(steady)) if steady.any() else enough.size
