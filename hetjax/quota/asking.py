"""What a policy answers, checked where it enters: whoever plays rounds asks it through here.

A policy is anybody's. What is wrong with an answer is said with the policy's name, before a
worker computes by it.
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
      policy: whose they are.
      state: its state.
      total: microbatches of the round.
      caps: i64[n]; 0 of an absent worker.

    Returns:
      `(quotas i64[n], state)`; the quotas are a copy.

    Raises:
      ValueError: they are no whole numbers from 0 to the caps whose sum is `total`.
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
