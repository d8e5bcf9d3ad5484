"""The benchmark of the loop: how its ratios and intervals are made, and that it runs."""

import re

import numpy as np
import pytest

from experiments.benchmarks import quota_overhead


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    rng = np.random.default_rng(0)
    theirs = 1 + 0.1 * rng.random(300)
    ours = 1.5 * theirs * (1 + 0.01 * rng.standard_normal(300))
    for block in (1, 30, 299, 301):
        ratio, low, high = quota_overhead.ratio_of(ours, theirs, block=block)
        assert ratio == np.median(ours) / np.median(theirs)
        assert 1.48 < low <= ratio <= high < 1.52


def test_what_both_sides_share_in_a_turn_cancels():
    secs = np.random.default_rng(1).exponential(size=200)
    assert quota_overhead.ratio_of(2 * secs, secs, block=30) == (2.0, 2.0, 2.0)


def test_blocks_see_that_neighbouring_turns_are_alike():
    """Against the spread of the ratio over many tables of the same disturbance."""
    rng = np.random.default_rng(2)

    def disturbed():  # for 20 turns in a row, on one side and the other
        return 1 + 0.1 * np.repeat(rng.standard_normal(30), 20)

    ratios, widths = [], {1: [], 60: []}
    for _ in range(40):
        ours, theirs = disturbed(), disturbed()
        ratios.append(np.median(ours) / np.median(theirs))
        for block, found in widths.items():
            _, low, high = quota_overhead.ratio_of(ours, theirs, block=block)
            found.append((high - low) / 2)
    true = 1.96 * np.std(ratios)
    assert np.median(widths[1]) < 0.5 * true
    assert 0.7 * true < np.median(widths[60]) < 1.5 * true


def test_programs_take_turns_and_each_begins_as_often():
    calls = []
    programs = {name: lambda name=name: calls.append(name) for name in "abc"}
    secs = quota_overhead.in_turn(programs, 7)
    turns = np.reshape(calls, (-1, 3))
    assert ["".join(turn) for turn in turns[:4]] == ["abc", "bca", "cab", "abc"]
    assert {name: values.shape for name, values in secs.items()} == dict.fromkeys("abc", (7,))


def test_a_round_without_compute_is_measured_for_both_policies():
    (row,) = quota_overhead.host_rows(num_rounds=5)
    assert re.fullmatch(
        r"equal [\d.]+ \([\d.]+ to [\d.]+\), of all cores [\d.]+; right after it the bare loop "
        r"[\d.]+; adaptive .*; right after it the bare loop [\d.]+; load [\d.]+",
        row.reached,
    )


@pytest.mark.slow
def test_the_loop_is_measured_against_the_bare_loop():
    rows = quota_overhead.overhead_rows(num_rounds=2, quota=1)
    assert ["policy equal" in row.figure for row in rows] == [True, False]
    number = r"[\d.]+ ± [\d.]+"
    for row in rows:
        assert re.match(rf"{number}; bare / itself {number}; bare [\d.]+ ms; load ", row.reached)
