import numpy as np
import pytest

from hetjax.cluster import emulate


def noisy(**options):
    return emulate.EmulatedCluster((1.0, 2.0), (0.5, 0.0), **options)


NOISES = [
    {"delay": "constant"},
    {"delay": "exponential"},
    {"delay": "shifted_exponential"},
    {"delay": "gamma", "delay_cv": 0.3},
    {"delay": "gamma", "delay_cv": 0.3, "delay_per": "round"},
]


@pytest.mark.parametrize("noise", NOISES)
def test_more_microbatches_leave_the_earlier_ones_as_they_were(noise):
    cluster = noisy(**noise)
    most = cluster.microbatch_ends(5, 0, 300)
    for count in (0, 1, 17, 300):
        cluster.microbatch_ends(9, 1, 4)  # of another round and worker
        np.testing.assert_array_equal(cluster.microbatch_ends(5, 0, count), most[:count])


@pytest.mark.parametrize("noise", NOISES[1:])
def test_seed_round_and_worker_each_change_the_times(noise):
    cluster = emulate.EmulatedCluster((1.0, 1.0), **noise)
    reference = cluster.microbatch_ends(0, 0, 1).item()
    assert cluster.microbatch_ends(1, 0, 1).item() != reference
    assert cluster.microbatch_ends(0, 1, 1).item() != reference
    other = emulate.EmulatedCluster((1.0, 1.0), seed=1, **noise)
    assert other.microbatch_ends(0, 0, 1).item() != reference


@pytest.mark.parametrize(
    ("delay", "cv"), [("exponential", 1.0), ("shifted_exponential", 0.5), ("gamma", 0.3)]
)
@pytest.mark.parametrize("per", emulate.DELAY_PER)
def test_mean_and_spread_are_the_stated_ones(delay, cv, per):
    cluster = emulate.EmulatedCluster((2.0,), delay=delay, delay_cv=0.3, delay_per=per)
    ends = np.array([cluster.microbatch_ends(round, 0, 4) for round in range(4000)])
    assert ends.mean(axis=0) == pytest.approx([2, 4, 6, 8], rel=4 * cv / 4000**0.5)
    relative = ends[:, 3].std() / ends[:, 3].mean()
    assert relative == pytest.approx(cv if per == "round" else cv / 2, rel=0.1)


def test_constant_times_are_exact_and_begin_with_the_overhead():
    assert noisy().microbatch_ends(0, 0, 3).tolist() == [1.5, 2.5, 3.5]
    assert noisy().costs_at(0).round_secs([3, 0]).tolist() == [3.5, 0.0]


def test_changes_hold_from_their_round_until_the_next():
    cluster = noisy(
        changes=(
            emulate.Change(8, 0, present=True),
            emulate.Change(3, 0, secs_per_microbatch=4.0),
            emulate.Change(5, 0, overhead_secs=0.0, present=False),
        )
    )
    secs = [cluster.costs_at(round).secs_per_microbatch[0] for round in (0, 2, 3, 9)]
    overhead = [cluster.costs_at(round).overhead_secs[0] for round in (4, 5, 9)]
    present = [cluster.present_at(round).tolist() for round in (4, 5, 7, 8)]
    assert secs == [1.0, 1.0, 4.0, 4.0]
    assert overhead == [0.5, 0.0, 0.0]
    assert present == [[True, True], [False, True], [False, True], [True, True]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secs_per_microbatch": (1.0, 0.0)}, "secs_per_microbatch of worker 1 is 0.0"),
        ({"overhead_secs": (1.0,)}, "secs_per_microbatch has shape"),
        ({"delay": "gama"}, "delay: got 'gama', .* constant, exponential, gamma"),
        ({"delay_cv": 0.0}, "delay_cv: got 0.0"),
        ({"changes": (emulate.Change(0, 2, 1.0),)}, "the worker must be 0 to 1"),
        ({"changes": (emulate.Change(0, 0),)}, "changes nothing"),
        ({"changes": (emulate.Change(0, 0, -1.0),)}, "above 0"),
    ],
)
def test_a_wrong_cluster_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        emulate.EmulatedCluster(**{"secs_per_microbatch": (1.0, 2.0), **options})
