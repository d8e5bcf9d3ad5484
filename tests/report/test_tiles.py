"""The tiles: the right numbers of the summary, and none in place of one that is missing."""

import html
import re

from hetjax.report import tiles
from tests.report import runs


def read(page):
    """What each tile shows: name -> (number, the line below)."""
    pattern = r'<dt>(.*?)</dt><dd class="value">(.*?)</dd><dd>(.*?)</dd>'
    return {html.unescape(n): (html.unescape(v), b) for n, v, b in re.findall(pattern, page)}


def test_tiles_show_the_numbers_of_the_summary():
    shown = read(tiles.tiles(runs.SUMMARY, runs.make_history(20, 4)))
    assert shown["Test accuracy"] == (
        "97.3 %",
        "best 98.1 %, test loss 0.1234, training loss 0.0567",
    )
    assert shown["Mean round"] == ("41.2 ms", "optimum 40.3 ms, emulated speeds")
    assert shown["Against the optimum"][0] == "97.8 %"
    assert shown["Against an equal split"][0] == "2.00\N{MULTIPLICATION SIGN}"
    assert "82.4 ms, emulated speeds" in shown["Against an equal split"][1]
    assert shown["Waiting"][0] == "2.2 %"
    assert shown["Missing and duplicated"] == ("3 and 17", "of 35,940 examples processed")
    assert shown["Quotas at the end"][0] == "8 : 6 : 4 : 2"
    assert shown["Wall time"] == ("61.5 s", "20 rounds")


def test_bytes_sent_are_those_of_one_worker():
    summary = runs.SUMMARY | {"bytes_sent_per_round": 2_000_000.0}
    shown = read(tiles.tiles(summary, runs.make_history(4, 4)))
    assert shown["Sent a round"] == ("500 kB", "by each worker, in the mean")
    assert "Sent a round" not in read(tiles.tiles(summary, runs.make_history(4, 1)))
    assert "Sent a round" not in read(tiles.tiles(runs.SUMMARY, runs.make_history(4, 4)))


def test_the_accuracy_of_training_has_a_tile_or_a_place_below_that_of_the_test_set():
    measured = {**runs.SUMMARY, "train_accuracy": 0.991}
    shown = read(tiles.tiles(measured, runs.make_history(20, 4)))
    assert "in training 99.1 %" in shown["Test accuracy"][1]
    del measured["test_accuracy"]
    shown = read(tiles.tiles(measured, runs.make_history(20, 4)))
    assert shown["Training accuracy"] == ("99.1 %", "over the last epoch")


def test_the_metric_that_the_best_is_chosen_by_has_a_tile_and_its_set_is_named():
    judged = {"judged_by": "val_perplexity", "val_perplexity": 129.47, "best_val_perplexity": 119.4}
    shown = read(tiles.tiles({**judged, "val_loss": 4.863, "train_loss": 4.7}, []))
    assert shown["Val perplexity"] == ("129.5", "best 119.4")
    assert shown["Val loss"] == ("4.863", "training loss 4.7")
    judged = {"judged_by": "test_smape", "test_smape": 8.64, "test_naive_smape": 9.161}
    assert read(tiles.tiles(judged, []))["Test smape"] == ("8.64", "naive 9.161")
    judged = {"judged_by": "val_accuracy", "val_accuracy": 0.81}
    shown = read(tiles.tiles(judged, []))
    assert shown["Val accuracy"] == ("81.0 %", "")
    assert list(shown) == ["Val accuracy"]
