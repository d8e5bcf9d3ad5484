"""A run whose workers come and go: who they were, when, and which seats were never taken."""

import json
import re

import pytest

from hetjax.report import cards, files, gossip, series
from tests.report import runs

SEATS, CHANGES = 5, {3: [[1, "was killed"]], 6: [[1, "joined"]], 8: [[3, "joined"], [0, "left"]]}
WHO = "worker 1 was killed, worker 1 joined, worker 3 joined, worker 0 left"


def history(*, most=SEATS - 1, changes=CHANGES):
    """Of ten rounds; of its five seats the last was never taken."""

    def present(i):
        gone = {1} if 3 < i <= 6 else {3} if i <= 8 else {0}
        return [j < most and j not in gone for j in range(SEATS)]

    def quotas(i):
        return [2 * is_here for is_here in present(i)]

    how = {"present": present, "quotas": quotas, "microbatches_done": quotas}
    how |= {"bytes_sent": lambda i: 2 * (sum(present(i)) - 1) * 1000, "changes": changes.get}
    return runs.make_history(10, SEATS, **how)


@pytest.mark.parametrize("summary", [{}, {"quotas": [0, 2, 2, 2], "num_workers": 4}])
def test_the_page_says_who_came_and_went_and_has_no_seat_that_nobody_took(summary, tmp_path):
    page = runs.write(tmp_path, summary=summary, history=history())
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", runs.section(page, "Who came and went"))
    cells = [row.split("</td><td>") for row in rows]
    assert ", ".join(f"{who} {what}" for *_, who, what in cells) == WHO
    assert [cell[:2] for cell in cells[:2]] == [["3", "1,500 ms"], ["6", "3.00 s"]]
    assert "· 4 workers<" in page
    assert {len(row.split()) for row in re.findall(r"<td>([02](?: [02])+)</td>", page)} == {4}
    assert not re.search(r"(worker |[^-]w)4\b", page)
    assert "w4" not in cards.of_run("Run", [], summary=summary, history=history())


def test_a_run_where_nobody_came_or_went_has_no_such_section(tmp_path):
    assert not runs.section(runs.write(tmp_path, history=runs.make_history(9, 3)), "Who came")


def test_of_many_changes_the_first_and_the_last_are_told(tmp_path):
    many = {0: [[j, "joined"] for j in range(40)]}
    page = runs.write(tmp_path, history=history(changes=many))
    assert "… 16 changes …" in runs.section(page, "Who came and went")


def test_shares_are_of_those_who_were_there(tmp_path):
    """In rounds of n workers each sends 2 (n - 1) / n copies; one worker sends none."""
    (tmp_path / "config.json").write_text("{}")
    lines = map(json.dumps, history())
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    written = files.read(tmp_path)
    assert series.count_workers(written.history) == 4
    assert len(written.numbers["quotas"]) == 4
    sent = [line["bytes_sent"] for line in history()]
    here = [sum(line["present"]) for line in history()]
    assert gossip.bytes_of_worker(written.numbers, written.history) == sum(sent) / sum(here)
    alone = history(most=1, changes={})[:4]
    assert not gossip.bytes_of_worker(files.so_far({}, alone), alone) > 0


def test_each_table_scrolls_or_wraps_in_its_own_box(pages):
    for page in pages.values():
        assert page.count("<table") == page.count('<div class="scroll"><table') > 0
        assert page.count("<pre>") == page.count("</summary><pre>")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "pre,.scroll{overflow-x:auto" in style
    assert re.search(r"main{[^}]*overflow-wrap:anywhere", style)  # a path in a note, say
