"""Quotas: how much each worker computes in a round, found from its measured speed.

- `policies` says what a policy is, checks what one answers, and has the simple ones.
- `adaptive` follows the best of several candidates, under a `guard` that may hold equal split.
- `fitted` has quotas by fitted costs, `sampled` those that were best in the last rounds.
- `estimate` fits what a round costs each worker, and says when a worker has changed.
- `solver` finds the exact quotas for known costs, and divides in given proportions.

The seconds of a round go in; microbatches of the next come out. Imports `parts`; needs only NumPy,
never JAX.
"""

from collections.abc import Callable

from hetjax.quota.adaptive import AdaptiveState, adaptive
from hetjax.quota.guard import GuardState, guarded
from hetjax.quota.policies import QuotaPolicy, RoundTimes, dead_band, equal, proportional, static
from hetjax.quota.solver import (
    WorkerCosts,
    continuous_bound_secs,
    largest_remainder,
    optimal_round_secs,
    solve_quotas,
)

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
