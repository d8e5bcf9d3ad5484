"""Policies played on emulated clusters, and how near their rounds are to the best."""

import numpy as np
import pytest

from hetjax import quota
from hetjax.cluster import emulate


def times_of(cluster, quotas, round):
    ends = [
        cluster.microbatch_ends(round, worker, int(count)) for worker, count in enumerate(quotas)
    ]
    return quota.RoundTimes(
        np.asarray(quotas),
        np.array([secs[0] if secs.size else np.nan for secs in ends]),
        np.array([secs[-1] if secs.size else 0.0 for secs in ends]),
    )


def run(policy, cluster, budget, num_rounds, **options):
    return emulate.simulate_policy(policy, cluster, budget, num_rounds, **options)[0]


def optimum(cluster, round, budget):
    caps = np.where(cluster.present_at(round), budget, 0)
    return quota.optimal_round_secs(cluster.costs_at(round), budget, caps=caps)


def is_optimal(quotas, cluster, round):
    secs = cluster.costs_at(round).round_secs(quotas).max()
    return secs == pytest.approx(optimum(cluster, round, int(quotas.sum())), rel=1e-9)
