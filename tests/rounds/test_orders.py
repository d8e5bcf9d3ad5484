"""Training with balanced orders against a slow reference: orders, signs and parameters."""

import json

import numpy as np
import optax
import pytest

from experiments.orders import herding
from hetjax import ordering
from tests.own_parts import gate
from tests.rounds import problems
from tests.rounds.order_comparison import compare_with_reference, made, recorded
from tests.rounds.order_reference import WORKERS, example_gradients, private_shards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "block_pairs", "local", "sharing"),
    [
        ("d_grab", 2, "stepped", "private"),
        ("d_grab", 2, "fused", "shared"),
        ("d_grab", 16, "virtual", "shared"),
        ("d_grab_exact", 1, "stepped", "private"),
        ("d_grab_exact", 1, "virtual", "shared"),
        ("pair_balance", 1, "virtual", "private"),
        ("pair_balance_exact", 1, "stepped", "shared"),
        ("grab", 1, "virtual", "private"),
    ],
)
def test_orders_and_parameters_equal_the_reference(
    method, block_pairs, local, sharing, tmp_path, float64
):
    compare_with_reference(tmp_path, method, local, sharing, block_pairs=block_pairs)


def orders_of(calls, num_examples):
    """The realised orders of whole passes, shared data."""
    examples = np.concatenate([examples for examples, _ in calls])
    return examples[: len(examples) // num_examples * num_examples].reshape(-1, num_examples)


def test_gates_absence_and_skipped_microbatches_leave_permutations():
    """Every order is a permutation at every epoch's end, and the sums stay finite."""
    (data, weights), calls = problems.given(61), []
    data["x"][17] = np.nan
    changes = [{"round": r, "worker": 1, "present": r == 9} for r in (2, 9)]
    fields = {"nonfinite": "skip", "gate": gate.after(3), "epochs": 4}
    fields["ordering"] = recorded(ordering.d_grab(block_pairs=1), calls)
    fields["cluster"] = {"num_workers": 4, "changes": changes}
    result = problems.fit(data, weights, **fields)
    orders = orders_of(calls, 61)
    assert len(orders) == 4
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(61))
    assert not np.array_equal(orders[0], orders[1])
    assert np.isfinite(result.state.memory).all()
    assert np.abs(result.state.memory).max() > 0
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


def bounds(num_examples, **fields):
    """Of the order that a run at a learning rate of 0 leaves."""
    fields = {"optimizer": optax.sgd(0.0), "local": "virtual", **fields}
    with problems.run(num_examples, **fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
        return herding.Bounds(run)(state, np.array(report.read().quotas))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["d_grab", "pair_balance"])
def test_balancing_lowers_the_herding_bound(method, float64):
    """At a learning rate of 0 the gradients stay, and the bound halves until its floor."""
    order = made(method, block_pairs=2)
    found = bounds(480, epochs=6, ordering=order, quota={"max_microbatches": 2})
    assert found["inf_norm"] < found["random_inf_norm"] / 2
    assert found["two_norm"] < found["random_two_norm"] / 2


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_the_herding_bound_equals_the_reference(sharing, float64):
    data, weights = problems.classification(104), problems.initial_weights()
    states = []
    method = ordering.d_grab()

    def keep(state, examples, signs):
        states.append(method.place(state, examples, signs))
        return states[-1]

    order = method._replace(place=keep)
    found = bounds(104, epochs=1, ordering=order, data={"sharing": sharing}, quota="equal")
    gradients = example_gradients(data, weights, np.arange(104))
    if sharing == "shared":  # 4 workers, 8 microbatches of 4
        in_rounds = np.array_split(states[-1].order, [32, 64, 96])
    else:
        last = states[-WORKERS:]  # the closing commits of the four shards, each of 26
        orders_ = [
            shard[state.order] for shard, state in zip(private_shards(104), last, strict=True)
        ]
        cut = [np.array_split(order, [8, 16, 24]) for order in orders_]
        in_rounds = [np.concatenate(parts) for parts in zip(*cut, strict=True)]
    mean = gradients.mean(axis=0)
    prefixes = np.cumsum([(gradients[ids] - mean).sum(axis=0) for ids in in_rounds], axis=0)
    np.testing.assert_allclose(found["inf_norm"], np.abs(prefixes).max(), rtol=1e-8)
    np.testing.assert_allclose(found["two_norm"], np.linalg.norm(prefixes, axis=1).max(), rtol=1e-8)
    assert found["random_inf_norm"] > 0


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_a_round_in_which_nobody_finishes(local, tmp_path):
    lines = [{"quotas": [1] * 4, "microbatches_done": [int(r > 0)] * 4} for r in range(4)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"replay": str(path), "ordering": "d_grab", "budget": 4, "epochs": 1}
    result = problems.train(local=local, **fields)
    assert result.summary["examples_processed"] == 48


def test_on_one_device_the_running_sum_of_all_workers_is_kept_once():
    rows = {}
    for local in ("virtual", "stepped"):
        with problems.run(96, local=local, ordering="d_grab", quota="equal") as run:
            state = run.init()
            for _ in range(4):
                state, _ = run.round(state)
            rows[local] = np.asarray(state.train.memory)
    assert rows["virtual"].shape == (1, *rows["stepped"].shape[1:])
    np.testing.assert_allclose(rows["virtual"][0], rows["stepped"][2], rtol=1e-5, atol=1e-5)
    assert np.abs(rows["virtual"]).max() > 0
