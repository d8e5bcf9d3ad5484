"""The section on rounds that close early: what was finished, what came back, and by which gate."""

import itertools
import re

import numpy as np
import pytest

import hetjax.gates
from hetjax.report import canvas, gates, tables
from tests.report import runs

HEADING = "Rounds that close early"


def section(directory, *, history=None, part=runs.GATE):
    history = runs.make_gated_history(8, 4) if history is None else history
    page = runs.write(directory, summary=runs.SUMMARY | {"gate": part}, history=history)
    return runs.section(page, HEADING)


def rows(table):
    """The cells of each row under the heads."""
    lines = re.findall(r"<tr>(.*?)</tr>", table)[1:]
    return [re.findall(r"<td>(.*?)</td>", line) for line in lines]


def test_the_section_draws_and_counts_what_came_back(tmp_path):
    shown = section(tmp_path)
    assert shown.count("<svg") == 2  # for wide and narrow screens
    assert not [colour for colour in canvas.VARIABLES if colour in shown]
    targets = re.findall(r'\bid="([^"]*)"', shown)
    assert len(targets) == len(set(targets))
    assert "closes a round when the first worker has finished its quota" in shown
    assert "31.4 % of the microbatches came back." in shown
    assert rows(shown) == [
        ["worker 0", "32", "32", "0", "512"],
        ["worker 1", "32", "32", "0", "512"],
        ["worker 2", "32", "32", "0", "512"],
        ["worker 3", "32", "8", "24", "128"],
        ["all", "128", "104", "24", "1,664"],
    ]


def test_the_bars_hold_finished_and_returned_microbatches():
    picture = gates.draw_microbatches(runs.make_gated_history(1, 2), width=900, rounds=6)
    texts = re.findall(r">([^<>]+)</text>", picture)
    assert texts.count("4") == 1  # finished by worker 0
    assert texts.count("1") == 1  # finished by worker 1
    assert texts.count("3") == 1  # returned by worker 1
    assert "All rounds, microbatches" in texts


def test_many_workers_are_a_map_and_a_table_of_those_that_returned_most(tmp_path):
    shown = section(tmp_path, history=runs.make_gated_history(8, 64))
    assert shown.count("data:image/png") == 4  # the map and its scale, at each width
    assert "The table holds the 16 workers that returned most." in shown
    cells = rows(shown)
    assert len(cells) == 18
    assert ["worker 63", "32", "8", "24", "128"] in cells
    assert cells[-2:] == [
        ["48 others", "1,536", "1,536", "0", "24,576"],
        ["all", "2,048", "2,024", "24", "32,384"],
    ]


def test_the_map_holds_the_share_that_was_finished():
    history = runs.make_gated_history(2, 9, quotas=lambda i: [4] * 8 + [4 * i])
    share = gates.microbatches(history).share()
    np.testing.assert_array_equal(share[:, 0], [1.0, 1.0])
    np.testing.assert_array_equal(share[:, 8], [np.nan, 0.25])


def test_a_gate_that_drops_what_is_in_flight_is_said_to_exist_on_the_virtual_clock(tmp_path):
    assert "virtual clock" not in section(tmp_path)
    dropped = section(tmp_path, part=runs.GATE | {"in_flight": "drop"})
    assert "exists on the virtual clock alone" in dropped
    assert "finished and counts" not in dropped


def test_each_gate_is_named_and_explained():
    for trigger, factory in hetjax.gates.GATES.items():
        when = factory().when
        caption = gates.caption({"trigger": trigger, "closes": when})
        assert f"The gate '{trigger}' closes a round {when}." in caption
    assert "before every quota is done" in gates.caption({"trigger": "another"})


def test_without_a_gate_there_is_no_section(tmp_path):
    for part in (None, "first", {}, {"trigger": "none"}):
        assert not section(tmp_path, part=part)


def test_the_timeline_says_that_bars_need_not_end_together(tmp_path):
    def caption(part):
        history = runs.make_gated_history(8, 4)
        page = runs.write(tmp_path, summary=runs.SUMMARY | {"gate": part}, history=history)
        return runs.section(page, "Who computes")

    assert "bars of a round end together" in caption(None)
    assert "the bars of a round need not end together" in caption(runs.GATE)
    assert "waiting for the last to finish" in caption(runs.GATE)
    dropped = caption(runs.GATE | {"in_flight": "drop"})
    assert "gives up what is in flight" in dropped
    assert "end together" not in dropped


def test_the_table_of_rounds_says_what_was_done_where_it_differs_from_the_quotas():
    quotas = [4, 4, 4, 4]
    for done, shown in (
        ([4, 4, 4, 1], "<td>4 4 4 1 of 4 4 4 4</td>"),
        (quotas, "<td>4 4 4 4</td>"),
        ([None, "x"], "<td>4 4 4 4</td>"),
        (None, "<td>4 4 4 4</td>"),
    ):
        assert shown in tables.rounds_table([{"quotas": quotas, "microbatches_done": done}])
    assert "of" not in tables.rounds_table([{"quotas": "x", "microbatches_done": [1]}])


def test_runs_from_before_examples_were_counted_leave_the_column_empty():
    history = runs.make_gated_history(2, 2, examples_counted=lambda i: None)
    assert [cells[-1] for cells in rows(gates.table(history))] == ["-", "-", "-"]


def test_what_is_not_known_of_a_worker_is_left_out_of_its_sums():
    history = runs.make_gated_history(2, 2, microbatches_done=lambda i: [4, None if i else 1])
    assert rows(gates.table(history))[1][:4] == ["worker 1", "4", "1", "3"]


@pytest.mark.parametrize("num_workers", [1, 64])
@pytest.mark.parametrize("num_rounds", [1, 300])
def test_one_and_many_workers_and_rounds_are_drawn_small(tmp_path, num_workers, num_rounds):
    shown = section(tmp_path, history=runs.make_gated_history(num_rounds, num_workers))
    assert shown.count("<svg") == 2
    assert len(shown) < 250_000


FIELDS = ["quotas", "microbatches_done", "examples_counted", "round"]
ODD = [None, "x", float("nan"), [], [None, "x", 3.0], [float("nan")] * 9, [-1.0] * 9, [1e308] * 9]


@pytest.mark.parametrize("num_workers", [2, 9])
def test_rounds_with_odd_fields_break_nothing(num_workers):
    history = runs.make_gated_history(2 * len(FIELDS) * len(ODD), num_workers)
    for record, (name, odd) in zip(history[::2], itertools.product(FIELDS, ODD), strict=True):
        record[name] = odd
    text = gates.table(history) + tables.rounds_table(history)
    text += gates.draw_microbatches(history, width=900, rounds=len(history))
    assert "nan" not in text


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_odd_in_every_round_breaks_nothing(name):
    for odd in ODD:
        history = runs.make_gated_history(1, 2, **{name: lambda i, odd=odd: odd})
        text = gates.table(history) + tables.rounds_table(history)
        if gates.can_draw(history):
            text += gates.draw_microbatches(history, width=340, rounds=3)
        assert "nan" not in text


@pytest.mark.parametrize("name", list(runs.GATE))
@pytest.mark.parametrize("odd", [None, "x", float("nan"), -1.0, [1.0], {}])
def test_odd_summaries_break_nothing(name, odd):
    for part in (runs.GATE | {name: odd}, {name: odd}):
        assert "nan" not in gates.caption(part)


def test_rounds_without_numbers_have_a_caption_alone(tmp_path):
    shown = section(tmp_path, history=[{"quotas": [4, 4]}, {}])
    assert "came back" in shown
    assert "<svg" not in shown
    assert "<table" not in shown
