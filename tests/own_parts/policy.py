"""A quota policy of one's own: every round, one microbatch moves from the slowest to the fastest.

hetjax.fit(…, quota=one_at_a_time(least=2))
--config.quota.policy=tests.own_parts.policy:one_at_a_time
"""

from typing import Annotated, NamedTuple

import numpy as np

import hetjax


class State(NamedTuple):
    weights: np.ndarray  # f64[n], what the quotas are in proportion to


@hetjax.parts.factory
def one_at_a_time(
    *,
    least: Annotated[
        int, hetjax.parts.integer(at_least=1, unit="microbatches", says="that a worker keeps")
    ] = 1,
) -> hetjax.quota.QuotaPolicy:
    """Moves one microbatch a round to the worker that was first, if that helps."""

    def init(num_workers, budget):
        return State(np.full(num_workers, budget / num_workers))

    def assign(state, total, caps):
        return hetjax.quota.largest_remainder(state.weights, total, caps=caps), state

    def observe(state, times):
        weights, secs = state.weights.copy(), np.where(times.present, times.compute_secs, np.nan)
        last, first = np.nanargmax(secs), np.nanargmin(secs)  # who is absent was not first
        one_more = secs[first] * (1 + 1 / max(times.microbatches_done[first], 1))
        if weights[last] > least and one_more < secs[last]:
            weights[last] -= 1
            weights[first] += 1
        return State(weights)

    return hetjax.quota.QuotaPolicy(init, assign, observe)
