"""Training with balanced orders against a slow reference: orders, signs and parameters."""

import json

import numpy as np
import optax
import pytest

import hetjax
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
    calls = []
    order = recorded(ordering.d_grab(block_pairs=1), calls)
    data = problems.classification(61, np.float32)
    data["x"][17] = np.nan
    result = problems.fit(
        data,
        problems.initial_weights(np.float32),
        epochs=4,
        nonfinite="skip",
        gate=gate.after(3),
        ordering={"method": order},
        cluster={
            "num_workers": 4,
            "changes": [
                {"round": 2, "worker": 1, "present": False},
                {"round": 9, "worker": 1, "present": True},
            ],
        },
    )
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
    with hetjax.Run(
        problems.softmax_loss,
        problems.initial_weights(),
        optax.sgd(0.0),
        problems.classification(num_examples),
        **{"workers": WORKERS, "microbatch_size": 4, "budget": 8, "local": "virtual", **fields},
    ) as run:
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


# A feed knows nothing of orders.


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_a_round_in_which_nobody_finishes(local, tmp_path):
    quotas = [[1, 1, 1, 1]] * 4
    done = [[0, 0, 0, 0], *quotas[1:]]
    lines = [
        json.dumps({"quotas": q, "microbatches_done": d}) for q, d in zip(quotas, done, strict=True)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = problems.fit(
        problems.classification(64, np.float32),
        problems.initial_weights(np.float32),
        local=local,
        epochs=1,
        budget=4,
        replay=str(tmp_path / "metrics.jsonl"),
        ordering={"method": "d_grab"},
    )
    assert result.summary["examples_processed"] == 48


def test_on_one_device_the_running_sum_of_all_workers_is_kept_once():
    fields = {"cluster": {"num_workers": 4}, "microbatch_size": 4, "budget": 8, "quota": "equal"}
    given = problems.softmax_loss, problems.initial_weights(np.float32), optax.sgd(0.1)
    rows = {}
    for local in ("virtual", "stepped"):
        data = problems.classification(96, np.float32)
        with hetjax.Run(*given, data, local=local, ordering="d_grab", **fields) as run:
            state = run.init()
            for _ in range(4):
                state, _ = run.round(state)
            rows[local] = np.asarray(state.train.memory)
    assert rows["virtual"].shape == (1, *rows["stepped"].shape[1:])
    np.testing.assert_allclose(rows["virtual"][0], rows["stepped"][2], rtol=1e-5, atol=1e-5)
    assert np.abs(rows["virtual"]).max() > 0
