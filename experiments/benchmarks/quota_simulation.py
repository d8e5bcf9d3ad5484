"""How good are the quotas? Figures of the policies on a virtual clock.

Nothing sleeps and nothing is trained: a round lasts as long as its slowest worker computes, so the
figures are about the quotas alone.
"""

import time
from typing import NamedTuple

import numpy as np

from experiments.benchmarks.rows import Found, Row
from hetjax import quota
from hetjax.cluster import emulate
from hetjax.quota import fitted

_NEVER = 10_000  # rounds, where something did not happen within the simulation
_NOISE = 0.1


def steady_state_rows(num_rounds: int = 120, skipped: int = 20) -> Found:
    """Mean round of `adaptive` after the first rounds, constant speeds spread geometrically."""
    for num_workers in (2, 4, 8):
        fractions, distances = [], []
        for ratio in (1, 2, 4, 8):
            secs = ratio ** (np.arange(num_workers) / (num_workers - 1))
            for overhead in (0.0, 1.0):
                cluster = emulate.EmulatedCluster(tuple(secs), overhead)
                budget = 8 * num_workers
                _, _, round_secs = emulate.simulate_policy(
                    quota.adaptive(), cluster, budget, num_rounds
                )
                optimum = _optimum(cluster, 0, budget)
                fractions.append(optimum / round_secs[skipped:].mean())
                bound = quota.continuous_bound_secs(cluster.costs_at(0), budget)
                distances.append(bound / optimum)
        reached = f"{min(fractions):.1%}"
        yield Row(f"optimum over mean round, n = {num_workers}", "≥ 97 %", reached, len(fractions))
        reached = f"{min(distances):.1%} to {max(distances):.1%}"
        yield Row(
            f"continuous bound over optimum, n = {num_workers}", "none", reached, len(distances)
        )
    yield "The least of speed ratios 1:1 to 8:1, with and without overhead, by integer quotas."


def convergence_rows(num_clusters: int = 100, num_rounds: int = 30) -> Found:
    """Rounds until within 1 % of the optimum, random clusters of 8, 8 microbatches a worker.

    Seconds a microbatch are uniform in 1 to 4; the overhead is the stated share of a worker's
    own round under equal split. Noise is gamma, on each microbatch and on the overhead.
    """
    for noise in (0.0, _NOISE):
        for share in (0.0, 0.1, 0.3, 0.5):
            rounds = []
            for seed in range(num_clusters):
                cluster = _random_cluster(seed, share, noise)
                quotas, _, _ = emulate.simulate_policy(quota.adaptive(), cluster, 64, num_rounds)
                rounds.append(_rounds_until(quotas, cluster, 64, 0, 0.01))
            reached = f"{_show(np.median(rounds))} (95 %: {_show(np.percentile(rounds, 95))})"
            name, target = f"overhead {share:.0%}, noise {noise:.0%}", "≤ 10" if noise else "≤ 3"
            yield Row(name, target, reached, num_clusters)
    yield "Rounds until within 1 % of the optimum: median, 95th percentile. Noise a microbatch."


def reaction_rows(num_clusters: int = 40) -> Found:
    """Rounds from a worker's change by 2x until the quotas are those of the new speeds."""
    for noise, per in ((0.0, "microbatch"), (_NOISE, "microbatch"), (_NOISE, "round")):
        for tolerance in (0.01, 0.05):
            slower, back = [], []
            for seed in range(num_clusters):
                cluster = _random_cluster(seed, 0.1, noise, per=per, slow_rounds=(60, 120))
                quotas, _, _ = emulate.simulate_policy(quota.adaptive(), cluster, 64, 180)
                slower.append(_rounds_until(quotas[:120], cluster, 64, 60, tolerance))
                back.append(_rounds_until(quotas, cluster, 64, 120, tolerance))
            for name, rounds in (("slower", slower), ("back", back)):
                name = f"{name}, noise {noise:.0%} a {per}, within {tolerance:.0%}"
                reached = f"{_show(np.median(rounds))} (most {_show(max(rounds))})"
                yield Row(name, "≤ 5", reached, num_clusters)
    yield "Rounds to react to a worker that is 2x slower, and then back, to the new optimum."


class _HeldUp(NamedTuple):
    """Eight equal workers, with 3 % noise: each is held up by chance, or one in every round."""

    factor: float
    chance: float = 0.0  # in a round; 0: it is the first worker, always
    seed: int = 0
    num_workers: int = 8

    def present_at(self, round: int) -> np.ndarray:
        return np.ones(self.num_workers, bool)

    def microbatch_ends(self, round: int, worker: int, count: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, round, worker])
        is_late = rng.random() < self.chance if self.chance else worker == 0
        secs = (self.factor if is_late else 1.0) * (1.0 + 0.03 * rng.normal())
        return secs * np.arange(1, count + 1)


def held_up_rows(num_seeds: int = 5) -> Found:
    """Mean round of `adaptive` over the better of equal split and fitted costs alone."""
    settings = fitted.Settings(50, 0.01, 2.0, 1.0, 2, 0.5, 12.0)  # those of `adaptive`
    for chance, factor, num_rounds in (
        *((0.02, 15, 1000), (0.01, 50, 1000), (0.003, 30, 1000)),
        (0.0, 1000, 300),
    ):
        ratios = []
        for seed in range(num_seeds):
            cluster = _HeldUp(factor, chance, seed)
            adaptive, *others = (
                emulate.simulate_policy(policy, cluster, 64, num_rounds)[2].mean()
                for policy in (quota.adaptive(), quota.equal(), fitted.fitted(settings))
            )
            ratios.append(adaptive / min(others))
        who = f"each in {chance:.1%} of rounds" if chance else "one always"
        reached = f"{np.mean(ratios):.3f} (most {max(ratios):.3f})"
        yield Row(f"{who}, {factor} times slower", "≤ 1.10", reached, num_seeds)
    yield "Mean round over the better of equal split and fitted costs; 8 workers, some held up."


def noise_rows(num_rounds: int = 10_000, burn_in: int = 300, num_seeds: int = 2) -> Found:
    """Moves of the quotas, and the mean round, under 10 % noise and no change, n = 8."""
    for per in ("microbatch", "round"):
        moves, false_moves, ratios, counted = 0, 0, [], 0
        for seed in range(num_seeds):
            cluster = _random_cluster(1000 + seed, 0.0, _NOISE, per=per)
            quotas, _, round_secs = emulate.simulate_policy(
                quota.adaptive(), cluster, 64, num_rounds
            )
            changed = (quotas[1:] != quotas[:-1]).any(axis=1)
            moves += int(changed[burn_in:].sum())
            counted += changed[burn_in:].size
            for round in np.flatnonzero(changed[burn_in:]) + burn_in:
                old, new = cluster.costs_at(0).round_secs(quotas[round : round + 2]).max(axis=1)
                false_moves += int(new >= old)
            best = _best_fixed_secs(cluster, 64, range(burn_in, min(num_rounds, 2000)))
            ratios.append(round_secs[burn_in:2000].mean() / best)
        reached = f"{1e4 * moves / counted:.2f} in 10,000"
        yield Row(f"moves, noise 10 % a {per}", "≤ 1 in 10,000", reached, counted)
        yield Row(f"that gain nothing, noise 10 % a {per}", "none", str(false_moves), moves)
        reached = f"{np.mean(ratios) - 1:+.2%} (most {max(ratios) - 1:+.2%})"
        yield Row(f"mean round, noise 10 % a {per}", "≤ 2 % above", reached, num_seeds)
    yield "Nothing changes, n = 8: moves of the quotas; mean round over the best fixed quotas."


def solver_rows(num_workers: int = 1024, repeats: int = 101) -> Found:
    """Milliseconds of one solution."""
    rng = np.random.default_rng(0)
    spreads = {
        "equal": np.ones(num_workers),
        "1 to 4": rng.uniform(1, 4, num_workers),
        "10⁻⁴ to 10⁴": 10 ** rng.uniform(-4, 4, num_workers),
    }
    for total in (num_workers, 64 * num_workers):
        for name, secs in spreads.items():
            costs = quota.WorkerCosts(rng.uniform(0, 8, num_workers) * secs, secs)
            current = quota.solve_quotas(costs, total)
            millis = []
            for _ in range(repeats):
                start = time.perf_counter()
                quota.solve_quotas(costs, total, current=current)
                millis.append(1e3 * (time.perf_counter() - start))
            reached = f"{np.median(millis):.2f} ms"
            yield Row(f"{total} microbatches, seconds {name}", "< 1 ms", reached, repeats)
    yield f"A solution for {num_workers} workers, median; seconds are those of a microbatch."


def comparison_rows(num_clusters: int = 10, num_rounds: int = 200) -> Found:
    """All policies on the same traces: mean round over the integer optimum of its speeds."""
    epoch_rounds = 20
    contenders = {
        "equal": quota.equal(),
        "proportional each epoch": quota.proportional(period_rounds=epoch_rounds),
        "proportional each round": quota.proportional(),
        "dead_band": quota.dead_band(),
        "adaptive": quota.adaptive(),
    }
    half = num_rounds // 2
    traces = {
        "constant": (0.0, 0.0, None),
        "overhead 30 %": (0.3, 0.0, None),
        "noise 10 %": (0.1, _NOISE, None),
        "a worker slows": (0.1, _NOISE, (half, num_rounds)),
    }
    for trace, (share, noise, slow_rounds) in traces.items():
        for name, policy in contenders.items():
            ratios = []
            for seed in range(num_clusters):
                cluster = _random_cluster(seed, share, noise, slow_rounds=slow_rounds)
                _, _, round_secs = emulate.simulate_policy(policy, cluster, 64, num_rounds)
                optima = [_optimum(cluster, round, 64) for round in (0, half)]
                ratios.append(round_secs.sum() / (half * sum(optima)))
            yield Row(f"{trace}: {name}", "none", f"{np.mean(ratios):.3f}", num_clusters)
    yield f"Mean round over the optimum; {num_rounds} rounds from equal split."
    yield f"Proportional each epoch: of {epoch_rounds} rounds. With noise the overhead is 10 %."
    yield "The worker that slows is 2x slower in the second half."


def _random_cluster(
    seed: int,
    overhead_share: float,
    noise: float,
    *,
    per: str = "microbatch",
    slow_rounds: tuple[int, int] | None = None,
) -> emulate.EmulatedCluster:
    """8 workers of 1 to 4 s a microbatch; one of them 2x slower between the two rounds."""
    rng = np.random.default_rng(seed)
    secs = rng.uniform(1, 4, 8)
    overhead = overhead_share / (1 - overhead_share) * 8 * secs
    worker = int(rng.integers(8))
    changes = []
    if slow_rounds is not None:
        for round, factor in zip(slow_rounds, (2.0, 1.0), strict=True):
            changes.append(
                emulate.Change(round, worker, factor * secs[worker], factor * overhead[worker])
            )
    return emulate.EmulatedCluster(
        tuple(secs),
        tuple(overhead),
        delay="gamma" if noise else "constant",
        delay_cv=noise or _NOISE,
        delay_per=per,
        changes=tuple(changes),
        seed=seed,
    )


def _optimum(cluster: emulate.EmulatedCluster, round: int, budget: int) -> float:
    caps = np.where(cluster.present_at(round), budget, 0)
    return quota.optimal_round_secs(cluster.costs_at(round), budget, caps=caps)


def _rounds_until(
    quotas: np.ndarray,
    cluster: emulate.EmulatedCluster,
    budget: int,
    start: int,
    tolerance: float,
) -> int:
    """Rounds after `start` whose quotas are not yet within the tolerance, at the true costs."""
    costs = cluster.costs_at(start)
    enough = _optimum(cluster, start, budget) * (1 + tolerance + 1e-9)
    for round in range(start, len(quotas)):
        if costs.round_secs(quotas[round]).max() <= enough:
            return round - start
    return _NEVER


def _best_fixed_secs(
    cluster: emulate.EmulatedCluster, budget: int, rounds: range, most: int = 33
) -> float:
    """Mean round of the best fixed quotas in these very rounds, by local search."""
    workers = np.arange(cluster.num_workers)
    ends = np.zeros((workers.size, most + 1, len(rounds)))
    for index, round in enumerate(rounds):
        for worker in workers:
            ends[worker, 1:, index] = cluster.microbatch_ends(round, int(worker), most)

    def mean_secs(quotas: np.ndarray) -> float:
        return ends[workers, np.minimum(quotas, most)].max(axis=0).mean()

    best = quota.solve_quotas(cluster.costs_at(0), budget)
    best_secs, improved = mean_secs(best), True
    while improved:
        improved = False
        moves = np.eye(workers.size, dtype=np.int64)
        for donor in np.flatnonzero(best):
            for taker in workers[best < most]:
                moved = best - moves[donor] + moves[taker]
                if moved.min() >= 0 and moved.max() <= most and mean_secs(moved) < best_secs:
                    best, best_secs, improved = moved, mean_secs(moved), True
    return best_secs


def _show(rounds: float) -> str:
    return "not reached" if rounds >= _NEVER / 2 else f"{rounds:.3g}"
