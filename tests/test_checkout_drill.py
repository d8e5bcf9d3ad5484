"""The drill of two checkouts: nothing is found where they are one, and the least difference is."""

import copy
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


def arms(*names):
    named = {arm["name"]: arm for arm in checkout_arms.arms()}
    return [named[name] for name in names]


def both(directory, *names):
    """Both sides of this checkout, which are found to be one."""
    results = checkouts.run_both(arms(*names), checkouts.ROOT, checkouts.ROOT, directory)
    text, is_good = checkouts.table(results, {})
    assert is_good, text
    assert "| all | 2 | 2 | 2 |" in text
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return once(tmp_path_factory, "checkouts", lambda directory: both(directory, ALONE, TOGETHER))


def test_arms_are_every_combination_that_works_together():
    arms = checkout_grid.arms()
    names = [arm["name"].split("/") for arm in arms]
    assert len({tuple(name) for name in names}) == len(arms)
    pairs = {(ordering, reducer) for _, _, ordering, reducer, *_ in names}
    assert {tuple(c[1:]) for c in checkout_grid.faults.combinations()} == pairs
    for form in ("1/stepped", "1/fused", "1/virtual", "2/stepped", "2/fused"):
        (processes, local), sharings = form.split("/"), 2 if form[0] == "1" else 1
        own = [n for n in names if n[:2] == [processes, local]]
        assert len(own) == len(pairs) * sharings
        assert {n[4] for n in own} == {"shared", "private"}
        assert len({n[5] for n in own}) == (2 if local == "fused" else 5)


def test_another_seed_is_found(directory, tmp_path):
    other = copy.deepcopy(arms(ALONE))
    other[0]["fields"]["seed"] = 1
    checkouts.run_checkout(checkouts.ROOT, other, tmp_path, cache=CACHE)
    (result,) = checkouts.compare(arms(ALONE), directory / "before", tmp_path)
    assert not result.identical
    assert "orders[0][0]" in result.told
    assert not checkouts.table([result], {})[1]


def test_differences_of_rounds_queues_ledger_and_losses_are_found(directory):
    outcome = checkout_outcomes.read(directory / "before" / ALONE)
    other = copy.deepcopy(outcome)
    leaf = other.arrays["params of 3"][0]
    leaf.flat[0] = np.nextafter(leaf.flat[0], np.float32(np.inf))
    assert 0 < checkout_outcomes.largest_gap(outcome, other) < 1e-6
    other.rounds[1]["quotas"][2] += 1
    other.queues[3][0] = other.queues[3][0][::-1]
    other.ledger[0][0][5] += 1
    other.counts["examples_missing"] = 1
    other.numbers[4]["loss"] += 1e-8
    assert checkout_outcomes.differences(outcome, other) == [
        *("rounds[1][quotas][2]", "queues[3][0]", "ledger[0][0]", "counts[examples_missing]"),
        *("numbers[4][loss]", "arrays[params of 3][0]"),
    ]
    shorter = outcome._replace(rounds=outcome.rounds[:-1])
    assert "of them" in checkout_outcomes.differences(outcome, shorter)[0]


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
def kinds_directory(tmp_path_factory):
    """One side, of this checkout."""

    def run(directory):
        checkouts.run_checkout(checkouts.ROOT, arms(*KINDS), directory / "before", cache=CACHE)
        return directory

    return once(tmp_path_factory, "kinds", run)


@pytest.mark.parametrize("kind", KINDS, ids=lambda name: name.split("/")[0])
def test_the_least_bit_is_found_in_every_kind(kind, kinds_directory):
    """In each array that it has, and in each number and count of each round."""
    of_kind = checkout_outcomes.read(kinds_directory / "before" / kind)
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


def test_the_later_version_goes_on_with_what_the_earlier_one_has_cut(kinds_directory):
    both(kinds_directory, KINDS[1], name := KINDS[-1])
    abouts = [kinds_directory / side / name / "cut/config.json" for side in ("before", "after")]
    assert abouts[0].stat().st_mtime_ns == abouts[1].stat().st_mtime_ns  # a copy of it
    assert checkout_outcomes.read(kinds_directory / "after" / name).counts["resumed"] == [3]
