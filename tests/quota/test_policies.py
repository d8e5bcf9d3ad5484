"""What every quota policy promises, and the plain ones."""

import pickle

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetjax
from hetjax import quota, simulate
from hetjax.cluster import emulate
from tests.quota.played import play, run, times_of

OPTIONS = {"static": {"proportions": [4, 3, 2, 1, 0.5]}}


def make(name):
    return quota.POLICIES[name](**OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", quota.POLICIES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_quotas_always_sum_to_the_total_and_keep_within_the_caps(name, data):
    policy, budget = make(name), data.draw(st.integers(1, 40))
    cluster = emulate.EmulatedCluster(
        (1.0, 1.0, 2.0, 3.0, 50.0), 0.5, delay="exponential", seed=data.draw(st.integers(0, 99))
    )
    state, few = policy.init(5, budget), st.lists(st.integers(0, 12), min_size=5, max_size=5)
    for round in range(12):
        caps = np.array(data.draw(few))
        caps[data.draw(st.integers(0, 4))] += max(0, budget - caps.sum())
        total = data.draw(st.sampled_from([budget, budget, (budget + 1) // 2, 1]))
        quotas, state = policy.assign(state, total, caps)
        assert quotas.dtype == np.int64
        assert quotas.sum() == total
        assert (quotas >= 0).all()
        assert (quotas <= caps).all()
        done = np.minimum(quotas, data.draw(st.integers(0, 40)))  # a gate may close early
        state = policy.observe(state, times_of(cluster)(round, done))


@pytest.mark.parametrize("name", quota.POLICIES)
def test_a_smaller_round_and_a_cap_that_is_lower_for_once_leave_the_kept_quotas_alone(name):
    """After 60 rounds adaptive has settled; one microbatch of 1,000 would not move it back."""
    policy, caps = make(name), np.full(5, 1000)
    cluster = emulate.EmulatedCluster((1.0, 1.5, 2.0, 3.0, 4.0))
    _, state = play(policy, times_of(cluster), caps, 60, budget=1000)
    before, state = policy.assign(state, 1000, caps)
    small, state = policy.assign(state, 7, caps)
    squeezed, state = policy.assign(state, 1000, np.minimum(caps, [before[0] - 1] + [1000] * 4))
    after, _ = policy.assign(state, 1000, caps)
    assert (small.sum(), squeezed.sum()) == (7, 1000)
    assert squeezed[0] < before[0]
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", quota.POLICIES)
def test_a_state_that_was_saved_goes_on_identically(name):
    policy, caps = make(name), np.full(5, 40)
    times = times_of(emulate.EmulatedCluster((1.0, 1.0, 2.0, 3.0, 9.0), delay="exponential"))
    for rounds in (1, 12):  # adaptive is in a look by then
        _, state = play(policy, times, caps, rounds, budget=40)
        saved = pickle.loads(pickle.dumps(state))
        results = [play(policy, times, caps, 10, budget=40, state=s)[0] for s in (state, saved)]
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", quota.POLICIES)
def test_who_comes_back_is_as_if_never_seen(name):
    """Worker 4 is away from round 4 or from the beginning on, and comes in round 9."""
    cluster = emulate.EmulatedCluster((1.0, 1.0, 2.0, 3.0, 4.0))
    all_here, without = np.full(5, 40), np.array([40, 40, 40, 40, 0])
    first_quotas = []
    for caps_before in (all_here, without):
        policy = make(name)
        caps = lambda round, before=caps_before: before if round < 4 else without  # noqa: E731
        _, state = play(policy, times_of(cluster), caps, 9, budget=40)
        first_quotas.append(policy.assign(state, 40, all_here)[0].tolist())
    assert first_quotas[0] == first_quotas[1]


@pytest.mark.parametrize("name", quota.POLICIES)
def test_empty_clusters_and_rounds_and_caps_that_are_too_low_are_refused(name):
    policy = make(name)
    for num_workers, budget, message in ((0, 8, "num_workers: got 0"), (5, 0, "budget: got 0")):
        with pytest.raises(ValueError, match=message):
            policy.init(num_workers, budget)
    with pytest.raises(ValueError, match="total is 8, but the caps"):
        policy.assign(policy.init(5, 8), 8, np.array([7, 0, 0, 0, 0]))


def test_the_plain_rule_meets_the_speeds_at_once_without_overhead():
    cluster = emulate.EmulatedCluster((1.0, 2.0, 4.0))
    assert run(quota.proportional(), cluster, 14, 3)[1:].tolist() == [[8, 4, 2]] * 2
    each_epoch = run(quota.proportional(period_rounds=3), cluster, 14, 5)
    assert each_epoch.tolist() == [[5, 5, 4]] * 3 + [[8, 4, 2]] * 2


def test_a_dead_band_ignores_what_lies_within_it():
    cluster = emulate.EmulatedCluster((1.0, 1.2))
    assert run(quota.dead_band(band=0.2), cluster, 40, 3).tolist() == [[20, 20]] * 3
    assert run(quota.dead_band(band=0.05), cluster, 40, 3)[-1].tolist() == [22, 18]


def test_a_dead_band_counts_the_rounds_in_which_a_worker_was_there():
    """Who came in the middle of a period did not take half as long for its microbatches."""
    comes = [emulate.Change(round, 2, present=round > 0) for round in (0, 2)]
    cluster = emulate.EmulatedCluster((1.0, 1.0, 1.0), changes=comes)
    quotas = run(quota.dead_band(gain=0.5, period_rounds=4), cluster, 12, 6)
    assert quotas.tolist() == [[6, 6, 0]] * 2 + [[4, 4, 4]] * 4


def test_a_policy_is_told_who_is_there_by_a_mask():
    """In the simulator, on the virtual clock of a cluster, and in a run, replayed or not."""
    told = []
    policy = quota.equal()
    own = policy._replace(observe=lambda state, times: told.append(times.present) or state)
    leaves = emulate.Change(1, 0, present=False), emulate.Change(3, 0, present=True)
    cluster = emulate.EmulatedCluster((1.0, 2.0, 3.0), changes=leaves)
    here, without = [True] * 3, [False, True, True]
    emulate.simulate_policy(own, cluster, 6, 4)
    simulate.simulate(own, cluster, budget=6, num_rounds=4)
    loss, data = lambda params, batch, rng: batch["x"] @ params, {"x": np.zeros((48, 3), "f4")}
    fields = {"epochs": 1, "microbatch_size": 2, "budget": 6, "local": "virtual"}
    fields |= {"quota": own, "cluster": cluster}
    hetjax.fit(loss, np.zeros(3, np.float32), optax.sgd(0.1), data, **fields)
    assert [present.tolist() for present in told] == 3 * [here, without, without, here]
    seen = quota.RoundTimes(np.zeros(3, int), np.zeros(3), np.zeros(3))
    assert seen.present.tolist() == here  # who is not told otherwise


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="proportions are"):
        quota.static([1, 2]).init(3, 9)
    with pytest.raises(ValueError, match=r"band: got -0\.1"):
        quota.dead_band(band=-0.1)
    with pytest.raises(ValueError, match=r"alarm: got -1\.0"):
        quota.adaptive(alarm=-1.0)
