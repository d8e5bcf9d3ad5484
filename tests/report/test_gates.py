"""The section on rounds that close early: what was finished, what came back, and by which gate."""

import re

import numpy as np

from hetjax.report import gates
from tests.report import runs

HEADING = "Rounds that close early"


def rows(table):
    """The cells of each row under the heads."""
    lines = re.findall(r"<tr>(.*?)</tr>", table)[1:]
    return [re.findall(r"<td>(.*?)</td>", line) for line in lines]


def test_the_section_draws_and_counts_what_came_back(pages):
    shown = runs.section(pages["gate"], HEADING)
    assert not runs.section(pages["gossip"], HEADING)
    assert shown.count("<svg") == 2  # for wide and narrow screens
    assert "closes a round when the first worker has finished its quota" in shown
    assert "31.4 % of the microbatches came back." in shown
    assert rows(shown) == [
        ["worker 0", "32", "32", "0", "512"],
        ["worker 1", "32", "32", "0", "512"],
        ["worker 2", "32", "32", "0", "512"],
        ["worker 3", "32", "8", "24", "128"],
        ["all", "128", "104", "24", "1,664"],
    ]


def test_many_workers_are_a_map_and_a_table_of_those_that_returned_most(tmp_path):
    summary = runs.SUMMARY | {"gate": runs.GATE}
    page = runs.write(tmp_path, summary=summary, history=runs.make_gated_history(8, 64))
    shown = runs.section(page, HEADING)
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
    share = gates.share(history)
    np.testing.assert_array_equal(share[:, 0], [1.0, 1.0])
    np.testing.assert_array_equal(share[:, 8], [np.nan, 0.25])
