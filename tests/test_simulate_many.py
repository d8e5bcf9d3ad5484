"""The simulator with many workers, and schedules that are solved once."""

import numpy as np
import pytest

from hetjax import simulate, topology
from hetjax.cluster import emulate
from hetjax.topology import gossip


def many(num_workers=20_000, secs=2.0, **options):
    return emulate.EmulatedCluster((secs,) * num_workers, 1.0, **options)


@pytest.mark.parametrize(("delay", "cv"), [("shifted_exponential", 0.5), ("gamma", 0.3)])
@pytest.mark.parametrize("per", emulate.DELAY_PER)
def test_times_of_many_workers_have_the_stated_mean_and_spread(delay, cv, per):
    cluster = many(delay=delay, delay_cv=0.3, delay_per=per)
    ends = simulate.microbatch_ends(cluster, 7, np.full(20_000, 4))
    mean = np.array([3.0, 5.0, 7.0, 9.0])
    spread = cv * (mean if per == "round" else np.sqrt(1 + 4 * np.arange(1, 5)))
    np.testing.assert_allclose(ends.mean(axis=0), mean, rtol=4 * cv / 20_000**0.5)
    np.testing.assert_allclose(ends.std(axis=0), spread, rtol=0.05)
    assert abs(np.corrcoef(ends[:-1, 3], ends[1:, 3])[0, 1]) < 0.03
    other = simulate.microbatch_ends(cluster, 8, np.full(20_000, 4))
    assert abs(np.corrcoef(ends[:, 3], other[:, 3])[0, 1]) < 0.03
    more = simulate.microbatch_ends(cluster, 7, np.full(20_000, 6))
    np.testing.assert_array_equal(more[:, :4], ends)


def test_constant_times_of_many_workers_are_exactly_those_of_each():
    rng = np.random.default_rng(0)
    cluster = emulate.EmulatedCluster(tuple(rng.random(100) + 0.1), tuple(rng.random(100)))
    quotas = rng.integers(0, 9, 100)
    ends = simulate.microbatch_ends(cluster, 0, quotas)
    for worker, count in enumerate(quotas):
        np.testing.assert_array_equal(
            ends[worker, :count], cluster.microbatch_ends(0, worker, count)
        )


def test_one_object_solves_its_schedule_once(monkeypatch):
    cluster, solved = emulate.EmulatedCluster((1.0, 2.0, 1.0, 4.0)), []
    plain = gossip.matcha
    monkeypatch.setattr(gossip, "matcha", lambda *a, **o: solved.append(1) or plain(*a, **o))
    reducer = topology.matcha(graph="star")
    for _ in range(3):
        simulate.simulate("equal", cluster, budget=8, num_rounds=2, reducer=reducer)
    assert len(solved) == 1


@pytest.mark.parametrize("wait_for", simulate.WAIT_FOR)
def test_a_hundred_thousand_workers_exchange_with_one_peer(wait_for):
    cluster = many(100_000, delay="shifted_exponential")
    fields = {"budget": 400_000, "num_rounds": 2, "param_bytes": 10, "wait_for": wait_for}
    fields["reducer"] = {"name": "d_psgd", "graph": "one_peer_exponential"}
    found = simulate.simulate("equal", cluster, **fields)
    assert found.microbatches_done.tolist() == [400_000] * 2
    assert found.bytes_sent.tolist() == [1_000_000] * 2
