"""The report of the study of orders: what it says, of made results."""

import dataclasses
import math
import shutil

import pytest

from experiments.comparisons import kept, spreads
from experiments.orders import figures, jobs, report, results, study, tables
from tests.order_study import BALANCED, BASE, TINY, arms_of, record_of


def write_results(directory):
    """All runs of TINY, and their seconds."""
    for arm in TINY.arms:
        for seed in TINY.seeds:
            named = {"arm": arm, "learning_rate": 0.05, "seed": seed}
            made = record_of([0.9, 0.8 - 0.1 * seed, 0.7], **named)
            kept.append(results.path_of(directory), made)
    secs = {arm: [1.0, 1.1] for arm in TINY.arms}
    timed = {"tiny": {"settings": TINY.settings, "secs": secs}}
    jobs.write(directory / results.RUNS / results.EPOCH_SECS, timed)


def test_the_report_has_its_tables_and_pictures(tmp_path):
    directory = tmp_path
    write_results(directory)
    variant = dataclasses.replace(TINY, name="variant", group="where")
    later = dataclasses.replace(TINY, name="later", title="Later", convex=True)
    path = report.write(directory, [TINY, later, variant])
    text, page = (directory / "README.md").read_text(), path.read_text()
    assert (directory / "tiny.svg").read_text().startswith("<?xml")
    for part in ("## Digits", "![", "fixed map", "lowest training loss", "## Figures"):
        assert part in text
    for part in ("<h2>Digits</h2>", "data:image/svg+xml;base64,", "fixed map", "<code>"):
        assert part in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "nan" not in text
    assert "Not complete" not in text
    assert "Later: epochs to D-RR's lowest training loss" in text
    assert text.count("Not run yet") == 1
    before = text, page
    report.write(directory, [TINY, later, variant])
    assert ((directory / "README.md").read_text(), path.read_text()) == before


def test_the_report_in_the_repository_is_rebuilt_from_its_results_alone(tmp_path, monkeypatch):
    for kind in (results.RUNS, results.HERDING):
        shutil.copytree(results.DIRECTORY / kind, tmp_path / kind)
    draw = lambda path, *_: path.write_text("")  # noqa: E731  # pictures take most of the time
    monkeypatch.setattr(report.pictures, "draw", draw)
    report.write(tmp_path, list(study.TASKS.values()))
    assert (tmp_path / "README.md").read_text() == (results.DIRECTORY / "README.md").read_text()


def test_figures_say_what_is_reached_in_words():
    task = dataclasses.replace(TINY, convex=True, arms=(BASE, BALANCED))
    slow, fast = ((0.9, 0.8, 0.5),) * 2, ((0.5, 0.4, 0.3),) * 2
    arms_found = arms_of(task, {BASE: slow, BALANCED: fast}, {BASE: 1.0, BALANCED: 1.2})
    rows = {name: told for name, _, told in figures.rows([arms_found], {})}
    of = {name.split(": ")[-1]: told for name, told in rows.items()}
    assert of["epochs to D-RR's lowest training loss, two-level D-GraB"].startswith("reached: 0.33")
    assert (
        of["time to D-RR's lowest training loss, ordering's cost counted"] == "reached: 0.40 ± 0.00"
    )
    assert rows[
        "cost of an ordered step (two-level D-GraB) over a plain one, each task"
    ].startswith("reached: 1 of 1 (median 1.20): `tiny` 1.20")
    lacking = arms_of(dataclasses.replace(task, seeds=(0, 1, 2)), {BASE: slow, BALANCED: fast})
    assert figures.rows([lacking], {})[1][2].startswith("so far: 0.33")
    both = [arms_found, arms_of(dataclasses.replace(task, name="untimed"), {BASE: slow})]
    assert figures.rows(both, {})[-2][2].startswith("so far 1 of 1 (median 1.20)")
    worse = arms_of(task, {BASE: fast, BALANCED: slow})
    told = [told for _, _, told in figures.rows([worse], {})]
    assert told[1] == (
        "**not reached**: not reached by 2 of 2 seeds. At the learning rate that gets there first, "
        "seed 0: D-GraB, two-level at none"
    )
    none = [told for _, _, told in figures.rows([arms_of(task, {})], {})]
    assert none[1] == "not run yet"


def test_a_gain_is_told_in_units_of_the_spread():
    task = dataclasses.replace(TINY, arms=(BASE, BALANCED, "fixed_map"))
    losses = {
        BASE: ((0.9, 0.8, 0.7), (0.9, 0.8, 0.5)),
        BALANCED: ((0.9, 0.8, 0.3), (0.9, 0.8, 0.3)),
        "fixed_map": ((0.9, 0.8, 0.2), (0.9, 0.8, 0.5)),
    }
    (_, _, told) = figures.rows([arms_of(task, losses)], {})[1]
    assert told == (
        "against D-RR -3.0 spreads, lower by more than the spread; against fixed map -0.3 "
        "spreads, within the spread"
    )


def test_gain_and_balance_stand_side_by_side_those_who_gain_most_first():
    def bounds(arm, own, random):
        record = {"epochs": [1, 2], "two_norm": own, "random_two_norm": random}
        return {(arm, 0.05, 0): record_of([], **record)}

    names = ("little", "much", "unmeasured")
    of_seeds = {"little": 0.9, "much": 0.3, "unmeasured": 0.1}
    found = [
        arms_of(
            dataclasses.replace(TINY, name=name, title=name),
            {BASE: ([1.0, 0.9, 0.8],) * 2, BALANCED: ([of_seeds[name]] * 3,) * 2},
        )
        for name in names
    ]
    measured = {
        name: bounds(BALANCED, own, [8.0, 4.0])
        for name, own in (("little", [6.0, 4.0]), ("much", [2.0, 2.0]))
    }
    assert tables.balance_table(found, measured).rows == [
        ("much", "8 → 4", "0.25 → 0.5", "0.333 ± 0.000",
         "lower by more than the spread"),
        ("little", "8 → 4", "0.75 → 1", "1.000 ± 0.000", "higher by more than the spread"),
    ]  # fmt: skip
    assert tables.balance_table(found, {}) is None


def test_epochs_are_compared_seed_by_seed_and_the_time_with_the_cost_of_an_epoch():
    losses = {
        BASE: ([0.9, 0.5, 0.6], [0.9, 0.8, 0.7]),
        BALANCED: ([0.5, 0.4, 0.3], [0.9, 0.8, 0.7]),
    }
    found = arms_of(TINY, losses, {BALANCED: 3.0, BASE: 2.0})
    assert found.ratios(BALANCED) == [1 / 2, 3 / 3]
    assert found.ratios(BALANCED, of_time=True) == [0.75, 1.5]
    losses[BALANCED] = ([0.5, 0.4, 0.3], [0.9, 0.8, 0.71])
    assert arms_of(TINY, losses).ratios(BALANCED) == [0.5, math.inf]


def test_who_gets_there_first_may_have_another_rate_than_who_ends_lowest():
    runs = {
        (BASE, 0.1, 0): [0.9, 0.6, 0.5],
        (BALANCED, 0.8, 0): [0.1, 0.1, 0.1],  # on nobody's grid any more
        (BASE, 0.2, 0): [0.4, 0.4, 0.6],  # at a rate that is not its own: no target
        (BALANCED, 0.1, 0): [0.8, 0.5, 0.2],
        (BALANCED, 0.2, 0): [0.5, 0.4, 0.4],
        (BALANCED, 0.4, 1): [0.1, 0.1, 0.1],  # another seed
        ("fixed_map", 0.1, 0): [0.9, 0.8, 0.7],
    }
    records = {key: record_of(losses) for key, losses in runs.items()}
    task = dataclasses.replace(TINY, learning_rates=(0.1, 0.2))
    arms = results.Arms(task, records, {BASE: 0.1, BALANCED: 0.1}, {})
    assert arms.soonest(BALANCED) == (0.2, pytest.approx(1 / 3))
    assert arms.soonest("fixed_map") is None
    assert results.Arms(TINY, {}, {}, {}).soonest(BALANCED) is None


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        ([1.0, 1.2], [1.3, 1.3], "lower by more than the spread"),
        ([1.0, 1.2], [1.2, 1.2], "within the spread"),
        ([1.0, 1.0], [0.5, 0.7], "higher by more than the spread"),
        ([1.0], [0.5], "higher (one seed: no spread)"),
        ([], [0.5], "not known"),
        ([math.inf, 1.0], [0.5, 0.5], "higher by more than the spread"),
    ],
)
def test_verdicts_compare_the_means_with_the_larger_spread(one, other, word):
    assert spreads.verdict(spreads.Stat.of(one), spreads.Stat.of(other)) == word
