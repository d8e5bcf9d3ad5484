"""Are adaptive quotas near the best ones, whatever the workers' speeds do?

Rounds on a virtual clock, from tables of speeds: noise without change, against the best fixed
quotas; speeds that change, against the plain rule and equal split; workers that are slow for a
few rounds. Whatever the quotas are, the speeds of a trace are the same.
"""

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from experiments.rows import Row
from hetjax import quota
from hetjax.cluster import emulate

_JOBS = 2  # processes
_MOST_ROUNDS = 200  # in which a worker may have its part again


@dataclasses.dataclass(frozen=True)
class Trace:
    """Seconds of every worker in every round.

    Args:
      name: of the row.
      secs: f64[rounds, n], mean seconds of a microbatch.
      budget: microbatches a round.
      noise: a law of `_NOISES`.
      cv: its standard deviation over its mean.
      per_round: whether one factor counts for all of a worker's round, or each microbatch and
        the overhead have their own.
      overhead: of an equal part of the round, in parts of its microbatches.
      seed: of the noise.
    """

    name: str
    secs: np.ndarray
    budget: int
    noise: str = "gamma"
    cv: float = 0.05
    per_round: bool = True
    overhead: float = 0.1
    seed: int = 0

    def play(self, policy: quota.QuotaPolicy) -> np.ndarray:
        """Returns the seconds of each round with a policy's quotas, f64[rounds]."""
        num_workers = self.secs.shape[1]
        caps = np.full(num_workers, self.budget)
        state = policy.init(num_workers, self.budget)
        longest = np.zeros(len(self.secs))
        for round, ends in enumerate(self._ends()):
            quotas, state = policy.assign(state, self.budget, caps)
            busy = quotas > 0
            first = np.where(busy, ends(np.ones_like(quotas)), np.nan)
            total = np.where(busy, ends(quotas), 0.0)
            state = policy.observe(state, quota.RoundTimes(quotas, first, total))
            longest[round] = total.max()
        return longest

    def table(self, most: int) -> np.ndarray:
        """Returns when each number of microbatches would have ended, f64[rounds, n, most + 1]."""
        num_workers = self.secs.shape[1]
        counts = [np.full(num_workers, count) for count in range(1, most + 1)]
        rounds = [np.stack([ends(count) for count in counts], axis=1) for ends in self._ends()]
        return np.pad(np.stack(rounds), ((0, 0), (0, 0), (1, 0)))

    def _ends(self) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
        """For each round when counts i64[n], each at least 1 or ignored, would end: f64[n]."""
        rng = np.random.default_rng([self.seed, 77])
        num_workers = self.secs.shape[1]
        part = self.budget / num_workers
        most, every = int(min(4 * part, self.budget)), np.arange(num_workers)
        for secs in self.secs:
            start = self.overhead * part * secs
            if self.per_round:
                factors = _NOISES[self.noise](rng, self.cv, (num_workers,))
                yield lambda k, a=start * factors, b=secs * factors: a + b * k
            else:
                factors = _NOISES[self.noise](rng, self.cv, (num_workers, most + 1))
                sums = secs[:, None] * np.cumsum(factors[:, 1:], axis=1)

                def ends(k, start=start * factors[:, 0], sums=sums):
                    last = np.maximum(k, 1) - 1
                    whole = last // most * sums[:, -1]  # beyond `most` the times begin again
                    return start + whole + sums[every, last % most]

                yield ends


_NOISES = {
    "none": lambda rng, cv, shape: np.ones(shape),
    "gamma": lambda rng, cv, shape: rng.standard_gamma(cv**-2, shape) * cv**2,
    "exponential": lambda rng, cv, shape: rng.standard_exponential(shape),
    "log-normal": lambda rng, cv, shape: _log_normal(rng, cv, shape),
}


def _log_normal(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> np.ndarray:
    variance = np.log1p(cv**2)
    return np.exp(np.sqrt(variance) * rng.standard_normal(shape) - 0.5 * variance)


class Smoothed(NamedTuple):
    secs: np.ndarray  # f64[n], NaN: never seen


def plain_rule(weight: float = 0.3) -> quota.QuotaPolicy:
    """Quotas in proportion to smoothed speeds, each worker at least one microbatch."""

    def init(num_workers: int, budget: int) -> Smoothed:
        del budget
        return Smoothed(np.full(num_workers, np.nan))

    def assign(state: Smoothed, total: int, caps: np.ndarray):
        if np.isnan(state.secs).any():
            return quota.largest_remainder(np.ones(caps.size), total, caps=caps), state
        rest = quota.largest_remainder(1 / state.secs, total - caps.size, caps=caps - 1)
        return rest + 1, state

    def observe(state: Smoothed, times: quota.RoundTimes) -> Smoothed:
        secs = times.compute_secs / times.microbatches_done
        moved = state.secs + weight * (secs - state.secs)
        return Smoothed(np.where(np.isnan(state.secs), secs, moved))

    return quota.QuotaPolicy(init, assign, observe)


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

    def trace(seed: int, rounds: int) -> Trace:
        table = np.tile(secs, (rounds, 1))
        return Trace("", table, budget, noise, cv, per_round, overhead, seed)

    best = _best_fixed(trace(1000, 2000), secs)
    ratios = []
    for seed in range(num_seeds):
        fixed = trace(seed, num_rounds).play(quota.static(best)).mean()
        ratios.append(trace(seed, num_rounds).play(quota.adaptive()).mean() / fixed)
    return ratios


def _best_fixed(trace: Trace, secs: np.ndarray) -> np.ndarray:
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
    names = [trace.name for trace in changing(8, num_rounds)]
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
    trace = changing(num_workers, num_rounds)[index]
    plain = min(trace.play(plain_rule()).mean(), trace.play(quota.equal()).mean())
    return float(trace.play(quota.adaptive()).mean() / plain)


def changing(num_workers: int, num_rounds: int) -> list[Trace]:
    """Traces of speeds that change; 5 % noise a round where nothing else is said."""
    traces: list[Trace] = []
    shape, time = (num_rounds, num_workers), np.arange(num_rounds)[:, None]
    equal, one = np.ones(num_workers), np.arange(num_workers) == num_workers // 2

    def add(name: str, factors, base: np.ndarray | None = None, **options) -> None:
        rng = np.random.default_rng([len(traces), num_workers])
        secs = rng.uniform(1, 4, num_workers) if base is None else base
        table = secs * np.broadcast_to(factors(rng), shape)
        traces.append(Trace(name, table, 8 * num_workers, seed=len(traces), **options))

    def square(period: int, phase) -> np.ndarray:
        return np.where((time + phase) % period < period / 2, 2.0, 1.0)

    def steps(rng: np.random.Generator) -> np.ndarray:
        factors = np.ones(shape)
        for start in range(50, num_rounds, 50):
            workers = rng.integers(num_workers, size=max(1, num_workers // 8))
            factors[start:, workers] *= rng.choice([0.5, 2.0, 3.0, 1 / 3], size=workers.size)
        return np.clip(factors, 0.25, 4.0)

    def flips(dwell: int) -> Callable[[np.random.Generator], np.ndarray]:
        return lambda rng: 1.0 + np.cumsum(rng.random(shape) < 1 / dwell, axis=0) % 2

    def walk(scale: float) -> Callable[[np.random.Generator], np.ndarray]:
        return lambda rng: np.exp(
            np.clip(np.cumsum(scale * rng.standard_normal(shape), axis=0), -1.1, 1.1)
        )

    def bursts(rng: np.random.Generator) -> np.ndarray:
        factors = np.ones((num_rounds, 1))
        for start in rng.integers(num_rounds, size=num_rounds // 25):
            factors[start : start + 5] *= 3
        return np.minimum(factors, 9.0)

    def outliers(factor: float, part: float) -> Callable[[np.random.Generator], np.ndarray]:
        def factors(rng: np.random.Generator) -> np.ndarray:
            rounds = np.flatnonzero(rng.random(num_rounds) < part)
            table = np.ones(shape)
            table[rounds, rng.integers(num_workers, size=rounds.size)] = factor
            return table

        return factors

    def drift(rng: np.random.Generator) -> np.ndarray:
        return np.exp(np.linspace(0, 1, num_rounds)[:, None] * rng.uniform(-1.1, 1.1, num_workers))

    every_second = np.where((time % 2 == 0) & one, 3.0, 1.0)
    add("drift by up to 3x", drift)
    add("steps of 2x and 3x", steps)
    add("steps of 2x and 3x, equal at first", steps, equal)
    for period in (3, 5, 10, 20, 50):
        phases = lambda rng, p=period: square(p, rng.integers(p, size=num_workers))  # noqa: E731
        add(f"2x slower for half of {period} rounds, phases at random", phases)
    for period in (6, 10, 20, 40):
        phase = (np.arange(num_workers) % 2) * (period // 2)
        add(
            f"half of the workers 2x slower, {period} rounds a turn",
            _always(square(period, phase)),
            equal,
        )
    for dwell in (10, 30, 100):
        add(f"flips of 2x, {dwell} rounds apart", flips(dwell))
    add("random walk, 3 % a round", walk(0.03))
    add("random walk, 10 % a round", walk(0.1))
    add("all 3x slower for 5 rounds now and then", bursts)
    add("all drift by e", _always(np.exp(np.sin(time / 20))))
    add("all 2x slower every other 40 rounds", _always(1.0 + time // 40 % 2))
    add("single rounds 5x slower, 20 % of rounds", outliers(5, 0.2))
    add("single rounds 10x slower, 4 % of rounds", outliers(10, 0.04))
    add("single rounds 100x slower, 1 % of rounds", outliers(100, 0.012))
    add("speeds 1 to 100", _always(np.ones(1)), np.geomspace(1, 100, num_workers))
    add("speeds 1 to 100, steps", steps, np.geomspace(1, 100, num_workers))
    add("one worker 3x slower in every second round", _always(every_second))
    add("the same, else equal", _always(every_second), equal)
    for factor, length in ((5, 6), (20, 3), (100, 3)):
        slow = (time % 60 >= 20) & (time % 60 < 20 + length) & one
        name = f"one worker {factor}x slower for {length} rounds of 60"
        add(name, _always(np.where(slow, factor, 1.0)), equal)
    slower = np.where((time >= 150) & one, 1.45, 1.0)
    add("one of equal workers 1.45x slower, 20 % noise", _always(slower), equal, cv=0.2)
    add("flips of 2x, 30 rounds apart, 20 % noise", flips(30), cv=0.2)
    phases = lambda rng: square(20, rng.integers(20, size=num_workers))  # noqa: E731
    add("2x slower for half of 20 rounds, 30 % a microbatch", phases, cv=0.3, per_round=False)
    return traces


def _always(factors: np.ndarray) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: factors


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
