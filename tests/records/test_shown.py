"""The few lines of a result that a person reads."""

from hetjax.records import results

SUMMARY = {
    "best_val_loss": 4.7,
    "best_val_perplexity": 110.0,
    "best_test_loss": 4.6,
    "best_test_perplexity": 100.0,
    "val_loss": 4.8,
    "val_perplexity": 121.0,
    "test_loss": 4.7,
    "test_perplexity": 110.0,
    "judged_by": "val_perplexity",
    "rounds": 3,
    "epochs": 1.0,
    "train_loss": 5.0,
    "quotas": [1, 1],
    "emulated": False,
    "clock": "virtual",
    "round_secs_mean": 1.0,
    "examples_processed": 6,
    "examples_missing": 0,
    "examples_duplicated": 0,
    "examples_never_processed": 0,
    "overrun_fraction": 0.0,
    "interrupted": False,
    "stopped_by": None,
}


def test_what_the_best_is_judged_by_is_told_of_every_set():
    rows = dict(results.summary_rows(SUMMARY))
    assert rows["val perplexity"] == "121.0000 (110.0000 at the best)"
    assert rows["test perplexity"] == "110.0000 (100.0000 at the best)"
    assert "mean round" not in rows
