import numpy as np
import pytest

from hetjax import quota
from hetjax.cluster import emulate
from tests.quota import played

CAPS = np.full(4, 16)
EVEN, SKEWED = [4, 4, 4, 4], [7, 3, 3, 3]


def play(secs_of, policy=None, *, num_rounds=100, budget=16, caps=CAPS):
    """Quotas of a policy guarded, where secs_of(round, quotas) are the workers' own seconds."""
    policy = quota.guarded(policy or quota.static([7, 3, 3, 3]))
    times_of = lambda round, quotas: played.totals(quotas, secs_of(round, quotas))  # noqa: E731
    rounds, state = played.play(policy, times_of, caps, num_rounds, budget=budget)
    return rounds.tolist(), state


def noise(round, scale=0.1):
    return np.exp(scale * np.random.default_rng(round).standard_normal(4))


def sharing(quotas):
    """Seconds of four equal workers of which the one with most to do looks as fast as it likes."""
    return np.where(quotas == quotas.max(), quotas.min(), quotas) * (1.0 + (quotas.max() > 4))


def test_quotas_whose_gain_only_their_own_clocks_see_give_way_to_equal_split():
    rounds, _ = play(lambda round, quotas: sharing(quotas) * noise(round), num_rounds=3000)
    assert rounds[:10] == [SKEWED] * 10
    assert rounds[20:] == [EVEN] * 2980


def test_quotas_of_independent_workers_are_not_held_back_by_noise():
    """Exponential rounds, quotas a third better: nothing there is 3 standard errors clear soon."""
    held, policy, secs = 0, quota.static([8, 6, 4, 2]), np.array([1.0, 4 / 3, 2.0, 4.0])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noisy = lambda _, quotas, rng=rng: quotas * secs * rng.exponential(size=4)  # noqa: E731
        rounds, _ = play(noisy, policy, num_rounds=300, budget=20)
        held += rounds[60:].count([5, 5, 5, 5])
    assert held <= 0.05 * 20 * 240


def test_a_look_takes_turns_whose_order_alternates():
    """The first worker is fast in every fourth round, just enough to decide nothing."""
    fast = np.array([0.55, 1.0, 1.0, 1.0])
    rounds, _ = play(lambda round, quotas: quotas * (fast if round % 4 == 2 else 1.0))
    assert rounds[10:14] == [EVEN, SKEWED, SKEWED, EVEN]


def test_the_guard_leaves_equal_quotas_and_their_noise_alone():
    rounds, state = play(lambda round, quotas: quotas * noise(round, 0.3), quota.equal())
    assert rounds == [EVEN] * 100
    assert not state.looking
    assert not state.held


def test_quotas_that_are_really_slower_are_not_kept_whatever_the_clocks_of_equal_rounds_say():
    def secs_of(round, quotas):  # by the clocks of equal rounds the first worker is twice as fast
        if quotas.tolist() == EVEN:
            return np.array([2.0, 4.0, 4.0, 4.0]) * noise(round, 0.02)
        return np.full(4, 5.0) * noise(round, 0.02)

    rounds, _ = play(secs_of, num_rounds=600)
    assert EVEN not in rounds[:10]
    assert rounds.count(EVEN) >= 480  # looked at again after 16, 32, 64, ... rounds


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_equal_split_is_released_when_its_own_clocks_speak_for_the_quotas(factor):
    def secs_of(round, quotas):
        # From round 60 on, the quotas are what the workers want.
        return quotas / np.array([7, 3, 3, 3]) * 4 * factor if round >= 60 else quotas * 1.0

    rounds, _ = play(secs_of)
    assert rounds[59:63] == [EVEN] * 4
    assert SKEWED in rounds[63:66]
    assert rounds[80:] == [SKEWED] * 20


def test_two_late_rounds_in_a_row_release_nothing():
    rounds, _ = play(lambda round, quotas: quotas * (9.0 if round in (60, 61) else 1.0))
    assert rounds[50:] == [EVEN] * 50


def test_quotas_that_make_rounds_shorter_are_kept_and_not_looked_at_again():
    right = lambda round, quotas: quotas / np.array([7, 3, 3, 3]) * noise(round)  # noqa: E731
    rounds, _ = play(right, num_rounds=3000)
    assert 1 <= rounds.count(EVEN) <= 4
    assert rounds[24:] == [SKEWED] * 2976


def test_a_worker_that_leaves_ends_the_hold():
    def caps_of(round):
        return CAPS * (np.arange(4) < (3 if round >= 60 else 4))

    rounds, state = play(lambda _, quotas: quotas, num_rounds=62, caps=caps_of)
    assert rounds[59] == EVEN
    assert rounds[60] == [*quota.largest_remainder([7, 3, 3], 16), 0]
    assert not state.held


def test_a_look_waits_while_it_would_be_dear_and_is_made_in_the_end():
    def secs_of(_, quotas):
        return quotas * np.array([1.0, 1.0, 1.0, 50.0])

    rounds, _ = play(secs_of, quota.static([5, 5, 5, 0.5]), num_rounds=20)
    assert EVEN not in rounds
    rounds, _ = play(secs_of, quota.static([5, 5, 5, 0.5]), num_rounds=600)
    assert rounds.count(EVEN) <= 4
    assert rounds[-1] != EVEN


def test_rounds_of_fewer_microbatches_and_of_closed_gates_tell_nothing():
    policy = quota.guarded(quota.static([7, 3, 3, 3]))
    state = policy.init(4, 16)
    for total in (8, 16) * 100:
        quotas, state = policy.assign(state, total, CAPS)
        done = quotas if total == 8 else np.minimum(quotas, 5)
        state = policy.observe(state, played.totals(done, done))
    assert state.rounds == 0
    assert not state.held


def test_a_held_split_survives_smaller_rounds_and_lower_caps():
    _, state = play(lambda _, quotas: quotas)
    policy = quota.guarded(quota.static([7, 3, 3, 3]))
    small, state = policy.assign(state, 4, CAPS)
    assert small.tolist() == [1, 1, 1, 1]
    low, state = policy.assign(state, 16, np.array([2, 16, 16, 16]))
    assert low.tolist() == [2, 5, 5, 4]
    assert policy.assign(state, 16, CAPS)[0].tolist() == EVEN


def test_adaptive_on_shared_cores_is_no_slower_than_equal_split():
    """Four workers on two cores, whole rounds in turn: unequal quotas fill the cores unevenly."""

    def round_secs(policy, seed):
        rng, longest = np.random.default_rng(seed), []

        def times_of(round, quotas):
            warm = quotas * rng.gamma(100, 0.01, 4)
            work = warm + (round == 0) * rng.exponential(10, 4)
            cores, ends = [0.0, 0.0], np.zeros(4)
            for worker in rng.permutation(np.flatnonzero(quotas)):
                core = int(np.argmin(cores))
                cores[core] += work[worker]
                ends[worker] = cores[core]
            first = np.where(quotas > 0, ends - warm * (1 - 1 / np.maximum(quotas, 1)), np.nan)
            longest.append(ends.max())
            return quota.RoundTimes(quotas, first, ends)

        played.play(policy, times_of, np.full(4, 16), 300, budget=16)
        return np.mean(longest[60:])

    even = np.array([round_secs(quota.equal(), seed) for seed in range(4)])
    guarded = np.array([round_secs(quota.adaptive(), seed) for seed in range(4)])
    assert (guarded <= 1.02 * even).all()


def test_equal_split_has_the_whole_total_when_caps_were_low_at_first():
    policy = quota.guarded(quota.static([3, 1]))
    state = policy.init(2, 10)
    _, state = policy.assign(state, 6, np.array([2, 4]))
    times_of = lambda round, quotas: played.totals(quotas, quotas)  # noqa: E731
    quotas, _ = played.play(policy, times_of, np.full(2, 10), 40, budget=10, state=state)
    assert (quotas.sum(axis=1) == 10).all()
    assert quotas[-1].tolist() == [5, 5]


def test_a_held_split_gives_way_while_a_worker_is_many_times_late():
    changes = emulate.Change(60, 1, 100.0), emulate.Change(62, 1, 1.0)
    cluster = emulate.EmulatedCluster((1.0,) * 4, changes=changes)
    policy = quota.guarded(quota.adaptive(guard=False))
    caps, times_of = np.full(4, 32), played.times_of(cluster)
    _, state = played.play(policy, times_of, caps, 59, budget=32)
    state = state._replace(held=True, rounds=0, wait=16)
    later = lambda round, quotas: times_of(59 + round, quotas)  # noqa: E731
    quotas, state = played.play(policy, later, caps, 11, budget=32, state=state)
    assert quotas[:5, 1].tolist() == [8, 8, 1, 1, 8]
    assert state.held
