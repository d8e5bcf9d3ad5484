"""What a bilevel run keeps in its workdir, and what may write over it."""

import time

import numpy as np
import pytest

from hetjax.records import keeper
from tests.bilevel.rounds import problems
from tests.bilevel.rounds.test_fitting import fit, same


@pytest.mark.slow
def test_a_finished_run_is_written_over_by_the_same_call_alone(tmp_path):
    options = {"workdir": tmp_path, "steps": 2}
    first = fit(**options)
    of_upper, _ = problems.sources(seed=1)
    others = {
        "another configuration": {"seed": 1},
        "the upper data hold other values": {"upper_source": of_upper},
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=rf"{message}.*resume='overwrite'"):
            fit(**options, **other)
        over = fit(**options, **other, resume="overwrite")
        assert same(over, fit(steps=2, **other))
        assert "resumed" not in over.summary
        assert same(fit(**options, resume="overwrite"), first)
    assert same(fit(**options), first)
    with pytest.raises(ValueError, match="fit_bilevel: resume is 'yes'; allowed are True"):
        fit(**options, resume="yes")


def test_an_evaluation_that_is_not_finite_is_told_once(tmp_path, capsys):
    of_upper, _ = problems.sources()

    def metrics(y, batch):
        return {"error": batch["targets"] * np.nan}

    options = {"eval_source": of_upper, "metrics_fn": metrics, "workdir": tmp_path}
    result = fit(steps=2, **options)
    assert capsys.readouterr().err.count("evaluated after 1 outer steps: test_error nan") == 1
    assert "test error not finite" in " ".join(repr(result).split())
    report = (tmp_path / "report.html").read_text()
    assert "test error was not finite at 2 of 2 evaluations" in report


def test_a_level_whose_source_changes_is_told_of_once(capsys):
    _, of_lower = problems.sources()

    def disturb(report):
        of_lower["targets"] += 1

    fit(steps=3, lower_source=of_lower, callbacks=[disturb])
    assert capsys.readouterr().err.count("the source (ArraySource) changes while it is used") == 1


def test_a_save_that_is_due_is_done_once(tmp_path, monkeypatch):
    due, saved, save = iter([True]), [], keeper.Keeper.save

    def noted(self, arrays, **options):
        saved.append(options["done"])
        save(self, arrays, **options)

    monkeypatch.setattr(keeper.Keeper, "is_due", lambda self: next(due, False))  # after a step
    monkeypatch.setattr(keeper.Keeper, "save", noted)
    fit(workdir=tmp_path, steps=4)
    assert saved == [2, 4]  # by the next step, which all processes hear of; at the end


def test_the_seconds_of_a_run_are_those_of_its_calls(tmp_path):
    began = time.perf_counter()
    first = fit(workdir=tmp_path, steps=1)
    half = time.perf_counter()
    second = fit(workdir=tmp_path, steps=2)
    ended = time.perf_counter()
    assert 0 < first.summary["wall_secs"] < half - began
    assert first.summary["wall_secs"] < second.summary["wall_secs"] < ended - began
