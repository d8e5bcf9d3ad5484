"""The study of example orders: its runs, that it resumes, its tuning, and its report."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import hetjax
from experiments.comparisons import kept
from experiments.orders import (
    arms,
    herding,
    jobs,
    results,
    runs,
    schedule,
    study,
    tables,
    timing,
)
from experiments.orders.tasks import Run
from tests.order_study import BALANCED, BASE, TINY, record_of

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A directory with all runs of TINY, their number, and where the data lie."""
    directory, data_dir = tmp_path_factory.mktemp("orders"), tmp_path_factory.mktemp("data")
    count = schedule.run_all([TINY], directory, data_dir=str(data_dir), num_jobs=0)
    return directory, count, str(data_dir)


# Runs


def test_each_run_leaves_one_line_with_its_losses(found):
    directory, count, _ = found
    records = results.read_records(directory, TINY)
    assert set(records) == {(arm, 0.05, seed) for arm in TINY.arms for seed in (0, 1)}
    assert count == len(records) == len(results.path_of(directory).read_text().splitlines())
    for record in records.values():
        assert len(record["train_losses"]) == len(record["metric_values"]) == 3
        assert record["metric"] == "test_accuracy"
        assert record["examples_missing"] == record["examples_duplicated"] == 0
        assert record["train_losses"][-1] < record["train_losses"][0] < math.log(10)
        assert record["quotas"] == [[0, [1, 1, 1, 1]]]


def test_runs_of_a_task_differ_in_their_order_alone(found):
    (first, second) = (runs.open_run(Run(TINY, arm, 0.05, 1), found[2]) for arm in TINY.arms)
    jax.tree.map(np.testing.assert_array_equal, first.task.params, second.task.params)
    methods = [opened.config.ordering.method for opened in (first, second)]
    assert methods == ["random_reshuffling", "fixed_map"]
    same = dataclasses.replace(second.config, ordering=first.config.ordering)
    assert first.config == same
    assert (first.config.seed, first.config.optimizer.learning_rate) == (1, 0.05)


def test_the_training_loss_is_that_of_every_so_many_th_example(found):
    opened = runs.open_run(Run(TINY, BASE, 0.05, 0), found[2])
    assert len(opened.task.train) == 128
    np.testing.assert_array_equal(
        opened.evals["train"].arrays["label"], opened.task.train.arrays["label"][::2]
    )
    assert [len(source) for source in opened.evals.values()] == [64, 32]


def test_a_second_call_runs_nothing_and_a_lost_run_alone_is_done_again(found):
    directory, _, data_dir = found
    again = {"data_dir": data_dir, "num_jobs": 0}
    assert schedule.run_all([TINY], directory, **again) == 0
    path, key = results.path_of(directory), ("fixed_map", 0.05, 0)
    before = results.read_records(directory, TINY)[key]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line) != before))
    assert schedule.run_all([TINY], directory, minutes=-1, **again) == 0  # out of time
    assert schedule.run_all([TINY], directory, **again) == 1
    after = results.read_records(directory, TINY)[key]
    assert after["train_losses"] == before["train_losses"]


def test_a_run_that_fails_is_told_and_the_others_are_done(found, tmp_path, monkeypatch):
    done = []

    def train(run, data_dir):
        if run.arm == "fixed_map":
            raise ValueError("no such thing")
        done.append(run.seed)
        named = {"arm": run.arm, "learning_rate": 0.05, "seed": run.seed}
        return record_of([0.5] * 3, **named, secs=1.0)

    monkeypatch.setattr(runs, "train", train)
    with pytest.raises(RuntimeError, match=r"failed:\ntiny fixed_map-lr0.05-seed0: no such thing$"):
        schedule.run_all([TINY], tmp_path, data_dir=None, num_jobs=0)
    assert done == [0, 1]


def test_a_task_whose_runs_fail_alike_is_given_up(tmp_path, monkeypatch):
    tried = []

    def train(run, data_dir):
        tried.append(run.name)
        raise ValueError("there is no data")

    monkeypatch.setattr(runs, "train", train)
    other = dataclasses.replace(TINY, name="other")
    with pytest.raises(RuntimeError, match=r"^Runs that failed:\ntiny .* data\nother .* data$"):
        schedule.run_all([TINY, other], tmp_path, data_dir=None, num_jobs=0)
    assert len(tried) == 4


def test_a_wrong_directory_is_told_in_a_line_and_a_wrong_task_with_what_was_meant(tmp_path):
    def told(*given):
        program = [sys.executable, "-m", "experiments.compare_orders", f"--directory={tmp_path}"]
        done = subprocess.run([*program, *given], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2
        return done.stderr.strip().splitlines()

    lines = told("--only=m4_weekly", "--stage=run", f"--data_dir={tmp_path}", "--jobs=1")
    assert lines[-2] == "Runs that failed:"
    assert "m4_weekly" in lines[-1]
    assert "missing" in lines[-1]
    assert "Did you mean m4_weekly?" in told("--only=m4_weakly")[-1]


def test_results_of_other_settings_are_refused(found):
    directory, *_ = found
    other = dataclasses.replace(TINY, changes={**TINY.changes, "epochs": 4})
    with pytest.raises(ValueError, match=r"other settings than tiny has now; delete"):
        results.read_records(directory, other)


def test_settings_name_all_that_is_not_as_by_default_but_what_names_a_run():
    fields = TINY.settings["config"]
    assert fields["model.name"] == "logistic"
    assert fields["data.num_train"] == 128
    assert not {"seed", "data.dir", "optimizer.learning_rate", "ordering.method"} & set(fields)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, found):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hetjax, "fit", interrupted)
    path = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt):
        jobs.do("experiments.orders.runs:train", Run(TINY, BASE, 0.1, 0), found[2], path=path)
    assert not list(tmp_path.iterdir())


# Tuning


def test_tuning_comes_first_then_the_seeds_at_the_own_rate_and_at_the_same_rate():
    rates = (0.1, 0.2, 0.4)
    task = dataclasses.replace(
        TINY, learning_rates=rates, same_rate=0.4, arms=(BASE, BALANCED, "shuffle_once")
    )
    records = {}
    tuning = [run.key for run in results.wanted(task, records)]
    assert tuning[:6] == [(arm, rate, 0) for arm in (BASE, BALANCED) for rate in rates]
    assert {key[1:] for key in tuning[6:]} == {(0.4, 0), (0.4, 1)}
    for arm, rate, seed in tuning[:6]:
        records[arm, rate, seed] = record_of([abs(rate - 0.2)] * 3, task)
    keys = [run.key for run in results.wanted(task, records)]
    own = [("shuffle_once", 0.2, 0), *((arm, 0.2, 1) for arm in task.arms)]
    same = [("shuffle_once", 0.4, 0), *((arm, 0.4, 1) for arm in task.arms)]
    assert keys == [*own, *same]
    task = dataclasses.replace(task, same_rate=0.0)
    assert [run.key for run in results.wanted(task, records)] == own


@pytest.mark.parametrize(
    ("best_rate", "asked"),
    [(0.2, []), (0.1, [0.05]), (0.05, [0.025]), (0.4, [0.8]), (0.8, [1.6])],
)
def test_the_grid_goes_on_where_the_best_rate_is_at_its_end(best_rate, asked):
    task = dataclasses.replace(TINY, learning_rates=(0.1, 0.2, 0.4), seeds=(0,), arms=(BASE,))
    records = {}
    while missing := results.wanted(task, records):
        run = missing[0]
        loss = abs(math.log(run.learning_rate / best_rate))
        records[run.key] = record_of([loss] * 3, task)
    rates = {rate for _, rate, _ in records}
    assert results.tuned_rate(task, records, BASE) == best_rate
    assert min(rates) < best_rate < max(rates)
    assert rates >= {0.1, 0.2, 0.4, *asked}


def test_a_grid_does_not_grow_for_ever():
    task = dataclasses.replace(TINY, learning_rates=(0.1, 0.2, 0.4), seeds=(0,), arms=(BASE,))
    records = {}
    while missing := results.wanted(task, records):
        records[missing[0].key] = record_of([1 / missing[0].learning_rate] * 3, task)
    assert len(records) == results.MOST_RATES
    own = results.Arms(task, records, results.tuned_rates(task, records), {})
    extended, at_end = tables.tuning(own, records)
    assert "D-RR was extended by 0.8, 1.6, 3.2, 6.4" in extended
    assert "not surely tuned" in at_end


def test_the_learning_rate_is_that_of_the_lowest_loss_with_the_first_seed():
    task = dataclasses.replace(TINY, learning_rates=(0.02, 0.05, 0.1))
    records = {
        (BALANCED, 0.02, 0): record_of([0.9, 0.8, 0.7]),
        (BALANCED, 0.05, 0): record_of([0.9, 0.4, 0.6]),
        (BALANCED, 0.1, 0): record_of([0.9, None], diverged=True),
        (BALANCED, 0.1, 1): record_of([0.1, 0.1, 0.1]),
    }
    assert results.tuned_rate(task, records, BALANCED) == 0.05
    assert results.tuned_rate(task, records, "shuffle_once") == 0.05  # the leader's
    assert results.tuned_rate(task, records, BASE) is None
    del records[BALANCED, 0.1, 0]
    assert results.tuned_rate(task, records, BALANCED) is None
    assert results.tuned_rate(task, records, BALANCED, so_far=True) == 0.05
    assert results.best(record_of([0.9, None])) == 0.9
    assert results.final(record_of([0.9, None])) == math.inf


# Measurements


def test_epochs_are_timed_and_a_timed_task_is_not_timed_again(found, monkeypatch):
    directory, _, data_dir = found
    monkeypatch.setattr(timing, "_BLOCK_SECS", 0.01)
    secs = timing.epoch_secs(TINY, data_dir, repeats=2)
    assert set(secs) == set(TINY.arms)
    assert all(len(values) == 2 and min(values) > 0 for values in secs.values())
    timed = {"tiny": {"settings": TINY.settings, "secs": secs}}
    jobs.write(directory / results.RUNS / results.EPOCH_SECS, timed)
    monkeypatch.setattr(timing, "epoch_secs", lambda *_: pytest.fail("it was timed"))
    schedule.time_all([TINY], directory, data_dir=data_dir, num_jobs=0)
    assert results.read_secs(directory, TINY) == secs


def test_an_order_made_anew_of_every_second_epoch_is_timed_over_as_many_of_both(monkeypatch):
    task = dataclasses.replace(TINY, arms=(BASE, arms.SAVING))

    class Endless:
        """A run whose rounds of every second epoch take twice as long, by a clock of its own."""

        def __init__(self, *, arm):
            self.epoch_secs = (2.0, 1.0) if arm == arms.SAVING else (1.0, 1.0)
            self.signed = [0, 0]

        __enter__ = init = lambda self: self
        __exit__ = settle = lambda self, *_: None
        stream = property(lambda self: self)
        examples_processed = property(lambda self: sum(self.signed) * task.batch_size)

        def round(self, state):
            epoch = sum(self.signed) // task.epoch_rounds
            self.signed[epoch % 2] += 1
            clock[0] += self.epoch_secs[epoch % 2] / task.epoch_rounds
            return state, None

    class Opened:
        def __init__(self, arm):
            self.arm = arm

        def arguments(self):
            return {"arm": self.arm}

    clock = [0.0]
    monkeypatch.setattr(timing.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(runs, "open_run", lambda run, *_: Opened(run.arm))
    monkeypatch.setattr(hetjax, "Run", Endless)
    secs = timing.epoch_secs(task, None, repeats=3)
    assert secs[BASE] == pytest.approx([1.0] * 3)
    assert secs[arms.SAVING] == pytest.approx([1.5] * 3)
    assert all(len(values) == 3 for values in secs.values())


def test_herding_bounds_are_measured_once_of_tuned_runs(found):
    directory, _, data_dir = found
    task = dataclasses.replace(TINY, name="balanced", arms=(BASE, BALANCED), seeds=(0,))
    options = {"data_dir": data_dir, "num_jobs": 0}
    herding_of = {**options, "kind": results.HERDING}
    assert schedule.run_all([task], directory, **herding_of) == 0  # nothing is trained yet
    assert schedule.run_all([task], directory, **options) == 2
    (once,) = (
        r["secs"] for key, r in results.read_records(directory, task).items() if key[0] == BALANCED
    )
    assert schedule.plan([task], directory, results.HERDING) == {"balanced": (1, once)}
    assert schedule.run_all([task], directory, **herding_of) == 1  # of D-GraB
    assert schedule.run_all([task], directory, **herding_of) == 0
    assert schedule.plan([task], directory, results.HERDING) == {"balanced": (0, 0)}
    (record,) = results.read_records(directory, task, results.HERDING).values()
    assert record["epochs"] == [1, 2, 3]
    ratios = np.divide(record["two_norm"], record["random_two_norm"])
    assert ((ratios > 0.05) & (ratios < 2)).all()
    assert herding.wanted(task, {}, {}) == []


def test_under_adam_the_bounds_are_told_in_both_metrics(found):
    task = dataclasses.replace(
        TINY, changes={**TINY.changes, "optimizer.name": "adam", "epochs": 1}, seeds=(0,)
    )
    record = herding.measure(Run(task, BASE, 0.01, 0), found[2])
    table = tables.herding_table({(BASE, 0.01, 0): record})
    of_adam = [f"{norm}-norm, gradients over √v̂" for norm in "2∞"]
    assert table.header[2:] == ["2-norm", "∞-norm", *of_adam]
    (row,) = table.rows
    ratio = record["preconditioned_two_norm"][0] / record["random_preconditioned_two_norm"][0]
    assert row[4] == f"{ratio:.2f}"
    kept = tables.kept_balance({(BASE, 0.01, 0): record}, BASE, "preconditioned_")
    assert kept == pytest.approx(ratio)
    assert tables.herding_table({}) is None


def test_a_preconditioned_run_differs_in_its_order_alone(found):
    task = dataclasses.replace(TINY, changes={**TINY.changes, "optimizer.name": "adam"})
    config = task.configured(Run(task, "d_grab_preconditioned", 0.01, 0), found[2])
    plain = task.configured(Run(task, "d_grab", 0.01, 0), found[2])
    assert (config.ordering.method, config.ordering.precondition) == ("d_grab", True)
    assert dataclasses.replace(config, ordering=plain.ordering) == plain


# The tasks


@pytest.mark.parametrize("task", study.TASKS.values(), ids=list(study.TASKS))
def test_every_task_of_the_study_fits_its_configuration_and_its_orders(task):
    assert set(task.arms) <= set(arms.ARMS)
    assert {arms.BASELINE, arms.LEADER} <= set(task.arms)
    assert list(task.learning_rates) == sorted(task.learning_rates)
    config = task.experiment
    assert config.optimizer.schedule == "constant"
    if config.data.sharing == "private":
        shard = config.cluster.num_workers * config.microbatch_size
        assert config.data.num_train % shard == 0 < config.data.num_train
    for change in config.cluster.changes:
        assert 0 < change.round < task.num_rounds


def test_results_in_the_repository_are_of_the_tasks_as_they_are():
    directory = results.DIRECTORY
    for kind in (results.RUNS, results.HERDING):
        for task in study.TASKS.values():
            results.read_records(directory, task, kind)
        names = {record["task"] for record in kept.read(results.path_of(directory, kind))}
        assert names <= set(study.TASKS)
