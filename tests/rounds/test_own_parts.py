"""Processes with parts of the data of their own train as one device does on all of them."""

import itertools
import json

import numpy as np
import pytest

from tests import oracles
from tests.once import once
from tests.rounds import gangs, own_part_cases, problems

SIZES = [50, 83]
SLOW = {"num_workers": 4, "secs_per_microbatch": [1, 1, 2, 3], "clock": "virtual"}
ADAPTIVE = {"epochs": 3, "cluster": SLOW, "data": {"weighting": "example"}}
STATIC = {"epochs": 3, "quota": {"policy": "static", "proportions": [4, 3, 2, 1]}}
STREAMED = {**STATIC, "data": {"weighting": "example"}}
STEPS = {
    "arrays": {},
    "fused": {"fields": {"local": "fused"}},
    "read": {"form": "list", "fields": {"data": {"feed": "streamed", "weighting": "example"}}},
    "gated": {"fields": {"gate": {"trigger": "quorum", "quorum": 5}}},
    "ordered": {"fields": {"ordering": "pair_balance"}},
    "stream": {"form": "stream"},
    "short": {"form": "stream", "comes": [71, 10**9]},
    "by shard": {"fields": {"data": {"weighting": "shard"}}},
}
CUT = {"cut arrays": {"fields": STATIC}, "cut stream": {"form": "stream", "fields": STREAMED}}
REFUSED = {
    "few": ({"sizes": [1, 8]}, "data.sharing: process 0 gives its 2 workers, 1 examples"),
    "weighting": ({"form": "stream"}, "data.weighting: got 'shard'; streams take"),
}


def case_of(*, sizes=SIZES, fields=None, **more):
    fields = dict(fields or {"epochs": 1})
    fields["data"] = {"sharing": "process_local", **fields.get("data", {})}
    return {"sizes": sizes, "fields": fields, **more}


def run(cases, directory, num_processes=2, dies=False):
    """{name: what process 0 left, what process 1 left}."""
    directory.mkdir()
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    module = "tests.rounds.own_part_cases"
    told = gangs.run(module, num_processes, directory, str(path), str(directory))
    said = "\n".join(text for _, text in told)
    assert dies == any(code for code, _ in told), said
    found = {}
    for name in cases:
        files = [directory / f"{name}.{process}.json" for process in range(num_processes)]
        if all(file.exists() for file in files):
            params = [np.load(file.with_suffix(".npz"))["params"] for file in files]
            np.testing.assert_array_equal(params, params[:1] * num_processes)
            found[name] = params[0], [json.loads(file.read_text()) for file in files]
    return found, said


@pytest.fixture(scope="module")
def gang(tmp_path_factory):
    return once(tmp_path_factory, "own_parts", train)


def train(directory):
    cases = {}
    for name, more in STEPS.items():
        fields = {**ADAPTIVE, **more.get("fields", {})}
        cases[name] = case_of(**{**more, "fields": fields, "steps": True})
    cases["fit"] = case_of(fields={**ADAPTIVE, "data": {}})
    cases |= {name: case_of(**more) for name, (more, _) in REFUSED.items()}
    cases |= {name: case_of(**more) for name, more in CUT.items()}
    found, said = run(cases, directory / "out")
    return found | {"said": said}


def weights_after(rounds, shares=None):
    """Momentum SGD on one device: on each round's pooled batch, or by shares of the shards."""
    data, weights = own_part_cases.pooled(SIZES), problems.initial_weights()
    velocity = np.zeros_like(weights)
    for of_workers in rounds:
        batches = [list(itertools.chain(*of_workers))] if shares is None else of_workers
        velocity *= 0.9
        for ids, share in zip(batches, shares or [1.0], strict=True):
            given = data["x"], data["y"], weights, [ids]
            one, _ = oracles.softmax_regression(*given, learning_rate=1.0, momentum=0.0)
            velocity += share * (weights - one)
        weights = weights - 0.3 * velocity
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_two_processes_with_parts_of_their_own_match_the_pooled_batch(name, gang):
    params, (first, second) = gang[name]
    rounds = first["done"]
    assert rounds == second["done"]
    by_shard = np.array([25, 25, 42, 41]) / sum(SIZES)
    expected = weights_after(rounds, list(by_shard) if name == "by shard" else None)
    np.testing.assert_allclose(params, expected, rtol=1e-12)
    assert len({tuple(map(len, of_workers)) for of_workers in rounds}) > 2
    done = set(itertools.chain(*itertools.chain(*rounds)))
    assert done == set(range(sum(SIZES))) or name == "short"
    is_streamed = STEPS[name].get("form") == "stream"  # whose workers share their process's part
    for workers in [[0, 1], [2, 3]] if is_streamed else [[0], [1], [2], [3]]:
        done = [ids for of_workers in rounds for worker in workers for ids in of_workers[worker]]
        assert np.ptp(np.unique(done, return_counts=True)[1]) <= 1
        assert {each < SIZES[0] for each in done} == {workers[0] < 2}
    if name == "short":
        done = [ids for of_workers in rounds for ids in of_workers[0] + of_workers[1]]
        assert done == [*range(50), *range(20)]  # 21 came; one is no microbatch
        assert "ended in epoch 1: 21 examples of it came" in gang["said"]


@pytest.mark.slow
def test_a_run_on_parts_of_processes_counts_each_example_once(gang):
    _, told = gang["fit"]
    for each in told:
        summary = each["summary"]
        assert summary["examples_missing"] == summary["examples_duplicated"] == 0
        assert summary["examples_processed"] >= 3 * sum(SIZES)
        assert len({tuple(line["quotas"]) for line in each["history"]}) > 1
    first, second = ([line["loss"] for line in each["history"]] for each in told)
    assert first == second
    assert "test_loss" in told[0]["summary"]
    assert "process 0 evaluates the examples that it was given, and no others" in gang["said"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_parts_of_processes_cannot_have_is_refused(name, gang):
    for told in gang[name][1]:
        assert REFUSED[name][1] in told["refused"]


CHANGED = {
    "changed": ({"changed": 1}, "the data hold other values"),
    "moved": ({"sizes": [51, 82]}, "have 2 processes' 51 + 82 examples, and had 2 processes' 50"),
    "more": ({"sizes": [50, 40, 40, 3]}, "have 4 processes' 50 + 40 + 40 + 3 examples, and had 2"),
}


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_parts_to_the_bit(gang, tmp_path):
    cases = {}
    for name, more in CUT.items():
        kept = {"workdir": str(tmp_path / name), "checkpoint": {"every_rounds": 2}}
        cases[name] = case_of(**{**more, "fields": {**more["fields"], **kept}})
    stopped = {"cut stream": {"last_round": 5}, "cut arrays": {"killed": 5}}
    begun = {name: cases[name] | more for name, more in stopped.items()}
    run(begun, tmp_path / "begun", dies=True)
    for name, (more, sentence) in CHANGED.items():
        case = {"cut arrays": cases["cut arrays"] | more | {"raises": True}}
        _, said = run(case, tmp_path / name, len(case["cut arrays"]["sizes"]), dies=True)
        assert sentence in said
    found, _ = run(cases, tmp_path / "resumed")
    for name in CUT:
        (whole, (told, _)), (params, (resumed, _)) = gang[name], found[name]
        assert resumed["summary"]["resumed"]
        np.testing.assert_array_equal(params, whole)
        losses = [[line["loss"] for line in each["history"]] for each in (told, resumed)]
        assert losses[0] == losses[1]
