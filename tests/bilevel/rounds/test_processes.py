"""Bilevel runs of two real processes: what one device gives, and the same ledger."""

import json
import re

import numpy as np
import optax
import pytest

from tests.bilevel.rounds import problems, process_cases
from tests.once import once
from tests.rounds import gangs

pytestmark = pytest.mark.slow
VIRTUAL = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
CASES = {
    "value_gap": {"kind": "value_gap"},
    "cg": {"kind": "cg"},
    "reverse": {"kind": "reverse", "local": "fused"},
    "private": {"kind": "cg", "data": {"sharing": "private"}},
    "gated": {"kind": "value_gap", "gate": "first", "budget": 6},
    "gossip": {"kind": "value_gap", "reducer": "d_psgd"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return once(tmp_path_factory, "bilevel_gang", train_gang)


def train_gang(directory):
    common = {"steps": 3, "cluster": VIRTUAL, "quota": "adaptive"}
    cases = {name: {**common, **fields} for name, fields in CASES.items()}
    workdir = {"workdir": str(directory / "cut"), "checkpoint": {"every_rounds": 1}}
    cases["begun"] = {**cases["gated"], **workdir, "signal_at": 0}
    cases["resumed"] = {**cases["gated"], **workdir}
    for place in process_cases.LATE:
        cases[f"late to {place}"] = {**common, "kind": "value_gap", "reducer": "d_psgd", "steps": 1}
        cases[f"late to {place}"]["late"] = place
    cases["ended"] = {**cases["gated"], "last_step": 0, "steps": 4}
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    told = gangs.run("tests.bilevel.rounds.process_cases", 2, directory, str(path), str(directory))
    assert [code for code, _ in told] == [0, 0], "\n".join(said for _, said in told)
    results = {"said": told[0][1]}
    for name in cases:
        leaves = list(np.load(directory / f"{name}.npz").values())
        results[name] = leaves, json.loads((directory / f"{name}.json").read_text())
    return results


@pytest.mark.parametrize("name", ["value_gap", "cg", "reverse"])
def test_two_processes_give_what_one_device_gives(float64, found, name):
    problem, x, y, estimator = problems.given(name)
    tx = optax.sgd(0.2, momentum=0.5)
    alone_x, alone_y, _ = problems.alone(problem, x, y, estimator, tx, problems.whole(), 3)
    leaves, told = found[name]
    expected = {"x": {"ridge": alone_x["ridge"], "weight": alone_x["weight"].values}, "y": alone_y}
    assert problems.distance(expected, leaves) < 1e-12
    assert told["summary"]["levels"]["lower"]["examples_missing"] == 0
    assert len(told["history"]) == 3
    assert "test_loss" in told["summary"]


@pytest.mark.parametrize("name", ["private", "gated", "gossip"])
def test_each_example_once_a_pass(found, name):
    for counted in found[name][1]["summary"]["levels"].values():
        assert counted["examples_missing"] == counted["examples_duplicated"] == 0


@pytest.mark.parametrize("place", process_cases.LATE)
def test_who_is_late_to_what_is_between_the_rounds_is_named(found, place):
    line = rf"process 0 has waited \d+ s for process 1 \(pid .*\) to {place}$"
    assert re.search(line, found["said"], re.MULTILINE)


def test_a_callback_of_one_process_ends_the_run_of_both(found):
    summary = found["ended"][1]["summary"]
    assert summary["outer_steps"] == 2  # the other process hears of it in the next step
    assert summary["stopped_by"].startswith("callback")


def test_a_run_that_was_stopped_goes_on_bit_for_bit(found):
    begun = found["begun"][1]["summary"]
    assert (begun["outer_steps"], begun["stopped_by"]) == (2, "SIGTERM")
    assert [each["round"] for each in found["resumed"][1]["summary"]["resumed"]] == [2]
    (whole, told), (again, told_again) = found["gated"], found["resumed"]
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))
    assert told["summary"]["levels"] == told_again["summary"]["levels"]
