"""Speeds of workers in every round, and the rounds that a policy's quotas have with them.

Whatever the quotas are, the speeds of a trace are the same. `changing` has the traces in which they
change; `plain_rule` is the policy that adaptive quotas are compared with.
"""

import dataclasses

import numpy as np

from hetjax import quota
from tests.quota import played


@dataclasses.dataclass(frozen=True)
class Trace:
    """Seconds of every worker in every round, f64[rounds, n]: means of a microbatch.

    One factor a worker and round, of a gamma law, is on all it does; the overhead is in
    microbatches of an equal part of the round.
    """

    secs: np.ndarray
    budget: int
    cv: float = 0.05
    overhead: float = 0.1
    seed: int = 0

    def play(self, policy: quota.QuotaPolicy) -> np.ndarray:
        """Returns the seconds of each round with a policy's quotas, f64[rounds]."""
        num_workers = self.secs.shape[1]
        rng, longest = np.random.default_rng([self.seed, 77]), np.zeros(len(self.secs))

        def times_of(round, quotas):
            factors = self.secs[round] * rng.standard_gamma(self.cv**-2, num_workers) * self.cv**2
            start = self.overhead * self.budget / num_workers * factors
            first = np.where(quotas > 0, start + factors, np.nan)
            total = np.where(quotas > 0, start + factors * quotas, 0.0)
            longest[round] = total.max()
            return quota.RoundTimes(quotas, first, total)

        caps = np.full(num_workers, self.budget)
        played.play(policy, times_of, caps, len(longest), budget=self.budget)
        return longest


def plain_rule(weight: float = 0.3) -> quota.QuotaPolicy:
    """Quotas in proportion to smoothed speeds, each worker at least one microbatch."""

    def init(num_workers: int, budget: int) -> np.ndarray:
        return np.full(num_workers, np.nan)  # seconds of a microbatch; NaN: never seen

    def assign(smoothed: np.ndarray, total: int, caps: np.ndarray):
        if np.isnan(smoothed).any():
            return quota.largest_remainder(np.ones(caps.size), total, caps=caps), smoothed
        rest = quota.largest_remainder(1 / smoothed, total - caps.size, caps=caps - 1)
        return rest + 1, smoothed

    def observe(smoothed: np.ndarray, times: quota.RoundTimes) -> np.ndarray:
        secs = times.compute_secs / times.microbatches_done
        return np.where(np.isnan(smoothed), secs, smoothed + weight * (secs - smoothed))

    return quota.QuotaPolicy(init, assign, observe)


def changing(name: str, num_workers: int = 8, num_rounds: int = 400) -> Trace:
    """A trace of speeds that change, by what is said of it."""
    shape, time = (num_rounds, num_workers), np.arange(num_rounds)[:, None]
    number = CHANGES.index(name)
    rng = np.random.default_rng([number, num_workers])
    unequal = rng.uniform(1, 4, num_workers)
    flips = np.cumsum(rng.random(shape) < 0.1, axis=0) % 2
    one = np.arange(num_workers) == num_workers // 2
    secs = {
        CHANGES[0]: unequal * (1.0 + flips),
        CHANGES[1]: unequal * (1.0 + time // 40 % 2),
        CHANGES[2]: np.where((time >= 150) & one, 1.45, 1.0),
    }[name]
    return Trace(secs, 8 * num_workers, cv=0.2 if "20 % noise" in name else 0.05, seed=number)


CHANGES = (
    "flips of 2x, 10 rounds apart",
    "all 2x slower every other 40 rounds",
    "one of equal workers 1.45x slower, 20 % noise",
)
