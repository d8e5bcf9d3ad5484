"""What a bilevel run keeps in its workdir, and what may write over it."""

import time

import pytest

from hetjax.records import checkpoint_manager
from tests.bilevel.rounds import problems
from tests.bilevel.rounds.test_fitting import fit, same


@pytest.mark.slow
def test_a_finished_run_is_written_over_by_the_same_call_alone(tmp_path):
    options, other = {"workdir": tmp_path, "steps": 2}, {"upper_source": problems.sources(1)[0]}
    first = fit(**options)
    assert same(fit(**options), first)
    with pytest.raises(ValueError, match=r"another configuration.*resume='overwrite'"):
        fit(**options, seed=1)
    with pytest.raises(ValueError, match=r"the upper data hold other values.*resume='overwrite'"):
        fit(**options, **other)
    over = fit(**options, **other, resume="overwrite")
    assert same(over, fit(steps=2, **other))
    assert not same(over, first)
    assert "resumed" not in over.summary
    with pytest.raises(ValueError, match="fit_bilevel: resume is 'yes'; allowed are True"):
        fit(**options, resume="yes")


def test_a_save_that_is_due_is_done_once(tmp_path, monkeypatch):
    due, saved, save = iter([True]), [], checkpoint_manager.CheckpointManager.save

    def noted(self, arrays, about):
        saved.append(about["rounds"])
        save(self, arrays, about)

    monkeypatch.setattr(
        checkpoint_manager.CheckpointManager, "is_due", lambda self: next(due, False)
    )  # after a step
    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "save", noted)
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
