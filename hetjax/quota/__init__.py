"""Quotas: how much each worker computes in a round, found from its measured speed."""

from collections.abc import Callable

from hetjax.quota.adaptive import AdaptiveState, adaptive
from hetjax.quota.costs import WorkerCosts
from hetjax.quota.guard import GuardState, guarded
from hetjax.quota.policies import (
    QuotaPolicy,
    RoundTimes,
    dead_band,
    equal,
    proportional,
    static,
)
from hetjax.quota.shares import largest_remainder
from hetjax.quota.solver import continuous_bound_secs, optimal_round_secs, solve_quotas

POLICIES: dict[str, Callable[..., QuotaPolicy]] = {
    "equal": equal,
    "static": static,
    "proportional": proportional,
    "dead_band": dead_band,
    "adaptive": adaptive,
}

__all__ = [
    "POLICIES",
    "AdaptiveState",
    "GuardState",
    "QuotaPolicy",
    "RoundTimes",
    "WorkerCosts",
    "adaptive",
    "continuous_bound_secs",
    "dead_band",
    "equal",
    "guarded",
    "largest_remainder",
    "optimal_round_secs",
    "proportional",
    "solve_quotas",
    "static",
]
