"""Runs of several real processes: the same results as one process, with every part."""

import functools
import json

import jax
import numpy as np
import pytest

from tests.once import once
from tests.rounds import gangs, problems, process_cases

SPEEDS = [1.0, 1.5, 2.0, 4.0]
VIRTUAL = {"num_workers": 4, "secs_per_microbatch": SPEEDS, "clock": "virtual"}
EVAL = {"epochs": 3, "cluster": VIRTUAL, "quota": {"policy": "adaptive"}}
RING, COMPLETE = ({"name": "d_psgd", "graph": graph} for graph in ("ring", "complete"))
CASES = {
    "all_reduce": {},
    "d_psgd": {"reducer": RING},
    "matcha": {"reducer": {"name": "matcha", "graph": "ring"}},
    "d_grab": {"ordering": {"method": "d_grab"}},
    "d_grab_exact": {"ordering": {"method": "d_grab_exact"}},
    "pair_balance": {"ordering": "pair_balance", "reducer": COMPLETE},
    "private": {"data": {"sharing": "private"}},
    "streamed": {"data": {"feed": "streamed"}},
    "fused": {"local": "fused"},
    "first": {"gate": {"trigger": "first"}},
    "quorum": {"gate": {"trigger": "quorum", "quorum": 4}},
    "weighted_gossip": {"reducer": RING, "loss_fn": "weighted_softmax_loss"},
    "stateful": {"loss_fn": "stateful_softmax_loss", "ema": 0.9},
    "batch": {"loss_fn": "contrastive_loss"},
    "varying": {"loss_fn": "varying_softmax_loss"},
    "measured": {"loss_fn": "measured_softmax_loss"},
    "local_steps": {"rule": "local_steps", "loss_fn": "weighted_softmax_loss"},
    "fednova": {"rule": "fednova", "loss_fn": "stateful_softmax_loss"},
    "fednova_private": {"rule": "fednova", "data": {"sharing": "private"}},
}
OWN = {
    "own_parts": {
        "quota": {"policy": "tests.own_parts.policy:one_at_a_time", "least": 2},
        "ordering": {"method": "tests.own_parts.signed_order:harder_first"},
        "reducer": {"name": "tests.own_parts.reducer:rounded_sum"},
        "gate": {"trigger": "tests.own_parts.gate:after", "most": 6},
    },
    "own_rule": {"rule": "local_sgd", "ordering": "tests.own_parts.order:rotated"},
}
LOCAL_STEPS = ("local_steps", "fednova", "fednova_private")
PRODUCT = {"hessian_product": {"rule": "hessian_product", "loss_fn": "weighted_softmax_loss"}}
CUT = ("own_rule", "local_steps", "d_grab_exact", "pair_balance", "private")
WALL = {"num_workers": 4, "secs_per_microbatch": [0.02, 0.02, 0.02, 0.2]}
LIVE = {
    "live_first": {"gate": {"trigger": "first"}},
    "live_quorum": {"gate": {"trigger": "quorum", "quorum": 5}},
    "live_deadline": {"gate": {"trigger": "deadline", "deadline_secs": 0.05}},
    "live_own": {"gate": {"trigger": "tests.own_parts.gate:after", "most": 5}},
}


def run_gang(cases, directory, num_processes, **variables):
    """Trains `cases` in real processes; {name: (params, summary, history)}."""
    directory.mkdir()
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    given = num_processes, directory, str(path), str(directory)
    told = gangs.run("tests.rounds.process_cases", *given, **variables)
    assert [code for code, _ in told] == [0] * num_processes, "\n".join(said for _, said in told)
    found = {}
    for name in cases:
        told = json.loads((directory / f"{name}.json").read_text())
        arrays = np.load(directory / f"{name}.npz")
        found[name] = arrays["params"], told["summary"], told["history"]
    return found


ALL_CASES = pytest.mark.slow  # trained by one gang, whichever of them a test looks at


@pytest.fixture(scope="module")
def gang(tmp_path_factory):
    return once(tmp_path_factory, "gang", train_gang)


def train_gang(directory):
    named = {**CASES, **OWN, **PRODUCT}
    cases = {name: {**EVAL, **fields} for name, fields in named.items()}
    of_live = {"epochs": 2, "cluster": WALL, "quota": "equal"}
    live, cut = {name: {**of_live, **fields} for name, fields in LIVE.items()}, {}
    for name in CUT:
        kept = {"workdir": str(directory / name), "checkpoint": {"every_rounds": 2}}
        fields = {**cases[name], **kept}
        cut[f"{name}_begun"] = {**fields, "last_round": 7}
        cut[f"{name}_resumed"] = fields
    found = run_gang({**cases, **live, **cut}, directory / "out", 2, HETJAX_SHARED_MEMORY="off")
    assert not any(summary["by_sockets"] for _, summary, _ in found.values())
    return found


SHARED = (  # what sums go through memory in another way
    *("all_reduce", "d_grab_exact", "private", "fused", "first", "d_psgd"),
    *("weighted_gossip", "stateful", "batch", "varying", "measured"),
    *LOCAL_STEPS,
)


@pytest.fixture(scope="module")
def shared_gang(tmp_path_factory):
    """As it is by itself: the gradients are added up in memory."""
    return once(tmp_path_factory, "shared_gang", train_shared_gang)


def train_shared_gang(directory):
    cases = {name: {**EVAL, **CASES[name]} for name in SHARED}
    cases |= {name: {**EVAL, **fields} for name, fields in {**OWN, **PRODUCT}.items()}
    even = {"num_workers": 4, "secs_per_microbatch": [0.05] * 4}  # long beside a busy machine's
    cases["slow_update"] = {**EVAL, "cluster": even, "update_secs": [0, 0.15]}
    cases["slow_update_of_0"] = {**EVAL, "cluster": even, "update_secs": [0.15, 0]}
    cases["coordinated"] = {**EVAL, **CASES["d_grab"], "epochs": 1, "cluster": even}
    found = run_gang(cases, directory / "out", 2)
    assert all(summary["by_sockets"] for _, summary, _ in found.values())
    return found


@functools.cache
def of_one_process(name):
    fields = process_cases.resolved({**EVAL, **{**CASES, **OWN}[name]})
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam asks for it
        return problems.train(203, **fields)


@ALL_CASES
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "gang") for name in [*CASES, *OWN]]
    + [(name, "shared_gang") for name in [*SHARED, *OWN]],
)
def test_two_processes_train_as_one_does(name, form, request, float64):
    params, summary, history = request.getfixturevalue(form)[name]
    alone = of_one_process(name)
    for key in ("quotas", "microbatches_done", "examples_counted", "compute_secs", "bytes_sent"):
        assert [line[key] for line in history] == [line[key] for line in alone.history], key
    expected = process_cases.trained(alone)
    exact = name in (*OWN, *LOCAL_STEPS)
    np.testing.assert_allclose(params, expected, rtol=1e-12 if exact else 1e-10)
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["train_loss"] == pytest.approx(alone.summary["train_loss"], rel=1e-8)
    metrics = [list(line.get("metrics", {}).values()) for line in history]
    expected = [list(line.get("metrics", {}).values()) for line in alone.history]
    np.testing.assert_allclose(metrics, expected, rtol=1e-8)  # as JSON has them
    assert all(metrics) == name.startswith("measured")


@ALL_CASES
@pytest.mark.parametrize("form", ["gang", "shared_gang"])
def test_rounds_without_update_find_the_same_in_two_processes(form, request, float64):
    found, _, history = request.getfixturevalue(form)["hessian_product"]
    fields = process_cases.resolved({**EVAL, **PRODUCT["hessian_product"]})
    alone, quotas = process_cases.products(*problems.given(203), **fields)
    assert [line["quotas"] for line in history] == quotas
    assert min(min(each) for each in quotas) < max(max(each) for each in quotas)
    np.testing.assert_allclose(found, alone, rtol=1e-12, atol=1e-14)


@ALL_CASES
def test_who_needs_longer_for_the_update_gets_less(shared_gang):
    """Where all have 2 microbatches, those of process 1 take 0.25 s, and where it has 1, 0.20 s."""
    _, summary, history = shared_gang["slow_update"]
    quotas = np.array([line["quotas"] for line in history if line["full"]])
    assert quotas[0].tolist() == [2, 2, 2, 2]
    assert np.median(quotas[:, :2].sum(axis=1)) >= 6, quotas  # the guard may try equal split again
    assert min(line["host_secs"][3] for line in history) > 0.15
    longest, waiting = [], []
    for line in history:
        busy = np.add(line["compute_secs"], line["host_secs"])
        longest.append(busy.max())
        waiting.append(np.mean(busy.max() - busy) / busy.max())
        assert line["waiting_fraction"] == pytest.approx(waiting[-1], abs=1e-6)
    full = [line["full"] for line in history]
    mean = np.average(np.array(waiting)[full], weights=np.array(longest)[full])
    assert summary["waiting_fraction"] == pytest.approx(mean, abs=1e-6)
    _, _, history = shared_gang["coordinated"]  # whose update waits for the others
    assert not any("host_secs" in line for line in history)


@ALL_CASES
def test_who_needs_the_least_adds_up_for_all(shared_gang):
    _, summary, history = shared_gang["slow_update"]  # of process 1
    assert summary["times_added"] > 0.9 * len(history)
    _, summary, history = shared_gang["slow_update_of_0"]
    assert summary["times_added"] < 0.1 * len(history) + 3
    for line in history:  # of process 0, whose update takes 0.15 s
        assert 0.15 < line["exchange_secs"] < line["round_secs"]
    of_full = [line["exchange_secs"] for line in history if line["full"]]
    assert summary["exchange_secs_mean"] == pytest.approx(np.mean(of_full), rel=1e-6)


@ALL_CASES
@pytest.mark.parametrize("name", CUT)
def test_a_run_of_several_processes_goes_on(name, gang, tmp_path):
    whole, _, rounds = gang[name]
    _, begun, _ = gang[f"{name}_begun"]
    params, summary, history = gang[f"{name}_resumed"]
    assert begun["stopped_by"] == "SIGINT"
    assert begun["rounds"] < summary["rounds"] == len(rounds)
    np.testing.assert_array_equal(params, whole)
    assert [line["loss"] for line in history] == [line["loss"] for line in rounds]


def test_all_processes_of_a_resumed_run_count_the_same(tmp_path):
    fields = {**CASES["all_reduce"], "epochs": 2, "workdir": str(tmp_path / "run")}
    cases = {"begun": {**fields, "last_round": 3}, "resumed": fields}
    _, mine, history = run_gang(cases, tmp_path / "out", 2)["resumed"]
    other = json.loads((tmp_path / "out" / "resumed.1.json").read_text())
    counts = [name for name in mine if name.startswith("examples_") and name[9:] != "per_sec"]
    counts += ["rounds", "epochs", "train_loss", "quotas", "bytes_sent_per_round", "resumed"]
    assert {n: other["summary"][n] for n in counts} == {n: mine[n] for n in counts}
    assert [line["round"] for line in other["history"]] == list(range(len(history)))


@ALL_CASES
@pytest.mark.parametrize("name", LIVE)
def test_a_gate_closes_the_rounds_of_all_processes(name, gang):
    _, summary, history = gang[name]
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["examples_processed"] == 2 * 203
    assert any(sum(line["microbatches_done"]) < sum(line["quotas"]) for line in history)
    slow = [line["microbatches_done"][3] for line in history[:-1]]
    assert min(slow) == 1  # the first microbatch is always begun, and finished
