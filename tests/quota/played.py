"""Policies played on emulated clusters or by given times, and how near their rounds are to best."""

import numpy as np
import pytest

from hetjax import quota
from hetjax.cluster import emulate


def play(policy, times_of, caps, num_rounds, *, budget, state=None):
    """Quotas i64[rounds, n] by what `times_of(round, quotas)` says, and the state after them.

    Caps are i64[n], or a function of the round.
    """
    caps_of = caps if callable(caps) else lambda round: caps
    state, rounds = policy.init(len(caps_of(0)), budget) if state is None else state, []
    for round in range(num_rounds):
        quotas, state = policy.assign(state, budget, caps_of(round))
        state = policy.observe(state, times_of(round, quotas))
        rounds.append(quotas)
    return np.array(rounds), state


def times_of(cluster):
    """What a cluster's workers take: `(round, quotas) -> RoundTimes`."""

    def times(round, quotas):
        ends = [cluster.microbatch_ends(round, i, int(count)) for i, count in enumerate(quotas)]
        first = np.array([secs[0] if secs.size else np.nan for secs in ends])
        last = np.array([secs[-1] if secs.size else 0.0 for secs in ends])
        return quota.RoundTimes(np.asarray(quotas), first, last)

    return times


def totals(quotas, secs):
    """The times of a round of which only the seconds of each worker are known."""
    return quota.RoundTimes(quotas, np.full(len(quotas), np.nan), np.asarray(secs, float))


def run(policy, cluster, budget, num_rounds, **options):
    return emulate.simulate_policy(policy, cluster, budget, num_rounds, **options)[0]


def optimum(cluster, round, budget):
    caps = np.where(cluster.present_at(round), budget, 0)
    return quota.optimal_round_secs(cluster.costs_at(round), budget, caps=caps)


def is_optimal(quotas, cluster, round):
    secs = cluster.costs_at(round).round_secs(quotas).max()
    return secs == pytest.approx(optimum(cluster, round, int(quotas.sum())), rel=1e-9)
