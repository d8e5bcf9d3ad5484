"""The few lines of a result that a person reads."""

from hetjax.records import results
from tests.report import runs

JUDGED = {"best_val_perplexity": 110.0, "best_test_perplexity": 100.0, "val_perplexity": 121.0}
JUDGED |= {"test_perplexity": 110.0, "judged_by": "val_perplexity"}
ENDED = {"emulated": False, "clock": "virtual", "stopped_by": None, "interrupted": False}
ENDED |= {"examples_never_processed": 0, "overrun_fraction": 0.0}


def test_what_the_best_is_judged_by_is_told_of_every_set():
    rows = dict(results.summary_rows(runs.SUMMARY | JUDGED | ENDED))
    assert rows["val perplexity"] == "121.0000 (110.0000 at the best)"
    assert rows["test perplexity"] == "110.0000 (100.0000 at the best)"
    assert "mean round" not in rows
