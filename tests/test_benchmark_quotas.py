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
