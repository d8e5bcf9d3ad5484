"""Speeds of workers in every round, and the rounds that a policy's quotas have with them.

Whatever the quotas are, the speeds of a trace are the same. `changing` has the traces in which they
change; `plain_rule` is the policy that adaptive quotas are compared with.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hetjax import quota

# (rng, (rounds, workers)) -> by what the seconds of each worker are multiplied in each round.
Law = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


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


def changing(num_workers: int, num_rounds: int) -> list[Trace]:
    """Traces of speeds that change; 5 % noise a round where nothing else is said."""
    traces: list[Trace] = []
    shape, time = (num_rounds, num_workers), np.arange(num_rounds)[:, None]
    equal, one = np.ones(num_workers), np.arange(num_workers) == num_workers // 2
    spread = np.geomspace(1, 100, num_workers)

    def add(name: str, law: Law | np.ndarray, base: np.ndarray | None = None, **options) -> None:
        rng = np.random.default_rng([len(traces), num_workers])
        secs = rng.uniform(1, 4, num_workers) if base is None else base
        factors = law(rng, shape) if callable(law) else law
        table = secs * np.broadcast_to(factors, shape)
        traces.append(Trace(name, table, 8 * num_workers, seed=len(traces), **options))

    add("drift by up to 3x", _drift)
    add("steps of 2x and 3x", _steps)
    add("steps of 2x and 3x, equal at first", _steps, equal)
    for period in (3, 5, 10, 20, 50):
        add(f"2x slower for half of {period} rounds, phases at random", _squares(period))
    for period in (6, 10, 20, 40):
        phase = (np.arange(num_workers) % 2) * (period // 2)
        name = f"half of the workers 2x slower, {period} rounds a turn"
        add(name, _square(time + phase, period), equal)
    for dwell in (10, 30, 100):
        add(f"flips of 2x, {dwell} rounds apart", _flips(dwell))
    add("random walk, 3 % a round", _walk(0.03))
    add("random walk, 10 % a round", _walk(0.1))
    add("all 3x slower for 5 rounds now and then", _bursts)
    add("all drift by e", np.exp(np.sin(time / 20)))
    add("all 2x slower every other 40 rounds", 1.0 + time // 40 % 2)
    add("single rounds 5x slower, 20 % of rounds", _outliers(5, 0.2))
    add("single rounds 10x slower, 4 % of rounds", _outliers(10, 0.04))
    add("single rounds 100x slower, 1 % of rounds", _outliers(100, 0.012))
    add("speeds 1 to 100", np.ones(1), spread)
    add("speeds 1 to 100, steps", _steps, spread)
    every_second = np.where((time % 2 == 0) & one, 3.0, 1.0)
    add("one worker 3x slower in every second round", every_second)
    add("the same, else equal", every_second, equal)
    for factor, length in ((5, 6), (20, 3), (100, 3)):
        slow = (time % 60 >= 20) & (time % 60 < 20 + length) & one
        name = f"one worker {factor}x slower for {length} rounds of 60"
        add(name, np.where(slow, factor, 1.0), equal)
    slower = np.where((time >= 150) & one, 1.45, 1.0)
    add("one of equal workers 1.45x slower, 20 % noise", slower, equal, cv=0.2)
    add("flips of 2x, 30 rounds apart, 20 % noise", _flips(30), cv=0.2)
    name = "2x slower for half of 20 rounds, 30 % a microbatch"
    add(name, _squares(20), cv=0.3, per_round=False)
    return traces


def _drift(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    num_rounds, num_workers = shape
    return np.exp(np.linspace(0, 1, num_rounds)[:, None] * rng.uniform(-1.1, 1.1, num_workers))


def _steps(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    num_rounds, num_workers = shape
    factors = np.ones(shape)
    for start in range(50, num_rounds, 50):
        workers = rng.integers(num_workers, size=max(1, num_workers // 8))
        factors[start:, workers] *= rng.choice([0.5, 2.0, 3.0, 1 / 3], size=workers.size)
    return np.clip(factors, 0.25, 4.0)


def _square(time: np.ndarray, period: int) -> np.ndarray:
    return np.where(time % period < period / 2, 2.0, 1.0)


def _squares(period: int) -> Law:
    def law(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        num_rounds, num_workers = shape
        phases = rng.integers(period, size=num_workers)
        return _square(np.arange(num_rounds)[:, None] + phases, period)

    return law


def _flips(dwell: int) -> Law:
    return lambda rng, shape: 1.0 + np.cumsum(rng.random(shape) < 1 / dwell, axis=0) % 2


def _walk(scale: float) -> Law:
    def law(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        logs = np.cumsum(scale * rng.standard_normal(shape), axis=0)
        return np.exp(np.clip(logs, -1.1, 1.1))

    return law


def _bursts(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    num_rounds, _ = shape
    factors = np.ones((num_rounds, 1))
    for start in rng.integers(num_rounds, size=num_rounds // 25):
        factors[start : start + 5] *= 3
    return np.minimum(factors, 9.0)


def _outliers(factor: float, part: float) -> Law:
    def law(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        num_rounds, num_workers = shape
        rounds = np.flatnonzero(rng.random(num_rounds) < part)
        table = np.ones(shape)
        table[rounds, rng.integers(num_workers, size=rounds.size)] = factor
        return table

    return law
