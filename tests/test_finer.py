"""What smaller microbatches would save: by hand, and of a run."""

import numpy as np
import optax
import pytest

import hetjax
from experiments import finer
from hetjax import quota

SPEEDS_4_2_1_1 = (1.0, 2.0, 4.0, 4.0)
DATA = {"x": np.linspace(-1.0, 1.0, 960, dtype=np.float32)}


def costs(secs, overhead=0.0):
    return quota.WorkerCosts(overhead, secs)


def test_four_microbatches_for_four_workers_by_hand():
    """As 3 1 0 0 they take 3; eight halves as 4 2 1 1 take 2, and quarters no less."""
    found = finer.advice(costs(SPEEDS_4_2_1_1), 4)
    assert found == ((3, 1, 0, 0), 3.0, 2, pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_a_larger_budget_also_shares_the_overhead_of_a_round():
    """By hand: (1 + 3) a round; halves 1 + 2; twice as many 1 + 4 for twice the examples."""
    found = finer.advice(costs(SPEEDS_4_2_1_1, 1.0), 4)
    assert found.saved == pytest.approx(1 / 4)
    assert found.saved_by_budget == pytest.approx(3 / 8)


def test_costs_are_medians_of_the_rounds_in_which_a_worker_computed():
    done = np.array([[2, 1], [2, 0], [4, 1]])
    secs = np.array([[2.0, 3.0], [8.0, 0.0], [4.0, 5.0]])
    host = np.array([[0.1, 0.2], [0.3, 9.0], [0.2, 0.4]])
    found = finer.measured(done, secs, host)
    np.testing.assert_allclose(found.secs_per_microbatch, [1.0, 4.0])
    np.testing.assert_allclose(found.overhead_secs, [0.2, 0.3])
    assert finer.measured(done * [1, 0], secs, host) is None  # one was never seen


def train(budget, *, rounds=60, workdir=None):
    fields = {"epochs": 20, "max_rounds": rounds, "microbatch_size": 4, "budget": budget}
    fields |= {"local": "virtual", "cluster": {"secs_per_microbatch": SPEEDS_4_2_1_1}}
    loss_fn = lambda params, batch, rng: (batch["x"] * params - 1.0) ** 2  # noqa: E731
    given = (loss_fn, np.float32(0.5), optax.sgd(0.01), DATA)
    return hetjax.fit(*given, progress=False, workdir=workdir, **fields)


def test_the_rounds_of_a_run_tell_it_and_those_of_its_workdir_too(tmp_path):
    result = train(4, workdir=tmp_path)
    found = finer.of_run(result)
    assert (found.quotas, found.round_secs, found.divisor) == ((3, 1, 0, 0), 3.0, 2)
    assert found.saved == found.saved_by_budget == pytest.approx(1 / 3)
    assert finer.of_run(hetjax.load(tmp_path)) == found


@pytest.mark.parametrize(("budget", "rounds"), [(4, 39), (8, 60)], ids=["few rounds", "fits"])
def test_where_too_little_is_known_or_saved_nothing_is_said(budget, rounds):
    assert finer.of_run(train(budget, rounds=rounds)) is None
