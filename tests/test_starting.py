"""What goes on before the first round is said, and its seconds are kept."""

import time

import numpy as np
import optax
import pytest

import hetjax
from hetjax import starting
from tests.rounds import problems


def test_a_line_is_written_anew_as_long_as_a_stage_lasts(monkeypatch, capsys):
    monkeypatch.setattr(starting, "_AFTER_SECS", 0.0)
    monkeypatch.setattr(starting, "_PERIOD_SECS", {True: 0.01, False: 0.01})
    with starting.Starting(shown=True) as begins, begins.stage("compiling"):
        said, deadline = "", time.monotonic() + 60
        for detail in ("worker 1", "worker 2"):
            begins.detail(detail)
            while detail not in said and time.monotonic() < deadline:
                time.sleep(0.01)
                said += capsys.readouterr().err
    assert "hetjax: compiling worker 1, 0 s" in said
    assert "compiling worker 2" in said
    assert begins.secs["compiling"] > 0


@pytest.mark.parametrize("shown", [False, True])
def test_what_is_short_or_not_to_be_shown_is_not(shown, capsys):
    with starting.Starting(shown=shown) as begins:
        begins.detail("nothing")
        for _ in range(2):
            with begins.stage("reading"):
                pass
    assert capsys.readouterr().err == ""
    assert list(begins.secs) == ["reading"]


def test_a_run_says_which_worker_compiles_and_keeps_the_seconds(monkeypatch, tmp_path):
    details = []
    monkeypatch.setattr(starting.Starting, "detail", lambda self, text: details.append(text))
    given = (problems.classification(64, np.float32), problems.initial_weights(np.float32))
    result = problems.fit(*given, epochs=1, workdir=tmp_path)
    workers = [text for text in details if text.startswith("worker")]
    assert workers[:4] == [f"worker {index} of 4" for index in range(1, 5)]
    start = result.summary["start"]
    assert 0 < start["compiling"] < start["first_round"]
    assert "First round after" in (tmp_path / "report.html").read_text()


IDLE = "budget: 3 microbatches a round leave 1 of 4 workers idle"
LARGE = "microbatch_size: 9 examples, but the data has 8"
FOUR = {"workers": 4, "microbatch_size": 2, "local": "virtual"}


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        (IDLE, {**FOUR, "budget": 3}, True),
        (IDLE, {**FOUR, "budget": 4, "data": {"sharing": "private"}}, False),
        (LARGE, {"workers": 1, "microbatch_size": 8}, False),
        (LARGE, {"workers": 1, "microbatch_size": 9}, True),
    ],
)
def test_idle_workers_and_a_microbatch_larger_than_the_data_are_told_of(
    words, fields, said, capsys
):
    data = problems.classification(8, np.float32)
    given = (problems.softmax_loss, problems.initial_weights(np.float32), optax.sgd(0.1), data)
    with hetjax.Run(*given, **fields):
        assert (words in capsys.readouterr().err) == said
