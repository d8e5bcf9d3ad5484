"""The series: right means, right rounds, right epochs."""

import numpy as np

from hetjax.report import series


def test_thinned_lines_keep_their_range_and_their_mean():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[1234] = 50.0
    middle, mean, low, high = series.thin(x, y, points=100)
    assert high.max() == 50.0
    assert low.min() == y.min()
    np.testing.assert_allclose(mean, y.reshape(100, 100).mean(1), rtol=1e-12)
    np.testing.assert_allclose(middle, x.reshape(100, 100).mean(1), rtol=1e-12)


def test_the_short_round_of_an_epoch_is_left_out():
    lines = [{"round": i, "full": i != 1} for i in range(4)]
    assert [r["round"] for r in series.full_rounds(lines)] == [0, 2, 3]


def test_epochs_count_examples_over_examples_of_a_pass():
    lines = [{"epoch": i // 2, "examples_processed": p} for i, p in enumerate([60, 100, 160])]
    np.testing.assert_allclose(series.epochs_done(lines, {}), [0.6, 1.0, 1.6])
    summary = {"epochs": 1, "examples_processed": 100}
    np.testing.assert_allclose(series.epochs_done(lines[:2], summary), [0.6, 1.0])


def test_evaluated_numbers_of_the_test_set_come_first():
    evals = [{"train_loss": 2.0, "a_loss": None}, None, {"test_loss": 1.0, "accuracy": 0.5}]
    found = series.evaluations([{"eval": e} for e in evals], "loss")
    assert list(found) == ["test_loss", "train_loss"]
    np.testing.assert_array_equal(found["train_loss"], [2.0, np.nan, np.nan])
