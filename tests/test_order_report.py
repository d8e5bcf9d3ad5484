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
    text = path.read_text()
    assert (directory / "tiny.svg").read_text().startswith("<?xml")
    for part in ("## Digits", "![", "fixed map", "lowest loss", "## Figures"):
        assert part in text
    assert "nan" not in text
    assert "Not complete" not in text
    assert text.count("Not run yet") == 1
    report.write(directory, [TINY, later, variant])
    assert path.read_text() == text


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

    def told(*found):
        return [reached for _, _, reached in figures.rows(found, {})]

    gains = arms_of(task, {BASE: slow, BALANCED: fast}, {BASE: 1.0, BALANCED: 1.2})
    assert told(gains)[1:] == [
        "reached: 1 of 1, the fewest 0.33",
        "1 of 1; 0",
        "reached: 1 of 1",
        "reached: 1 of 1 (median 1.20)",
    ]
    lacking = arms_of(dataclasses.replace(task, seeds=(0, 1, 2)), {BASE: slow, BALANCED: fast})
    assert told(lacking)[1] == "reached: 1 of 1, the fewest 0.33 (so far: runs are missing)"
    both = [gains, arms_of(dataclasses.replace(task, name="untimed"), {BASE: slow})]
    assert told(*both)[-1].startswith("so far 1 of 1 (median 1.20)")
    worse = arms_of(task, {BASE: fast, BALANCED: slow})
    assert told(worse)[1:4] == [
        "**not reached**: 0 of 1, the fewest inf",
        "0 of 1; 1",
        "reached: 0 of 0",
    ]
    assert tables.sentences(worse, {}) == [
        "Epochs to D-RR's lowest at the rate that gets there first: D-GraB, two-level at none."
    ]
    assert told(arms_of(task, {}))[1] == "not run yet"


def test_gain_and_balance_stand_side_by_side_those_who_gain_most_first():
    def bounds(arm, own, random):
        record = {"epochs": [1, 2], "two_norm": own, "random_two_norm": random}
        return {(arm, 0.05, 0): record_of([], **record)}

    found = [
        arms_of(
            dataclasses.replace(TINY, name=name, title=name),
            {BASE: ([1.0, 0.9, 0.8], [1.0, 0.9, 0.6]), BALANCED: ([loss] * 3,) * 2, **more},
        )
        for name, loss, more in (
            ("little", 0.9, {}),
            ("much", 0.3, {"fixed_map": ((0.9, 0.8, 0.2), (0.9, 0.8, 0.5))}),
            ("unmeasured", 0.5, {}),
        )
    ]
    measured = {
        name: bounds("d_grab_preconditioned", [1.0, 1.0], [1.0, 1.0])
        | bounds(BALANCED, own, [8.0, 4.0])
        for name, own in (("little", [6.0, 4.0]), ("much", [2.0, 2.0]))
    }
    rows = tables.gain_table([*found, arms_of(TINY, {})], measured).rows
    assert rows == [
        ["much", "0.33 ± 0.00", "", "", "-4.0", "-0.3", "", "0.347 ± 0.013", "8 → 4", "0.25 → 0.5"],
        ["unmeasured", "0.33 ± 0.00", "", "", "-2.0", "", "", "0.578 ± 0.022", "", ""],
        ["little", "not by 2 of 2", "", "", "+2.0", "", "", "1.040 ± 0.040", "8 → 4", "0.75 → 1"],
    ]


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
