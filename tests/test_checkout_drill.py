"""The drill of two checkouts: nothing is found where they are one, and the least difference is."""

import copy
import hashlib
import json
import os
import pathlib

import numpy as np
import pytest

from experiments.drills import checkout_arms, checkout_grid, checkout_outcomes, checkouts
from experiments.drills.checkouts import Result
from tests.once import once

pytestmark = pytest.mark.slow

ALONE = "1/stepped/d_grab/ring/shared/deadline"
CACHE = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
TOGETHER = "2/stepped/pair_balance/d_psgd/shared/deadline"


@pytest.fixture(scope="module")
def arms():
    named = {arm["name"]: arm for arm in checkout_arms.arms()}
    return [named[ALONE], named[TOGETHER]]


@pytest.fixture(scope="module")
def directory(arms, tmp_path_factory):
    """Both sides of this checkout against itself."""

    def run(directory):
        root = checkouts.ROOT
        results = checkouts.run_both(arms, root, root, directory)
        text, is_good = checkouts.table(results, {})
        assert is_good, text
        assert "| all | 2 | 2 | 2 |" in text
        return directory

    return once(tmp_path_factory, "checkouts", run)


@pytest.fixture
def outcome(directory):
    return checkout_outcomes.read(directory / "before" / ALONE)


def test_arms_are_every_combination_that_works_together():
    arms = checkout_grid.arms()
    names = [arm["name"].split("/") for arm in arms]
    assert len({tuple(name) for name in names}) == len(arms)
    pairs = {(ordering, reducer) for _, _, ordering, reducer, *_ in names}
    assert {tuple(c[1:]) for c in checkout_grid.faults.combinations()} == pairs
    for processes, local, sharings in (
        ("1", "stepped", 2),
        ("1", "fused", 2),
        ("1", "virtual", 2),
        ("2", "stepped", 1),
        ("2", "fused", 1),
    ):
        own = [n for n in names if n[:2] == [processes, local]]
        assert len(own) == len(pairs) * sharings
        assert {n[4] for n in own} == {"shared", "private"}
        assert len({n[5] for n in own}) == (2 if local == "fused" else 5)


def test_what_a_directory_has_is_not_run_again(arms, directory, monkeypatch, capsys):
    root, asked = checkouts.ROOT, []
    monkeypatch.setattr(checkouts, "run_checkout", lambda _, some, *rest, **named: asked.append(1))
    assert all(r.bit_equal for r in checkouts.run_both(arms, root, root, directory))
    assert not asked
    assert "2 of 2, equal: 2" in capsys.readouterr().err


def test_a_directory_keeps_the_outcomes_of_one_pair(tmp_path):
    checkouts._hold(tmp_path / "kept", ["a", "b"])
    checkouts._hold(tmp_path / "kept", ["a", "b"])
    with pytest.raises(SystemExit, match="give another for"):
        checkouts._hold(tmp_path / "kept", ["a", "c"])
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(SystemExit, match="something else"):
        checkouts._hold(tmp_path, ["a", "b"])


def test_the_runs_are_cut_and_end_a_pass(outcome):
    assert len(outcome.rounds) >= 5
    assert outcome.rounds[-1]["epoch"] >= 2
    assert len(outcome.orders) == len(outcome.queues) == len(outcome.ledger) >= 5
    order, realised, signs = outcome.orders[0]
    assert sorted(order.tolist()) == list(range(51))
    assert len(realised) == len(signs) > 0
    assert set(signs.tolist()) <= {-1, 0, 1}
    steps = range(1, len(outcome.orders) + 1)
    assert all(f"{part} of {n}" in outcome.arrays for n in steps for part in ("params", "memory"))


def test_another_seed_is_found(arms, directory, tmp_path):
    other = copy.deepcopy(arms[:1])
    other[0]["fields"]["seed"] = 1
    checkouts.run_checkout(checkouts.ROOT, other, tmp_path, cache=CACHE)
    (result,) = checkouts.compare(arms[:1], directory / "before", tmp_path)
    assert not result.identical
    assert "orders[0][0]" in result.told
    assert not checkouts.table([result], {})[1]


def test_an_arm_that_fails_says_why(arms, directory, tmp_path):
    other = copy.deepcopy(arms[:1])
    other[0]["fields"]["budget"] = 0
    checkouts.run_checkout(checkouts.ROOT, other, tmp_path, cache=CACHE)
    (result,) = checkouts.compare(arms[:1], directory / "before", tmp_path)
    assert not result.identical
    assert result.told.startswith("after: Traceback")
    assert "budget: got 0" in result.told


def test_a_flipped_sign_is_found(outcome):
    other = copy.deepcopy(outcome)
    other.orders[2][2][0] *= -1
    assert checkout_outcomes.differences(outcome, other) == ["orders[2][2]"]


def test_the_least_bit_is_found(outcome):
    other = copy.deepcopy(outcome)
    name = "params of 3"
    leaf = other.arrays[name][0]
    leaf.flat[0] = np.nextafter(leaf.flat[0], np.float32(np.inf))
    assert checkout_outcomes.differences(outcome, other) == [f"arrays[{name}][0]"]
    assert 0 < checkout_outcomes.largest_gap(outcome, other) < 1e-6


def test_differences_of_rounds_queues_ledger_and_losses_are_found(outcome):
    assert checkout_outcomes.differences(outcome, copy.deepcopy(outcome)) == []
    other = copy.deepcopy(outcome)
    other.rounds[1]["quotas"][2] += 1
    other.queues[3][0] = other.queues[3][0][::-1]
    other.ledger[0][0][5] += 1
    other.counts["examples_missing"] = 1
    other.numbers[4]["loss"] += 1e-8
    assert checkout_outcomes.differences(outcome, other) == [
        "rounds[1][quotas][2]",
        "queues[3][0]",
        "ledger[0][0]",
        "counts[examples_missing]",
        "numbers[4][loss]",
    ]
    shorter = outcome._replace(rounds=outcome.rounds[:-1])
    assert "of them" in checkout_outcomes.differences(outcome, shorter)[0]


ARRAYS = {
    "train/params/out": np.ones((3, 2), np.float32),
    "train/opt_state/0/trace/out": np.zeros((3, 2), np.float32),
    "rounds/ledger/counts": np.array([1, 0, 1], np.int32),
}


def read(arrays):
    outcome = checkout_outcomes.Outcome([], [], [], [], {}, [], {})
    checkout_outcomes.add_checkpoint(outcome, 1, ARRAYS | arrays)
    return outcome


def test_a_queue_with_a_head_is_what_is_left_of_a_pass():
    order = np.array([2, 0, 1], np.int32)
    first = {"rounds/passes/0/state/order": order, "rounds/passes/0/remaining": order[1:]}
    second = {
        "stream/passes/0/state/order": order,
        "stream/passes/0/queue": order,
        "stream/passes/0/head": np.array(1),
    }
    assert checkout_outcomes.differences(read(first), read(second)) == []
    second["stream/passes/0/head"] = np.array(2)
    assert checkout_outcomes.differences(read(first), read(second)) == ["queues[0][0]"]


def test_a_checkpoint_that_lacks_what_is_compared_is_refused():
    with pytest.raises(ValueError, match="has no orders"):
        read({})
    with pytest.raises(ValueError, match="has no queues"):
        read({"rounds/passes/0/state/order": np.arange(3)})


def test_rounding_is_named_and_more_fails():
    name = "1/fused/grab/ring/shared/"
    arms = [{"name": f"{name}{letter}", "processes": 1} for letter in "abc"]
    results = [
        Result(arms[0], True, True),
        Result(arms[1], True, False, "arrays[params of 1][0]"),
        Result(arms[2], True, False, "numbers[0][loss]"),
    ]
    text, is_good = checkouts.table(results[:2], {arms[1]["name"]: 1e-14})
    assert is_good
    assert f"rounding: {arms[1]['name']} (float64: largest relative gap 1.0e-14)" in text
    gaps = {arms[1]["name"]: 1e-14, arms[2]["name"]: 1e-9}
    text, is_good = checkouts.table(results, gaps)
    assert not is_good
    assert f"FAILED: {arms[2]['name']}" in text
    assert "| fused, 1 process | 3 | 3 | 1 |" in text


# Kinds of arms beside runs of `fit`

KINDS = (
    "bilevel/1/virtual/value_gap/matcha/private/static",
    "loop/1/virtual/update/d_psgd/shared/adaptive",
    "blocks/1/virtual/d_grab/ring/private/static",
    "sets/1/virtual/test_perplexity/matcha/shared/first",
    "weights/1/virtual/varying/d_psgd/private/quorum",
    "nonfinite/1/virtual/spoiled/d_psgd/private/quorum",
    "replay/1/virtual/d_grab/ring/shared/quorum/short",
    "workdir/1/virtual/pair_balance/d_psgd/private/quorum",
)


@pytest.fixture(scope="module")
def of_kinds():
    named = {arm["name"]: arm for arm in checkout_arms.arms()}
    return [named[name] for name in KINDS]


@pytest.fixture(scope="module")
def kinds_directory(of_kinds, tmp_path_factory):
    """One side, of this checkout."""

    def run(directory):
        checkouts.run_checkout(checkouts.ROOT, of_kinds, directory / "before", cache=CACHE)
        return directory

    return once(tmp_path_factory, "kinds", run)


@pytest.fixture(params=KINDS, ids=[name.split("/")[0] for name in KINDS])
def of_kind(request, kinds_directory):
    return checkout_outcomes.read(kinds_directory / "before" / request.param)


def test_every_kind_has_an_arm_here():
    kinds = {arm["name"].split("/")[0] for arm in checkout_arms.arms()} - {"1", "2"}
    assert kinds == {name.split("/")[0] for name in KINDS}
    names = [arm["name"] for arm in checkout_arms.arms()]
    assert len(set(names)) == len(names)


def test_the_least_bit_is_found_in_every_kind(of_kind):
    """In each array that it has, and in each number and count of each round."""
    assert checkout_outcomes.differences(of_kind, copy.deepcopy(of_kind)) == []
    other = copy.deepcopy(of_kind)
    for name, leaves in other.arrays.items():
        for index, leaf in enumerate(leaves):
            if leaf.size:
                leaves[index] = np.array(leaf)
                leaves[index].reshape(-1).view(np.uint8)[-1] ^= 1
                found = checkout_outcomes.differences(of_kind, other)
                assert found == [f"arrays[{name}][{index}]"]
                leaves[index] = leaf
    other = copy.deepcopy(of_kind)
    other.rounds[-1]["quotas" if "quotas" in other.rounds[-1] else "rounds"] = None
    other.numbers[0]["loss" if "loss" in other.numbers[0] else "upper_loss"] = 7.0
    found = checkout_outcomes.differences(of_kind, other)
    assert [text.partition("[")[0] for text in found] == ["rounds", "numbers"]


def read_kind(directory, kind):
    name = next(name for name in KINDS if name.startswith(kind))
    return checkout_outcomes.read(directory / "before" / name)


def test_a_bilevel_arm_has_rounds_of_both_levels_and_every_part_of_its_state(kinds_directory):
    outcome = read_kind(kinds_directory, "bilevel")
    assert {line.get("level") for line in outcome.rounds} == {None, "upper", "lower"}
    assert outcome.counts["resumed"] == [2]
    assert len(outcome.orders) == len(outcome.queues) == len(outcome.ledger) == 2 * 3
    for part in ("x", "opt", "kept", "train/params", "best_params"):
        assert f"{part} of 3" in outcome.arrays
    other = copy.deepcopy(outcome)
    other.ledger[1][-1][4] += 1  # a revisit
    other.orders[3][0][:2] = other.orders[3][0][1::-1]
    assert [text.partition("[")[0] for text in checkout_outcomes.differences(outcome, other)] == [
        "orders",
        "ledger",
    ]


def test_a_loop_has_updates_products_and_products_of_a_held_batch(kinds_directory):
    outcome = read_kind(kinds_directory, "loop")
    assert len(outcome.rounds) == 9
    updated = [f"mean of {index}/0" not in outcome.arrays for index in range(9)]
    assert updated == [True, False, False] * 3
    held, again = (outcome.arrays[f"done of {index}/0"][0] for index in (1, 2))
    assert sorted(held[held >= 0].tolist()) == sorted(again[again >= 0].tolist())
    assert "own of 1/0" in outcome.arrays


def test_the_arms_do_what_they_are_for(kinds_directory):
    sets = read_kind(kinds_directory, "sets")
    assert sets.counts["judged_by"] == "test_perplexity"
    assert {"val_accuracy", "test_weighted"} <= sets.numbers[-1].keys()
    spoiled = read_kind(kinds_directory, "nonfinite")
    assert sum(line["skipped_examples"] for line in spoiled.rounds) > 0
    short = read_kind(kinds_directory, "replay")
    assert len(short.rounds) == 4
    assert short.counts["interrupted"]


def test_the_later_version_goes_on_with_what_the_earlier_one_has_cut(of_kinds, kinds_directory):
    some = [arm for arm in of_kinds if arm["task"] in ("go on", "loop")]
    results = checkouts.run_both(some, checkouts.ROOT, checkouts.ROOT, kinds_directory)
    text, is_good = checkouts.table(results, {})
    assert is_good, text
    assert "| all | 2 | 2 | 2 |" in text
    (name,) = [arm["name"] for arm in some if arm["task"] == "go on"]
    abouts = [kinds_directory / side / name / "cut/config.json" for side in ("before", "after")]
    assert abouts[0].stat().st_mtime_ns == abouts[1].stat().st_mtime_ns  # a copy of it
    assert checkout_outcomes.read(kinds_directory / "after" / name).counts["resumed"] == [3]


def test_what_the_later_version_refuses_by_its_format_is_told(of_kinds, tmp_path):
    """The manifest of the earlier version's checkpoints says another format."""
    (arm,) = [arm for arm in of_kinds if arm["task"] == "go on"]
    run_checkout, made = checkouts.run_checkout, []

    def spoiling(checkout, some, directory, **named):
        for manifest in directory.glob("workdir/**/manifest.json") if made else ():
            content = json.loads(manifest.read_text()) | {"format": 2}
            del content["digest"]
            digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
            text = json.dumps(content | {"digest": digest}, indent=1, sort_keys=True)
            manifest.write_text(text)
        made.append(directory.name)
        return run_checkout(checkout, some, directory, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkouts, "run_checkout", spoiling)
        (result,) = checkouts.run_both([arm], checkouts.ROOT, checkouts.ROOT, tmp_path)
    assert made == ["before", "after"]
    assert result.is_refused
    text, is_good = checkouts.table([result], {})
    assert is_good
    assert f"refused: {arm['name']}: " in text
    assert "has format 2" in text
