"""Means and spreads over seeds, and how two of them compare.

A spread is half the distance from the least to the greatest of the seeds. A figure is below another
*by more than the spread* where the means differ by more than the larger of both spreads, and
*within the spread* where they do not.
"""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Stat(NamedTuple):
    """Mean and spread over the seeds."""

    mean: float
    spread: float
    num_seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Stat":
        values = list(values)
        if not values or not all(map(math.isfinite, values)):
            return cls(math.inf if values else math.nan, 0.0, len(values))
        return cls(statistics.mean(values), (max(values) - min(values)) / 2, len(values))

    def __format__(self, spec: str) -> str:
        if not math.isfinite(self.mean):
            return "diverged" if self.num_seeds else "not there"
        return f"{self.mean:{spec}}" + (f" ± {self.spread:{spec}}" if self.num_seeds > 1 else "")


def below(one: Stat, other: Stat) -> bool:
    """Whether `one` is below `other` by more than the spread."""
    return one.mean < other.mean - max(one.spread, other.spread)


def verdict(one: Stat, other: Stat) -> str:
    """How `one` compares with `other`, in words."""
    if min(one.num_seeds, other.num_seeds) == 0:
        return "not known"
    if min(one.num_seeds, other.num_seeds) == 1:
        return ("lower" if one.mean < other.mean else "higher") + " (one seed: no spread)"
    if below(one, other):
        return "lower by more than the spread"
    return "higher by more than the spread" if below(other, one) else "within the spread"


def in_spreads(one: Stat, other: Stat) -> str:
    """How far `one` is below (-) or above (+) `other`, in the larger spread, or in words."""
    spread = max(one.spread, other.spread)
    if not spread or not (math.isfinite(one.mean) and math.isfinite(other.mean)):
        return verdict(one, other)
    return f"{(one.mean - other.mean) / spread:+.1f}"
