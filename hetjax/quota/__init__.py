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

from hetjax import parts
from hetjax.quota.adaptive import AdaptiveState as AdaptiveState
from hetjax.quota.adaptive import adaptive as adaptive
from hetjax.quota.guard import GuardState as GuardState
from hetjax.quota.guard import guarded as guarded
from hetjax.quota.policies import QuotaPolicy as QuotaPolicy
from hetjax.quota.policies import RoundTimes as RoundTimes
from hetjax.quota.policies import dead_band as dead_band
from hetjax.quota.policies import equal as equal
from hetjax.quota.policies import proportional as proportional
from hetjax.quota.policies import static as static
from hetjax.quota.solver import WorkerCosts as WorkerCosts
from hetjax.quota.solver import continuous_bound_secs as continuous_bound_secs
from hetjax.quota.solver import largest_remainder as largest_remainder
from hetjax.quota.solver import optimal_round_secs as optimal_round_secs
from hetjax.quota.solver import solve_quotas as solve_quotas

POLICIES: dict[str, Callable[..., QuotaPolicy]] = parts.by_name(
    equal, static, proportional, dead_band, adaptive
)
