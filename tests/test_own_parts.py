"""The user's own parts in runs: given, written down, gone on with, and refused."""

import json

import numpy as np
import pytest

import hetjax
from hetjax import gates, parts, quota, topology
from hetjax.cluster import emulate
from hetjax.zoo import config
from tests.own_parts import OWN, gate, order, reducer
from tests.rounds import problems

# --- The user's own, in runs ---

DATA, WEIGHTS = problems.classification(61, np.float32), problems.initial_weights(np.float32)
CLUSTER = emulate.EmulatedCluster((0.01, 0.02, 0.03, 0.04))


def fit(**fields):
    fields = {"epochs": 2, "cluster": CLUSTER, "local": "virtual", **fields}
    return problems.fit(DATA, WEIGHTS, **fields)


@pytest.mark.parametrize("local", ["stepped", "fused"])
@pytest.mark.parametrize("signed", [False, True])
def test_own_parts_train_together_and_alike_in_all_local_forms(local, signed, float64):
    fields = {name: own[-1 if signed else 0] for name, own in OWN.items()}
    if local == "fused":  # which has no gate
        del fields["gate"]
    speeds = (1.0, 2.0, 3.0, 4.0)
    cluster = {"num_workers": 4, "secs_per_microbatch": speeds, "clock": "virtual"}
    data, weights = problems.classification(61), problems.initial_weights()
    one, other = (
        problems.fit(data, weights, epochs=2, cluster=cluster, local=form, **fields)
        for form in (local, "virtual")
    )
    for result in (one, other):
        summary = result.summary
        assert (summary["examples_missing"], summary["examples_duplicated"]) == (0, 0)
        assert summary["examples_processed"] == 122
        closed = any(line["quotas"] != line["microbatches_done"] for line in result.history)
        assert closed == (local != "fused")
    assert [line["quotas"] for line in one.history] == [line["quotas"] for line in other.history]
    assert not np.array_equal(one.params, weights)
    np.testing.assert_allclose(one.params, other.params, rtol=1e-9)


def test_objects_names_and_dicts_are_the_same_run():
    policy, closing, pairs = quota.adaptive(min_gain=0.3), gates.quorum(5), pairs_of_one()
    mixing = topology.matcha(budget=0.7)
    on_ring = topology.matcha(budget=0.7, graph=topology.make_graph("ring", 4))
    path = "tests.test_own_parts:pairs_of_one"
    made = {  # of each part an object, a dict of its name and options, and one that has an object
        "quota": (
            policy,
            {"policy": "adaptive", "min_gain": 0.3},
            {"policy": policy, "max_microbatches": 0},
        ),
        "ordering": (pairs, {"method": "pair_balance", "block_pairs": 1}, path),
        "reducer": (mixing, {"name": "matcha", "budget": 0.7}, {"name": on_ring}),
        "gate": (closing, {"trigger": "quorum", "quorum": 5}, {"trigger": closing}),
    }
    first, *others = (fit(**{name: made[name][i] for name in made}, seed=3) for i in range(3))
    for run in others:
        np.testing.assert_array_equal(run.params, first.params)
        assert [x["quotas"] for x in run.history] == [x["quotas"] for x in first.history]


@parts.factory
def pairs_of_one() -> hetjax.ordering.Ordering:
    """`pair_balance` with blocks of one pair, for a name that is an import path."""
    return hetjax.ordering.pair_balance(block_pairs=1)


# --- What is written down, and a run that goes on ---


def stopping(round):
    return problems.press_ctrl_c(lambda line: line.round == round)


def test_a_run_goes_on_with_its_own_parts_and_no_others(tmp_path):
    own = {"ordering": order.rotated(by=3), "reducer": reducer.rounded_sum()}
    fit(workdir=tmp_path, callbacks=[stopping(2)], **own)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ordering"]["method"] == "tests.own_parts.order:rotated"
    assert written["ordering"]["by"] == 3
    assert written["reducer"]["name"] == "tests.own_parts.reducer:rounded_sum"
    for other in ({"ordering": order.rotated(by=4)}, {"reducer": "all_reduce"}):
        with pytest.raises(ValueError, match="belongs to another configuration"):
            fit(workdir=tmp_path, **{**own, **other})
    result = fit(workdir=tmp_path, **own)
    whole = fit(**own)
    np.testing.assert_array_equal(result.params, whole.params)


def test_a_closure_is_named_and_must_be_given_again(tmp_path):
    def own():
        made = order.rotated()
        return made._replace(place=lambda *arguments: made.place(*arguments))

    fit(workdir=tmp_path, callbacks=[stopping(2)], ordering=own())
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ordering"]["method"] == "given: tests.own_parts.order:rotated.<locals>.init"
    with pytest.raises(ValueError, match=r"could not be written down.*Give the same object again"):
        fit(workdir=tmp_path)
    with pytest.raises(ValueError, match=r"could not be written down.*Give the object again"):
        config.from_json(tmp_path / "config.json")
    result = fit(workdir=tmp_path, ordering=own())
    assert result.summary["examples_processed"] == 122


# --- What bad input gets ---


def test_arguments_of_a_factory_are_checked():
    for call, message in (
        (lambda: quota.adaptive(alarm="loud"), "adaptive: alarm: got 'loud', must be a finite"),
        (lambda: quota.adaptive(min_gian=1.0), "min_gian: .*Did you mean .*min_gain"),
        (lambda: gate.after(), "after: most: missing, must be an integer of at least 1"),
        (lambda: topology.matcha(budget=2), "matcha: budget: got 2, must be a finite number above"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
