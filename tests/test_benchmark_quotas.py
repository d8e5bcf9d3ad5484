"""The benchmark of the loop: how its ratios and intervals are made, and that it runs."""

import re

import numpy as np
import pytest

from experiments.benchmarks import quota_overhead, rows


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    rng = np.random.default_rng(0)
    theirs = 1 + 0.1 * rng.random(300)
    ours = 1.5 * theirs * (1 + 0.01 * rng.standard_normal(300))
    for block in (1, 30, 299, 301):
        ratio, low, high = quota_overhead.ratio_of(ours, theirs, block=block)
        assert ratio == np.median(ours) / np.median(theirs)
        assert 1.48 < low <= ratio <= high < 1.52


def test_a_round_without_compute_is_measured_for_both_policies():
    found = list(rows.read("\n".join(rows.table(quota_overhead.host_rows(num_rounds=5)))))
    whole = [row for row in found if isinstance(row, rows.Row)]
    assert [row.name.partition(":")[0] for row in whole] == 3 * ["equal"] + 3 * ["adaptive"]
    assert re.fullmatch(r"[\d.]+ ms \([\d.]+ to [\d.]+\)", whole[0].figure)
    assert all(re.match(r"[\d.]+ ms", row.figure) and row.n == "5" for row in whole)
    assert re.fullmatch(r"Load at the end: [\d.]+\.", found[-1])


@pytest.mark.slow
def test_the_loop_is_measured_against_the_bare_loop():
    found = list(quota_overhead.overhead_rows(num_rounds=2, quota=1))
    figures = {row.name: row.figure for row in found if isinstance(row, rows.Row)}
    for policy in ("equal", "adaptive"):
        for name in ("round over the bare loop", "bare loop over itself"):
            assert re.fullmatch(r"[\d.]+ ± [\d.]+", figures[f"{policy}: {name}"])
        assert re.fullmatch(r"[\d.]+ ms", figures[f"{policy}: bare loop"])
