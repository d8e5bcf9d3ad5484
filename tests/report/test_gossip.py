"""The section on gossip: how far the replicas are apart, and whose loss is whose."""

import re

import pytest

from hetjax.report import canvas, gossip
from tests.report import runs


def write(directory, *, history=None, part=runs.GOSSIP, **summary):
    history = runs.make_gossip_history(8, 4) if history is None else history
    return runs.write(directory, summary=runs.SUMMARY | {"gossip": part} | summary, history=history)


def test_the_section_draws_the_consensus_and_says_what_it_is(tmp_path):
    shown = runs.section(write(tmp_path), "Gossip")
    assert shown.count("<svg") == 2  # for wide and narrow screens
    assert not [colour for colour in canvas.VARIABLES if colour in shown]
    targets = re.findall(r'\bid="([^"]*)"', shown)
    assert len(targets) == len(set(targets))
    assert "consensus distance, relative to the norm of the mean, log scale" in shown
    assert ">0.0625</text>" in shown  # the last one
    assert "measured at the end of each epoch" in shown
    assert "The spectral gap is 0.25: mixing alone would leave at most 75.0 %" in shown
    assert "Gossip has 3 exchanges" in shown
    assert "A worker sends 248 kB a round." in shown


def test_points_lie_at_the_ends_of_epochs():
    x, y = gossip.consensus(runs.make_gossip_history(6, 2), {})
    assert x.tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert y.tolist() == pytest.approx([0.25, 0.125, 0.5 / 6])


def test_without_gossip_there_is_no_section(tmp_path):
    for part in (None, "d_psgd", {}):
        assert not runs.section(write(tmp_path, part=part), "Gossip")


@pytest.mark.parametrize("odd", [None, "x", [1.0], {}, {"relative": 0.0}, {"relative": "x"}])
def test_without_a_distance_above_zero_the_words_are_left(tmp_path, odd):
    history = runs.make_gossip_history(4, 2, consensus=lambda i: odd)
    shown = runs.section(write(tmp_path, history=history), "Gossip")
    assert "<svg" not in shown
    assert "None that was measured is finite and above zero." in shown
    assert "The spectral gap is 0.25" in shown


def test_bytes_are_those_of_one_worker_in_one_round():
    history = runs.make_gossip_history(4, 8)
    assert gossip.bytes_of_worker({}, history) == 248_024
    assert gossip.bytes_of_worker({"bytes_sent_per_round": 4000, "num_workers": 4}, []) == 1000
    alone = runs.make_gossip_history(4, 1)
    assert not gossip.bytes_of_worker({"bytes_sent_per_round": 0.0}, alone) >= 0


def test_the_mean_of_the_replicas_and_the_worst_one_are_told_apart(tmp_path):
    page = write(tmp_path)
    for heading, name in (("Loss", "loss"), ("Accuracy", "accuracy")):
        shown = runs.section(page, heading)
        assert f"test {name}, mean of the replicas" in shown
        assert f"test {name}, worst replica" in shown
        assert "the one with the highest test loss" in shown


def test_replicas_are_not_spoken_of_where_they_are_equal(tmp_path):
    page = runs.write(tmp_path, history=runs.make_history(20, 4))
    assert "test loss" in runs.section(page, "Loss")
    assert "replica" not in page


@pytest.mark.parametrize("num_workers", [1, 64])
def test_one_and_many_workers_are_drawn(tmp_path, num_workers):
    page = write(tmp_path, history=runs.make_gossip_history(4, num_workers))
    assert runs.section(page, "Gossip").count("<svg") == 2


@pytest.mark.parametrize("name", [*runs.GOSSIP, "bytes_sent_per_round", "num_workers"])
@pytest.mark.parametrize("odd", [None, "x", float("nan"), 0, -1.0, 1e308, [1.0], {}])
def test_odd_summaries_break_nothing(name, odd):
    summary = {"gossip": runs.GOSSIP | {name: odd}, name: odd}
    assert "nan" not in gossip.mixing(summary, runs.make_gossip_history(2, 2))
    assert "nan" not in gossip.mixing(summary, [])


@pytest.mark.parametrize("odd", [None, "x", float("nan"), -1.0, 1e308, [], {}])
def test_odd_fields_break_nothing(odd):
    for name in ("consensus", "bytes_sent", "examples_processed", "epoch", "eval"):
        history = runs.make_gossip_history(6, 2)
        for record in history[:2]:
            record[name] = odd
        history[3]["consensus"] = {"relative": odd}
        text = gossip.mixing({"gossip": runs.GOSSIP}, history)
        if len(gossip.consensus(history, {})[0]):
            text += gossip.draw_consensus(history, {}, width=340)
        assert "nan" not in text


def test_many_measurements_stay_small():
    history = runs.make_gossip_history(20_000, 2)
    assert len(gossip.draw_consensus(history, {}, width=900)) < 100_000
