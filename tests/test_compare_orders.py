"""The study of example orders: its runs, that it resumes, its tuning, and its report."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.comparisons import kept
from experiments.orders import arms, herding, jobs, results, schedule, study, timing
from tests.order_study import BALANCED, BASE, TINY, record_of

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
    other = dataclasses.replace(TINY, changes={**TINY.changes, "epochs": 4})
    with pytest.raises(ValueError, match=r"other settings than tiny has now; delete"):
        results.read_records(directory, other)
    records = results.read_records(directory, TINY)
    assert set(records) == {(arm, 0.05, seed) for arm in TINY.arms for seed in (0, 1)}
    assert count == len(records) == len(results.path_of(directory).read_text().splitlines())
    for record in records.values():
        assert len(record["train_losses"]) == len(record["metric_values"]) == 3
        assert record["metric"] == "test_accuracy"
        assert record["examples_missing"] == record["examples_duplicated"] == 0
        assert record["train_losses"][-1] < record["train_losses"][0] < math.log(10)
        assert record["quotas"] == [[0, [1, 1, 1, 1]]]


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
    ("best_rate", "asked"), [(0.2, []), (0.1, [0.05]), (0.05, [0.025]), (0.4, [0.8]), (0.8, [1.6])]
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


def test_herding_bounds_are_measured_once_of_tuned_runs(found, tmp_path):
    directory, data_dir = tmp_path, found[2]
    task = dataclasses.replace(TINY, name="balanced", arms=(BASE, BALANCED), seeds=(0,))
    options = {"data_dir": data_dir, "num_jobs": 0}
    herding_of = {**options, "kind": results.HERDING}
    assert schedule.run_all([task], directory, **herding_of) == 0  # nothing is trained yet
    assert schedule.run_all([task], directory, **options) == 2
    made = results.read_records(directory, task)
    (once,) = (record["secs"] for key, record in made.items() if key[0] == BALANCED)
    assert schedule.plan([task], directory, results.HERDING) == {"balanced": (1, once)}
    assert schedule.run_all([task], directory, **herding_of) == 1  # of D-GraB
    assert schedule.run_all([task], directory, **herding_of) == 0
    assert schedule.plan([task], directory, results.HERDING) == {"balanced": (0, 0)}
    (record,) = results.read_records(directory, task, results.HERDING).values()
    assert record["epochs"] == [1, 2, 3]
    ratios = np.divide(record["two_norm"], record["random_two_norm"])
    assert ((ratios > 0.05) & (ratios < 2)).all()
    assert herding.wanted(task, {}, {}) == []


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
