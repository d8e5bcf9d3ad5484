import pickle

import numpy as np
import pytest

from hetjax import quota
from hetjax.cluster import emulate
from hetjax.quota import guard

CAPS = np.full(4, 16)
EVEN, SKEWED = [4, 4, 4, 4], [7, 3, 3, 3]


def play(secs_of, policy=None, *, num_rounds=100, budget=16, caps_of=lambda _: CAPS, state=None):
    """Quotas of a policy guarded, where secs_of(round, quotas) are the workers' own seconds."""
    policy = quota.guarded(policy or quota.static([7, 3, 3, 3]))
    state = policy.init(4, budget) if state is None else state
    rounds = []
    for round in range(num_rounds):
        quotas, state = policy.assign(state, budget, caps_of(round))
        secs = np.asarray(secs_of(round, quotas), float)
        state = policy.observe(state, quota.RoundTimes(quotas, np.full(4, np.nan), secs))
        rounds.append(quotas.tolist())
    return rounds, state


def noise(round, scale=0.1):
    return np.exp(scale * np.random.default_rng(round).standard_normal(4))


def test_quotas_that_make_rounds_longer_give_way_to_equal_split():
    rounds, _ = play(lambda round, quotas: quotas * noise(round))
    assert rounds[:10] == [SKEWED] * 10
    assert rounds[42:] == [EVEN] * 58


def test_quotas_that_make_rounds_shorter_are_kept_after_a_short_trial():
    rounds, _ = play(lambda round, quotas: quotas / np.array([7, 3, 3, 3]) * noise(round))
    assert 2 <= rounds.count(EVEN) <= 4
    assert rounds[20:] == [SKEWED] * 80


def test_a_trial_takes_turns_whose_order_alternates():
    rounds, _ = play(lambda round, quotas: (quotas == 7) * (1.0 + round % 2) + 1.0, num_rounds=20)
    assert rounds[10:14] == [SKEWED, EVEN, EVEN, SKEWED]


def test_the_guard_leaves_equal_quotas_and_their_noise_alone():
    rounds, state = play(lambda round, quotas: quotas * noise(round, 0.3), quota.equal())
    assert rounds == [EVEN] * 100
    assert not state.trying
    assert not state.held


@pytest.mark.parametrize("late", [11, 12])
def test_one_late_round_does_not_decide_a_trial(late):
    def secs_of(round, quotas):
        even = quotas.tolist() == EVEN
        return np.ones(4) * (0.9 if even else 1.0) * (100.0 if round == late else 1.0)

    rounds, _ = play(secs_of)
    assert rounds[60:] == [EVEN] * 40


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_equal_split_is_released_when_three_rounds_in_a_row_have_changed(factor):
    def secs_of(round, quotas):
        # From round 60 on, the quotas are what the workers want.
        return quotas / np.array([7, 3, 3, 3]) * 4 * factor if round >= 60 else quotas

    rounds, _ = play(secs_of)
    assert rounds[59:63] == [EVEN] * 4
    assert rounds[63] == SKEWED
    assert rounds[80:] == [SKEWED] * 20


def test_two_late_rounds_in_a_row_release_nothing():
    rounds, _ = play(lambda round, quotas: quotas * (9.0 if round in (60, 61) else 1.0))
    assert rounds[50:] == [EVEN] * 50


def test_a_release_in_vain_asks_for_twice_as_many_rounds_the_next_time():
    def secs_of(round, quotas):
        return quotas * (2.0 if 60 <= round < 80 else 1.0)

    rounds, _ = play(secs_of, num_rounds=90)
    assert rounds[63] == SKEWED
    assert rounds[80:86] == [EVEN] * 6  # 1x again: this time six such rounds are needed
    assert rounds[86] == SKEWED


def test_nothing_is_tried_again_without_a_change():
    rounds, _ = play(lambda round, quotas: quotas * noise(round), num_rounds=3000)
    assert rounds[42:] == [EVEN] * 2958


def test_a_worker_that_leaves_ends_the_hold():
    def caps_of(round):
        return CAPS * (np.arange(4) < (3 if round >= 60 else 4))

    rounds, state = play(lambda _, quotas: quotas, num_rounds=62, caps_of=caps_of)
    assert rounds[59] == EVEN
    assert rounds[60] == [*quota.largest_remainder([7, 3, 3], 16), 0]
    assert not state.held


def test_a_trial_waits_while_it_would_be_dear_and_is_made_in_the_end():
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
    for round in range(200):
        total = 16 if round % 2 else 8
        quotas, state = policy.assign(state, total, CAPS)
        done = quotas if total == 8 else np.minimum(quotas, 5)
        secs = done * 1.0
        state = policy.observe(state, quota.RoundTimes(done, np.full(4, np.nan), secs))
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


def test_a_guard_that_was_saved_in_a_trial_goes_on_identically():
    def secs_of(round, quotas):
        return quotas * noise(round)

    _, state = play(secs_of, num_rounds=13)
    assert state.trying
    saved = pickle.loads(pickle.dumps(state))
    assert play(secs_of, state=state)[0] == play(secs_of, state=saved)[0]


def test_the_robust_mean_of_pairs_by_hand():
    values = np.array([0.0, 0.1, 0.2, 9.0])
    # median 0.15, spread² = (4·(1.4826·0.1)² + 4·0.05²)/8, and 9.0 counts as median + 2 spreads
    spread = np.sqrt((4 * 0.14826**2 + 4 * 0.05**2) / 8)
    mean, error, _ = guard._robust_mean(values, 0.05, 4.0)
    assert mean == pytest.approx((0.0 + 0.1 + 0.2 + 0.15 + 2 * spread) / 4)
    assert error == pytest.approx(1.25 * spread / 2)


def test_adaptive_on_shared_cores_is_no_slower_than_equal_split():
    """Four workers on two cores, whole rounds in turn: unequal quotas fill the cores unevenly."""

    def round_secs(policy, seed):
        rng = np.random.default_rng(seed)
        state, caps, longest = policy.init(4, 16), np.full(4, 16), []
        for round in range(300):
            quotas, state = policy.assign(state, 16, caps)
            warm = quotas * rng.gamma(100, 0.01, 4)
            work = warm + (round == 0) * rng.exponential(10, 4)
            cores, ends = [0.0, 0.0], np.zeros(4)
            for worker in rng.permutation(np.flatnonzero(quotas)):
                core = int(np.argmin(cores))
                cores[core] += work[worker]
                ends[worker] = cores[core]
            first = np.where(quotas > 0, ends - warm * (1 - 1 / np.maximum(quotas, 1)), np.nan)
            state = policy.observe(state, quota.RoundTimes(quotas, first, ends))
            longest.append(ends.max())
        return np.mean(longest[60:])

    even = np.array([round_secs(quota.equal(), seed) for seed in range(4)])
    bare = np.array([round_secs(quota.adaptive(guard=False), seed) for seed in range(4)])
    guarded = np.array([round_secs(quota.adaptive(), seed) for seed in range(4)])
    assert (guarded <= 1.02 * even).all()
    assert (bare > 1.02 * even).any()


def test_adaptive_answers_a_slower_worker_also_from_a_held_equal_split():
    change = emulate.Change(60, 1, 2.0)
    cluster = emulate.EmulatedCluster((1.0,) * 4, changes=(change,))
    policy = quota.guarded(quota.adaptive(guard=False))
    state = policy.init(4, 32)
    caps = np.full(4, 32)
    for round in range(75):
        quotas, state = policy.assign(state, 32, caps)
        if round == 5:  # as after a trial that equal split has won
            state = state._replace(held=True, level=np.log(8.0), equal_level=np.log(8.0))
        ends = [cluster.microbatch_ends(round, i, int(k)) for i, k in enumerate(quotas)]
        times = quota.RoundTimes(
            quotas, np.array([own[0] for own in ends]), np.array([own[-1] for own in ends])
        )
        state = policy.observe(state, times)
        if round == 63:
            assert quotas[1] <= 5
    assert not state.held
    assert (quotas * [1, 2, 1, 1]).max() == 10  # the optimum
