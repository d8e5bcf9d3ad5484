"""The drill of engines: one trial of one of them, with the figures that its page is made of."""

import time

import pytest

from experiments.comparisons import kept
from experiments.drills import engines

pytestmark = pytest.mark.engines


def test_a_trial_kills_goes_on_and_says_where_the_seconds_went(open_mpi, tmp_path):
    engines.run(tmp_path, ["open_mpi"], trials=1, ends=time.monotonic() + 1)
    (record,) = kept.read(tmp_path / "runs.jsonl")
    assert record["whole"]
    assert record["bit_equal"]
    assert (record["missing"], record["doubled"], record["left_in_memory"]) == (0, 0, 0)
    assert record["exit_code"] == 137
    assert sum(record["secs"].values()) == pytest.approx(
        record["secs_to_first_new_round"], abs=0.01 * len(engines.PARTS)
    )
    assert min(record["secs"].values()) >= 0
    assert "| joined, killed, gone on | 20 of 20 | 1 of 1 |" in engines.page(tmp_path)
