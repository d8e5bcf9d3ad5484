"""The comparison of example orders: its runs, that it resumes, and its report."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import hetjax
from experiments import compare_orders
from experiments.comparisons import order_report, order_results, order_tasks

pytestmark = pytest.mark.slow

TINY = dataclasses.replace(
    order_tasks.MNIST,
    name="tiny",
    title="Digits",
    dataset="digits",
    input_max=16.0,
    num_train=128,
    num_test=32,
    epochs=3,
    learning_rates=(0.05,),
    same_rate=0.0,
    seeds=(0, 1),
    arms=("random_reshuffling", "fixed_map"),  # they compile fastest
)


def record_of(losses, task=TINY, **fields):
    return {
        "train_losses": losses,
        "test_accuracies": [0.5] * len(losses),
        "settings": task.settings(),
        "quotas": [],
    } | fields


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A directory with all runs of TINY, their number, and where the data lie."""
    directory, data_dir = tmp_path_factory.mktemp("orders"), tmp_path_factory.mktemp("data")
    count = compare_orders.run_all([TINY], directory, data_dir=str(data_dir), jobs=0)
    return directory, count, str(data_dir)


def test_each_run_leaves_one_file_with_its_losses(results):
    directory, count, _ = results
    records = order_results.read_records(directory, TINY)
    assert set(records) == {(method, 0.05, seed) for method in TINY.arms for seed in (0, 1)}
    assert count == len(records) == len(list((directory / "runs" / "tiny").iterdir()))
    for record in records.values():
        assert len(record["train_losses"]) == len(record["test_accuracies"]) == TINY.epochs
        assert record["examples_missing"] == record["examples_duplicated"] == 0
        assert record["train_losses"][-1] < record["train_losses"][0] < math.log(10)
        assert record["quotas"] == [[0, [1, 1, 1, 1]]]


def test_runs_of_a_task_differ_in_their_order_alone(results, monkeypatch):
    calls = []
    monkeypatch.setattr(hetjax, "fit", lambda *args, **fields: calls.append((args, fields)))
    for method in TINY.arms:
        compare_orders.fit(order_tasks.Run(TINY, method, 0.05, 1), results[2])
    (first_args, first), (second_args, second) = calls
    jax.tree.map(np.testing.assert_array_equal, first_args[1], second_args[1])
    assert (first.pop("ordering"), second.pop("ordering")) == (
        {"method": "random_reshuffling"},
        {"method": "fixed_map"},
    )
    del first["metrics_fn"], second["metrics_fn"]
    assert first == second
    assert first["seed"] == 1


def test_tuning_comes_first_then_the_seeds_at_the_own_rate_and_at_the_same_rate():
    task = dataclasses.replace(TINY, learning_rates=(0.1, 0.2), same_rate=0.2)
    base, other = task.arms
    records = {}
    tuning = compare_orders.wanted(task, records)[:4]
    assert [run.key for run in tuning] == [
        (base, 0.1, 0),
        (other, 0.1, 0),
        (base, 0.2, 0),
        (other, 0.2, 0),
    ]
    for (method, rate, seed), loss in zip((run.key for run in tuning), (1, 2, 2, 1), strict=True):
        records[method, rate, seed] = record_of([float(loss)] * 3, task)
    keys = [run.key for run in compare_orders.wanted(task, records)]
    assert keys == [(base, 0.1, 1), (other, 0.2, 1), (base, 0.2, 1)]
    task = dataclasses.replace(task, same_rate=0.0)
    assert [run.key for run in compare_orders.wanted(task, records)] == keys[:2]


def test_a_second_call_runs_nothing_and_a_lost_run_alone_is_done_again(results):
    directory, _, data_dir = results
    again = {"data_dir": data_dir, "jobs": 0}
    assert compare_orders.run_all([TINY], directory, **again) == 0
    path = compare_orders.path_of(directory, order_tasks.Run(TINY, "fixed_map", 0.05, 0))
    before = json.loads(path.read_text())
    path.unlink()
    assert compare_orders.run_all([TINY], directory, minutes=-1, **again) == 0  # out of time
    assert compare_orders.run_all([TINY], directory, **again) == 1
    after = json.loads(path.read_text())
    assert after["train_losses"] == before["train_losses"]


def test_results_of_other_settings_are_refused(results):
    directory, *_ = results
    with pytest.raises(ValueError, match=r"other settings than tiny has now; delete"):
        order_results.read_records(directory, dataclasses.replace(TINY, epochs=4))


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    class Result:
        summary = {"interrupted": True}  # noqa: RUF012

    monkeypatch.setattr(compare_orders, "fit", lambda *args: Result())
    with pytest.raises(KeyboardInterrupt):
        compare_orders.train(order_tasks.Run(TINY, "d_grab", 0.1, 0), tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_the_report_has_its_tables_and_pictures(results):
    directory, _, data_dir = results
    secs = compare_orders.epoch_secs(TINY, data_dir, repeats=2)
    assert set(secs) == set(TINY.arms)
    assert all(len(values) == 2 and min(values) > 0 for values in secs.values())
    kept = {"tiny": {"settings": TINY.settings(), "secs": secs}}
    (directory / "runs" / order_results.EPOCH_SECS).write_text(json.dumps(kept))
    variant = dataclasses.replace(TINY, name="variant", group="where")
    text = order_report.write(directory, [TINY, variant]).read_text()
    assert (directory / "tiny.png").read_bytes().startswith(b"\x89PNG")
    for part in ("## Digits", "![", "fixed map", "lowest training loss", "## Targets"):
        assert part in text
    assert "nan" not in text
    assert "Not complete" not in text
    assert "Not run yet" in text  # the variant


def test_the_learning_rate_is_that_of_the_lowest_loss_with_the_first_seed():
    task = dataclasses.replace(TINY, learning_rates=(0.05, 0.1))
    records = {
        ("d_grab", 0.05, 0): record_of([0.9, 0.4, 0.6]),
        ("d_grab", 0.1, 0): record_of([0.9, None], diverged=True),
        ("d_grab", 0.1, 1): record_of([0.1, 0.1, 0.1]),
    }
    assert order_results.tuned_rate(task, records, "d_grab") == 0.05
    del records["d_grab", 0.1, 0]
    assert order_results.tuned_rate(task, records, "d_grab") is None
    assert order_results.best(record_of([0.9, None])) == 0.9
    assert order_results.final(record_of([0.9, None])) == math.inf


def test_epochs_are_compared_seed_by_seed_and_the_time_with_the_cost_of_an_epoch():
    method, base = "d_grab", "random_reshuffling"
    records = {
        (base, 0.1, 0): record_of([0.9, 0.5, 0.6]),
        (base, 0.1, 1): record_of([0.9, 0.8, 0.7]),
        (method, 0.1, 0): record_of([0.5, 0.4, 0.3]),
        (method, 0.1, 1): record_of([0.9, 0.8, 0.7]),
    }
    rates = {method: 0.1, base: 0.1}
    arms = order_results.Arms(TINY, records, rates, {method: 3.0, base: 2.0})
    assert arms.ratios(method) == [1 / 2, 3 / 3]
    assert arms.ratios(method, of_time=True) == [0.75, 1.5]
    records[method, 0.1, 1] = record_of([0.9, 0.8, 0.71])
    assert order_results.Arms(TINY, records, rates, {}).ratios(method) == [0.5, math.inf]


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
    assert order_results.verdict(order_results.Stat.of(one), order_results.Stat.of(other)) == word


def test_every_task_of_the_program_fits_its_data_and_its_orders():
    from hetjax import config, ordering

    for task in order_tasks.TASKS.values():
        assert set(task.arms) <= set(ordering.ORDERINGS) & set(order_tasks.ARMS)
        assert order_tasks.BASELINE in task.arms
        fields = {"microbatch_size": task.microbatch_size, "budget": task.budget}
        checked = config.validate({**fields, **task.fields, "local": "virtual"})
        if task.fields["data"]["sharing"] == "private":
            assert task.num_train % (task.num_workers * task.microbatch_size) == 0
        for change in checked.cluster.changes:
            assert 0 < change.round < task.num_rounds
