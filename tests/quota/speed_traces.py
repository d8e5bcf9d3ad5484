"""Speeds of workers in every round, and the rounds that a policy's quotas have with them.

Whatever the quotas are, the speeds of a trace are the same. `changing` has the traces in which they
change; `plain_rule` is the policy that adaptive quotas are compared with.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from hetjax import quota


@dataclasses.dataclass(frozen=True)
class Trace:
    """Seconds of every worker in every round, f64[rounds, n]: means of a microbatch.

    One factor a worker and round, of a gamma law or of another one (`noise`), is on all it does;
    the overhead is in microbatches of an equal part of the round.
    """

    secs: np.ndarray
    budget: int
    noise: str = "gamma"
    cv: float = 0.05
    overhead: float = 0.1
    seed: int = 0

    def play(self, policy: quota.QuotaPolicy) -> np.ndarray:
        """Returns the seconds of each round with a policy's quotas, f64[rounds]."""
        num_workers = self.secs.shape[1]
        rng, caps = np.random.default_rng([self.seed, 77]), np.full(num_workers, self.budget)
        state = policy.init(num_workers, self.budget)
        longest = np.zeros(len(self.secs))
        for round, secs in enumerate(self.secs):
            factors = secs * _NOISES[self.noise](rng, self.cv, num_workers)
            start = self.overhead * self.budget / num_workers * factors
            quotas, state = policy.assign(state, self.budget, caps)
            first = np.where(quotas > 0, start + factors, np.nan)
            total = np.where(quotas > 0, start + factors * quotas, 0.0)
            state = policy.observe(state, quota.RoundTimes(quotas, first, total))
            longest[round] = total.max()
        return longest


_NOISES = {
    "gamma": lambda rng, cv, size: rng.standard_gamma(cv**-2, size) * cv**2,
    "exponential": lambda rng, cv, size: rng.standard_exponential(size),
}


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


def changing(name: str, num_workers: int = 8, num_rounds: int = 400) -> Trace:
    """A trace of speeds that change, by what is said of it."""
    shape, time = (num_rounds, num_workers), np.arange(num_rounds)[:, None]
    equal, one = np.ones(num_workers), np.arange(num_workers) == num_workers // 2
    turns = (np.arange(num_workers) % 2) * 10
    every_second = np.where((time % 2 == 0) & one, 3.0, 1.0)
    number = CHANGES.index(name)
    rng = np.random.default_rng([number, num_workers])
    unequal = rng.uniform(1, 4, num_workers)
    flips = rng.random(shape) < 0.1
    phases = rng.integers(50, size=num_workers)
    factors = {
        CHANGES[0]: unequal * _twice((time + phases) % 50 < 25),
        CHANGES[1]: _twice((time + turns) % 20 < 10),
        CHANGES[2]: unequal * _twice(np.cumsum(flips, axis=0) % 2 == 1),
        CHANGES[3]: unequal * (1.0 + time // 40 % 2),
        CHANGES[4]: every_second,
        CHANGES[5]: np.where((time >= 150) & one, 1.45, 1.0),
    }[name]
    secs = np.broadcast_to(equal * factors, shape)
    return Trace(secs, 8 * num_workers, cv=0.2 if "20 % noise" in name else 0.05, seed=number)


CHANGES = (
    "2x slower for half of 50 rounds, phases at random",
    "half of the workers 2x slower, 20 rounds a turn",
    "flips of 2x, 10 rounds apart",
    "all 2x slower every other 40 rounds",
    "one worker 3x slower in every second round",
    "one of equal workers 1.45x slower, 20 % noise",
)


def _twice(slow: np.ndarray) -> np.ndarray:
    return np.where(slow, 2.0, 1.0)
