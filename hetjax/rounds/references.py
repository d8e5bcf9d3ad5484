"""How long would a round take with the best quotas, where the true speeds are known?"""

import functools
from typing import NamedTuple

import numpy as np

from hetjax import quota
from hetjax.data import stream
from hetjax.rounds import run_state
from hetjax.rounds import setup as setup_lib


class References(NamedTuple):
    """How long a round would take at the true speeds, computing alone."""

    optimal_secs: float
    bound_secs: float  # with microbatches of any size
    equal_split_secs: float


def of(setup: setup_lib.Setup, plan: run_state.Plan) -> References | None:
    """None where the true speeds are not known, or a gate may close the round."""
    if setup.speeds.cluster is None or not setup.speeds.emulated or setup.methods.gate.closes:
        return None
    costs = setup.speeds.cluster.costs_at(plan.round_index or 0)
    passes = 1.0 if setup.programs.embedding is None else 2.0
    return _references(
        (passes * costs.overhead_secs).tobytes(),
        (passes * costs.secs_per_microbatch).tobytes(),
        int(plan.quotas.sum()),
        plan.caps.tobytes(),
        setup.config.data.sharing == "private",
    )


@functools.lru_cache(256)
def _references(
    overhead: bytes, secs: bytes, total: int, caps: bytes, every_worker: bool
) -> References:
    costs = quota.WorkerCosts(np.frombuffer(overhead), np.frombuffer(secs))
    most = np.frombuffer(caps, np.int64)
    equal = quota.largest_remainder((most > 0).astype(np.float64), total, caps=most)
    best = quota.solve_quotas(costs, total, caps=most)
    if every_worker:  # private data: no shard may be left out
        best = stream.with_every_worker(best, most > 0)
    return References(
        float(costs.round_secs(best).max()),
        quota.continuous_bound_secs(costs, total, caps=most),
        float(costs.round_secs(equal).max()),
    )
