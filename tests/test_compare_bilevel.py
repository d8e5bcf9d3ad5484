"""The comparison of hypergradients: its runs, made small, and its report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import compare_bilevel
from experiments.bilevel import comparison, problems, results, settings, sinusoids, tasks, tuning
from tests.promotion import casts_of_optax  # noqa: F401


@pytest.fixture
def small(monkeypatch):
    """Tasks of a few steps on few images."""
    fields = {
        "data": {"num_train": 60, "num_validation": 40, "num_test": 200},
        "upper": {"steps": 5},
        "estimator": {},
    }
    arms = {name: {"estimator": {"name": name, "steps": 5}} for name in ("value_gap", "unrolled")}
    task = tasks.Task("digits_400", "Digits, few", fields, (0, 1), arms)
    monkeypatch.setattr(tasks, "TASKS", {"digits_400": task})
    monkeypatch.setattr(tasks, "RIDGES", (1e-3, 1e-2))
    monkeypatch.setattr(tuning, "NUM_HYPERGRADIENTS", 2)
    monkeypatch.setattr(tuning, "STEPS", 5)
    return task


@pytest.mark.slow
def test_the_report_is_made_of_the_runs_that_are_there(small, tmp_path):
    records = [tasks.run(small, arm, seed, None) for seed in (0, 1) for arm in small.arms]
    results.write(tmp_path, small.name, map(results.short, records))
    results.write(tmp_path, "tuning", map(results.short, tuning.run(0)))
    found = [sinusoids.run(arm, 5, 0, num_updates=3) for arm in ("MAML", "joint training")]
    results.write(tmp_path, "sinusoids", map(results.short, found))
    text = comparison.write(tmp_path).read_text()
    for words in ("value gap", "unrolled (RHG)", "oracle", "random search", "MAML", "Digits, few"):
        assert words in text
    assert "digits_400.png" in {path.name for path in tmp_path.iterdir()}
    row = next(line for line in text.splitlines() if line.startswith("| value gap |"))
    mean = np.mean([100 * r["test_accuracy"] for r in records if r["arm"] == "value_gap"])
    assert f"{mean:.2f} ±" in row
    read = results.read(tmp_path, small.name)
    assert len(read) == 4
    assert read["value_gap", 1]["settings"]["data"]["num_train"] == 60


def test_every_task_is_a_valid_configuration_with_every_family():
    for task in tasks.TASKS.values():
        for arm in task.arms:
            assert task.config(arm, 0, None).estimator.name == arm
    families = set(settings.ESTIMATORS) - {"unrolled_checkpointed"}  # the same numbers
    for name in ("digits_400", "fashion_linear", "fashion_mlp"):
        assert set(tasks.TASKS[name].arms) == families


def test_the_two_ways_of_tuning_do_the_same_work(monkeypatch):
    monkeypatch.setattr(tuning, "NUM_HYPERGRADIENTS", 3)
    monkeypatch.setattr(tuning, "STEPS", 10)
    ours, random = tuning.run(0)
    work = ours["curve"][-1][0]
    assert work <= random["curve"][-1][0] < work * 1.1
    assert random["points"] > 4 * ours["points"]
    assert all(np.diff([loss for _, loss in ours["curve"]]) <= 0)


@pytest.mark.slow
def test_the_gradient_of_a_start_is_that_of_its_definition():
    batches = sinusoids.tasks(jax.random.key(1), 3, 5, 5)
    start = sinusoids.init(0)

    def after_a_step(start):
        def of_task(batches):
            grads = jax.grad(sinusoids.loss, 1)((), start, batches.lower)
            y = jax.tree.map(lambda a, g: a - sinusoids.RATE * g, start, grads)
            return sinusoids.loss((), y, batches.upper)

        return jnp.mean(jax.vmap(of_task)(batches))

    found = sinusoids.gradient(sinusoids.ARMS["MAML"], start, batches)
    expected = jax.grad(after_a_step)(start)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_task_that_diverges_is_counted_and_leaves_the_median(monkeypatch, tmp_path):
    errors = np.ones((600, 11))
    errors[3, 10], errors[7, 5:] = 1e17, np.nan
    monkeypatch.setattr(sinusoids, "errors", lambda *given, **named: jnp.asarray(errors))
    found = sinusoids.run("MAML", 5, 0, num_updates=1)
    assert found["diverged"] == {"0": 0, "1": 0, "5": 1, "10": 2}
    assert found["errors"]["1"] == 1
    results.write(tmp_path, "sinusoids", [results.short(found)])
    text = comparison.write(tmp_path).read_text()
    assert "| 1 (1) |" in text
    assert "2 of 600" in text


def test_every_kept_run_of_a_problem_is_one_that_would_be_made():
    """The lines in the repository: all seeds of all arms, by the files in configs/."""
    directory = compare_bilevel.ROOT / "experiments/results/bilevel"
    for task in ("sinusoids", *problems.ARMS):
        keys = {key for keys, _ in compare_bilevel.jobs(task, 0, None, 10_000) for key in keys}
        assert keys == set(results.read(directory, task))
