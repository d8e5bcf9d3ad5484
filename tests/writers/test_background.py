"""What a run hands to its writers, and what becomes of a writer that is slow, or that raises."""

import json
import threading
import time

import numpy as np
import optax
import pytest

import hetjax
from hetjax import writers
from hetjax.writers import background, records
from tests.bilevel.rounds import test_fitting as levels
from tests.own_parts import writer as own
from tests.rounds import problems

DATA = problems.classification(64, np.float32)


def fit(**fields):
    weights = problems.initial_weights(np.float32)
    return problems.fit(DATA, weights, **{"workers": 2, "epochs": 2, **fields})


class Kept:
    """Keeps what it is given, and in which thread."""

    def __init__(self, every_secs=0.0):
        self.every_secs = every_secs
        self.records, self.ends, self.threads = [], [], set()

    def write(self, record):
        self.threads.add(threading.get_ident())
        self.records.append(record)

    def close(self, ended):
        self.ends.append(ended)

    @property
    def steps(self):
        return [record.step for record in self.records]


def test_a_writer_gets_every_line_of_the_run_and_its_end(tmp_path):
    kept = Kept()
    result = fit(writers=[kept], workdir=tmp_path, eval_source=DATA)
    assert [record.line for record in kept.records] == result.history
    assert kept.threads.isdisjoint({threading.get_ident()})
    (ended,) = kept.ends
    assert ended.status == "finished"
    assert (ended.summary, ended.run.config) == (result.summary, result.config)
    assert ended.report == (tmp_path / "report.html").read_text()
    assert ended.run.workdir == tmp_path


def test_a_slow_writer_gets_evaluations_and_the_newest_record():
    kept = Kept(every_secs=3600.0)
    fit(writers=[kept], eval_source=DATA, epochs=4, max_rounds=7)
    assert kept.steps == [1, 3, 5, 6]  # three epochs, and the last round
    assert all("eval/loss" in record.scalars for record in kept.records)
    bare = Kept(every_secs=3600.0)
    fit(writers=[bare], epochs=4)
    assert bare.steps == [7]


def test_between_two_writes_only_the_newest_record_is_kept():
    kept = Kept(every_secs=0.05)
    handed = background.Background([kept], records.RunInfo({}))
    for step in range(300):
        handed.put({"round": step, "loss": 0.5})
        time.sleep(0.001)
    handed.close("finished")
    assert kept.steps[-1] == 299
    assert 2 <= len(kept.steps) < 150
    assert kept.steps == sorted(set(kept.steps))


def test_a_writer_that_raises_is_told_once_and_left_alone(capsys):
    class Broken(Kept):
        def write(self, record):
            super().write(record)
            raise OSError("disk full")

    broken, kept = Broken(), Kept()
    result = fit(writers=[broken, kept], epochs=4)
    assert len(result.history) == len(kept.records) == 8
    assert (len(broken.records), broken.ends, len(kept.ends)) == (1, [], 1)
    said = capsys.readouterr().err
    assert said.count("the writer Broken raised OSError: disk full; it gets no more") == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_fails_writes_all_and_says_so(error):
    def fail(report):
        if report.round == 2:
            raise error

    kept = Kept()
    with pytest.raises(error):
        fit(writers=[kept], callbacks=[fail], epochs=50)
    assert kept.steps == [0, 1, 2]
    assert kept.ends[0].status == ("failed" if error is RuntimeError else "interrupted")


def test_a_bilevel_run_hands_over_its_outer_steps():
    kept = Kept()
    result = levels.fit(writers=[kept])
    assert [record.line for record in kept.records] == result.history
    scalars = kept.records[-1].scalars
    assert scalars["train/upper_loss"] == result.history[-1]["upper_loss"]
    assert any(name.endswith("/workers/0/quota") for name in scalars)
    assert kept.ends[0].summary["outer_steps"] == len(result.history)


def test_a_loop_of_ones_own_hands_its_reports_over(tmp_path):
    kept = Kept()
    given = (problems.softmax_loss, problems.initial_weights(np.float32), optax.sgd(0.1), DATA)
    run = hetjax.Run(*given, workers=2, budget=4, microbatch_size=4)
    with run, writers.sending([kept], config=run.recorded, workdir=tmp_path) as send:
        state = run.init()
        for _ in range(3):
            state, report = run.round(state)
            send(report)
    assert kept.steps == [0, 1, 2]
    assert kept.records[2].line == report.read().to_plain()
    assert kept.ends[0].run.config["budget"] == 4
    with pytest.raises(RuntimeError), writers.sending([kept]):
        raise RuntimeError
    assert [ended.status for ended in kept.ends] == ["finished", "failed"]


def test_the_own_writer_of_the_page_writes_evaluations(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    result = fit(writers=[own.JsonLines(path)], eval_source=DATA, seed=5)
    *found, ended = map(json.loads, path.read_text().splitlines())
    assert [line["eval/loss"] for line in found] == [
        line["eval"]["test_loss"] for line in result.history if "eval" in line
    ]
    assert ended == {"status": "finished", "seed": 5}


@pytest.mark.parametrize("wrong", ["csv", Kept(), [Kept(), object()]])
def test_what_is_no_list_of_writers_is_refused(wrong):
    with pytest.raises(ValueError, match=r"writers: got .* give a list of objects with write"):
        fit(writers=wrong)
