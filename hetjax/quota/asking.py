"""What a policy answers, checked where it enters. Whoever runs rounds asks a policy through here.

A policy may be any user's. Messages say what is wrong with an answer, with the policy's name,
before a worker computes by it.
"""

from typing import Any

import numpy as np

from hetjax import parts
from hetjax.quota import policies


def assigned(
    policy: policies.QuotaPolicy, state: Any, total: int, caps: np.ndarray
) -> tuple[np.ndarray, Any]:
    """The quotas of a round, and the policy's state after it has assigned them.

    Args:
      policy: that assigns them.
      state: its state.
      total: microbatches of the round.
      caps: i64[n]; 0 of an absent worker.

    Returns:
      `(quotas i64[n], state)`; the quotas are a copy.

    Raises:
      ValueError: the quotas are no whole numbers from 0 to the caps whose sum is `total`.
    """
    answer = policy.assign(state, total, caps.copy())
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    quotas = parts.array_of(answer[0] if is_pair else None)
    is_right = quotas.shape == caps.shape and quotas.dtype.kind in "iu"
    if is_right and quotas.sum() == total and (quotas >= 0).all() and (quotas <= caps).all():
        return quotas.astype(np.int64), answer[1]
    got = parts.shown(answer[0]) if is_pair else f"{parts.shown(answer)} and no pair"
    raise ValueError(
        f"quota: the policy {parts.named(policy)}: assign(state, total={total}, "
        f"caps={caps.tolist()}) returned the quotas {got}. It must return (quotas, state): whole "
        "numbers, one for each worker, from 0 to its cap, whose sum is total; "
        "hetjax.quota.largest_remainder(weights, total, caps=caps) makes such"
    )


def of_epochs(policy: policies.QuotaPolicy, rounds: int) -> policies.QuotaPolicy:
    """The policy of a run whose epochs have so many rounds.

    Raises:
      ValueError: its `of_epochs` made something else.
    """
    if policy.of_epochs is None:
        return policy
    made = policy.of_epochs(rounds)
    if isinstance(made, policies.QuotaPolicy):
        return made
    raise ValueError(
        f"quota: the policy {parts.named(policy)}: of_epochs({rounds}) returned "
        f"{parts.shown(made)}; it must return a hetjax.quota.QuotaPolicy"
    )


def proportions(policy: policies.QuotaPolicy, num_workers: int) -> tuple[float, ...] | None:
    """The proportions by which private shards are cut; None: equal ones.

    Raises:
      ValueError: there is not one for each worker, or they are no proportions.
    """
    given = policy.proportions
    found = parts.array_of(given)
    is_right = found.shape == (num_workers,) and found.dtype.kind in "fiu"
    if given is None or (is_right and np.isfinite(found).all() and found.min() >= 0 < found.sum()):
        return given
    raise ValueError(
        f"quota: the policy {parts.named(policy)}: its proportions are {parts.shown(given)}; they "
        f"must be {num_workers} numbers, one for each worker, 0 or more and not all 0"
    )
