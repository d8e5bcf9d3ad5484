"""The comparison of hypergradients: its runs, made small, and its report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import compare_bilevel
from experiments.bilevel import (
    baselines,
    comparison,
    problems,
    results,
    settings,
    sinusoids,
    tasks,
    tuning,
)
from experiments.bilevel import data as data_lib


@pytest.fixture(autouse=True)
def _promoting():
    """Optax raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


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
    long = tasks.TASKS["fashion_long"].config("unrolled", 0, "here")
    assert (long.data.name, long.data.dir, long.data.num_train) == ("fashion_mnist", "here", 5000)
    assert (long.estimator.steps, long.upper.learning_rate, long.eval_every) == (500, 1.0, 1)
    for name in ("fashion_linear", "fashion_long", "fashion_mlp"):
        task = tasks.TASKS[name]
        sizes = {task.config(arm, 0, None).data.block_size for arm in task.arms}
        assert len(sizes) == 1  # the same code for all
    mlp = tasks.TASKS["fashion_mlp"]
    assert len(mlp.seeds) == 3
    unrolled = mlp.config("unrolled", 0, None)
    assert (unrolled.model.name, unrolled.estimator.steps, unrolled.upper.steps) == ("mlp", 100, 20)
    families = set(settings.ESTIMATORS) - {"unrolled_checkpointed"}  # the same numbers
    for name in ("digits_400", "fashion_linear", "fashion_mlp"):
        assert set(tasks.TASKS[name].arms) == families


@pytest.mark.slow
def test_models_without_a_method_are_those_of_every_arm_of_a_seed(small):
    """They are trained once; each arm has the same, and trimming of its own."""
    ours, theirs = (tasks.run(small, arm, 0, None)["baselines"] for arm in small.arms)
    config = small.config("unrolled", 0, None)
    plain = baselines.run(config, data_lib.make(config.data, 0), 0.5)
    for name in ("polluted", "validation", "both", "oracle"):
        assert ours[name] == theirs[name] == plain[name]
    other = tasks.run(small, "unrolled", 1, None)["baselines"]
    assert other["both"] != ours["both"]


def test_the_two_ways_of_tuning_do_the_same_work(monkeypatch):
    monkeypatch.setattr(tuning, "NUM_HYPERGRADIENTS", 3)
    monkeypatch.setattr(tuning, "STEPS", 10)
    ours, random = tuning.run(0)
    work = ours["curve"][-1][0]
    assert work <= random["curve"][-1][0] < work * 1.1
    assert random["points"] > 4 * ours["points"]
    assert all(np.diff([loss for _, loss in ours["curve"]]) <= 0)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["MAML", "FOMAML"])
def test_the_gradient_of_a_start_is_that_of_its_definition(arm):
    batches = sinusoids.tasks(jax.random.key(1), 3, 5, 5)
    start = sinusoids.init(0)

    def after_a_step(start):
        def of_task(batches):
            grads = jax.grad(sinusoids.loss, 1)((), start, batches.lower)
            if arm == "FOMAML":
                grads = jax.lax.stop_gradient(grads)
            y = jax.tree.map(lambda a, g: a - sinusoids.RATE * g, start, grads)
            return sinusoids.loss((), y, batches.upper)

        return jnp.mean(jax.vmap(of_task)(batches))

    found = sinusoids.gradient(sinusoids.ARMS[arm], start, batches)
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


def test_the_gradient_by_a_value_gap_is_that_of_two_fits(monkeypatch):
    """With a multiplier of 1: proximity times (z - y), of fits of f and of F + f."""
    batches = sinusoids.tasks(jax.random.key(1), 2, 5, 5)
    start, arm = sinusoids.init(0), sinusoids.ARMS["value gap"]
    lower = sinusoids.make_problem(arm.proximity).lower

    def fitted(batch, *, both):
        def value(y):
            upper = sinusoids.loss((), y, batch.upper) if both else 0.0
            return upper + lower(start, y, batch.lower)

        y = start
        for _ in range(10):
            slope = jax.grad(value)(y)
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(slope)))
            rate = sinusoids.RATE * jnp.minimum(1.0, 10.0 / norm)
            y = jax.tree.map(lambda a, g, rate=rate: a - rate * g, y, slope)
        return y

    each = []
    for task in range(2):
        batch = jax.tree.map(lambda leaf, task=task: leaf[task], batches)
        y, z = fitted(batch, both=True), fitted(batch, both=False)
        each.append(jax.tree.map(lambda a, b: arm.proximity * (b - a), y, z))
    found = sinusoids.gradient(arm, start, batches)
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 2, *each)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_every_kept_run_of_a_problem_is_one_that_would_be_made():
    """The lines in the repository: all seeds of all arms, by the files in configs/."""
    directory = compare_bilevel.ROOT / "experiments/results/bilevel"
    for task in ("sinusoids", *problems.ARMS):
        keys = {key for keys, _ in compare_bilevel.jobs(task, 0, None, 10_000) for key in keys}
        assert keys == set(results.read(directory, task))


def test_a_sinusoid_is_what_a_task_has():
    batches = sinusoids.tasks(jax.random.key(0), 4, 5, 7)
    assert batches.lower[0].shape == (4, 5, 1)
    assert batches.upper[1].shape == (4, 7, 1)
    assert float(jnp.abs(batches.upper[1]).max()) <= 5.0
