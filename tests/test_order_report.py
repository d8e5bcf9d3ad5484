"""The report of the study of orders: what it says, of made results."""

import dataclasses
import math
import shutil

import pytest

from experiments.comparisons import kept, spreads
from experiments.orders import jobs, report, results, study
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


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        ([1.0, 1.2], [1.3, 1.3], "lower by more than the spread"),
        ([1.0, 1.2], [1.2, 1.2], "within the spread"),
        ([1.0], [0.5], "higher (one seed: no spread)"),
    ],
)
def test_verdicts_compare_the_means_with_the_larger_spread(one, other, word):
    assert spreads.verdict(spreads.Stat.of(one), spreads.Stat.of(other)) == word
