import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetjax import quota
from hetjax.quota import solver
from tests import oracles


@pytest.fixture(scope="module", autouse=True, params=[0, solver._FEW])
def few(request):
    """Both ways: by levels of time, and microbatch by microbatch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "_FEW", request.param)
        yield


@st.composite
def problems(draw, most_workers=6, most_total=30):
    """Costs with many ties (whole numbers) or none (any floats), caps and current quotas."""
    num_workers = draw(st.integers(1, most_workers))
    whole = draw(st.booleans())
    if whole:
        overhead, secs = st.integers(0, 4).map(float), st.integers(1, 4).map(float)
    else:
        overhead, secs = st.floats(0, 1e3), st.floats(1e-3, 1e3)
    total = draw(st.integers(0, most_total))

    def each(values):
        return np.array(draw(st.lists(values, min_size=num_workers, max_size=num_workers)))

    caps = each(st.integers(0, most_total))
    caps[draw(st.integers(0, num_workers - 1))] += max(0, total - caps.sum())
    return each(overhead), each(secs), total, caps, each(st.integers(0, 12))


NONE = np.zeros(100, int)
EXTREME = 10 ** np.random.default_rng(0).uniform(-4, 4, 100)  # speeds of many workers
LOST = np.array([1e-17, 1e-18])  # in the rounding of the overhead


@settings(max_examples=400, deadline=None)
@given(problems())
@example((np.zeros(100), EXTREME, 500, np.full(100, 500), NONE))
@example((np.ones(2), LOST, 50, np.full(2, 50), NONE[:2]))
def test_quotas_are_those_of_the_unit_by_unit_greedy(problem):
    overhead, secs, total, caps, current = problem
    costs = quota.WorkerCosts(overhead, secs)
    quotas = quota.solve_quotas(costs, total, caps=caps, current=current)
    greedy = oracles.greedy_quotas(overhead, secs, total, caps, current)
    np.testing.assert_array_equal(quotas, greedy)
    assert quotas.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(problems(most_workers=4, most_total=8))
def test_no_division_of_the_microbatches_is_faster(problem):
    overhead, secs, total, caps, _ = problem
    costs = quota.WorkerCosts(overhead, secs)
    best = oracles.shortest_round_secs(overhead, secs, total, caps)
    assert quota.optimal_round_secs(costs, total, caps=caps) == best


@settings(max_examples=100, deadline=None)
@given(problems())
@example((np.array([256.0, 0.0]), np.array([1e-3, 18.0]), 16, np.array([1, 16]), np.zeros(2, int)))
def test_the_optimum_lies_between_the_bound_and_one_microbatch_above(problem):
    overhead, secs, total, caps, _ = problem
    costs = quota.WorkerCosts(overhead, secs)
    bound = quota.continuous_bound_secs(costs, total, caps=caps)
    optimum = quota.optimal_round_secs(costs, total, caps=caps)
    assert bound * (1 - 1e-12) <= optimum <= (bound + secs.max()) * (1 + 1e-12)


def test_wrong_arguments_and_impossible_costs_are_named():
    for arguments, message in (
        ({"total": 2.0}, "total is 2.0"),
        ({"total": 9, "caps": [3, 4]}, "total is 9, but the caps of 2 workers hold only 7"),
        ({"total": 1, "caps": [1, -1]}, "caps is"),
        ({"total": 1, "current": [0.5, 1]}, "current is"),
    ):
        with pytest.raises(ValueError, match=message):
            quota.solve_quotas(quota.WorkerCosts(0.0, [1.0, 1.0]), **arguments)
    for overhead, secs, message in (
        (0.0, [1.0, 0.0], "secs_per_microbatch of worker 1 is 0.0, overhead_secs 0.0"),
        ([np.nan, 0.0], [1.0, 1.0], "of worker 0 is 1.0, overhead_secs nan"),
        ([0.0], [1.0, 1.0], "secs_per_microbatch has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            quota.WorkerCosts(overhead, secs)
    for proportions in ([1, -1], [0, 0]):
        with pytest.raises(ValueError, match="proportions are"):
            quota.largest_remainder(proportions, 3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(any),
    st.integers(0, 200),
    st.data(),
)
def test_largest_remainders_are_exact_and_within_one_of_the_proportion(weights, total, data):
    shares = quota.largest_remainder(weights, total)
    ideal = total * np.array(weights) / np.sum(weights)
    assert shares.sum() == total
    assert np.abs(shares - ideal).max() < 1 + 1e-9
    caps = np.array([data.draw(st.integers(0, 60)) for _ in weights])
    caps[0] += max(0, total - caps.sum())
    capped = quota.largest_remainder(weights, total, caps=caps)
    assert capped.sum() == total
    assert (capped >= 0).all()
    assert (capped <= caps).all()


def test_largest_remainders_by_hand():
    assert quota.largest_remainder([1, 1, 1], 8).tolist() == [3, 3, 2]
    assert quota.largest_remainder([0.5, 0.3, 0.2], 9).tolist() == [4, 3, 2]
    # Only workers of proportion 0 have room left: they share.
    assert quota.largest_remainder([1, 0, 0], 5, caps=[1, 9, 9]).tolist() == [1, 2, 2]
