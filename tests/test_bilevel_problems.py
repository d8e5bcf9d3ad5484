"""The problems of `train_bilevel` that run on one device, at reduced sizes."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from experiments.bilevel import estimators, gan, one_device, problems, search, settings, sinusoids
from tests import programs
from tests.promotion import casts_of_optax  # noqa: F401

ROOT = pathlib.Path(__file__).parents[1]
FILES = {"few_shot": "sinusoids_few_shot", "search": "digits_search", "gan": "gaussians_gan"}
HALVES = {"num_train": 200, "num_validation": 200}
SMALL_SEARCH = {"search": HALVES, "upper": {"steps": 60}, "eval_every": 30}


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """Of the networks that are trained of chosen operations."""
    monkeypatch.setattr(search, "TRAIN_STEPS", 80)


def configured(problem, **given):
    """The file in configs/ with fields changed, groups as dicts."""
    plain = settings.load(str(ROOT / "configs" / f"{FILES[problem]}.py")).to_dict()
    for name, value in given.items():
        plain[name] = plain[name] | value if isinstance(value, dict) else value
    return settings.validate_train(plain)


def by(name, **options):
    return {"estimator": {"name": name, **options}}


@pytest.mark.slow
def test_the_right_operations_of_a_cell_are_found_among_decoys():
    found = problems.run(configured("search", **SMALL_SEARCH, **by("value_gap")))
    assert found["solved"]
    assert found["found"] == ["rectified convolution"] * 2
    weights = np.array(found["weights"])
    assert weights.shape == (2, 6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert found["right_accuracy"] > found["best_decoys_accuracy"] + 0.4


def test_a_search_on_unequal_workers_is_that_of_one_device():
    """Losses give a number an example, so `fit_bilevel` takes the same problem."""
    config = configured("search", **SMALL_SEARCH, **by("value_gap", steps=2, multiplier=3.0))
    made = search.make(config)
    x, state, tx = made.x, None, optax.sgd(1.0)
    opt = tx.init(x)
    for _ in range(2):
        found = made.hypergradient(x, state, jax.random.key(0))
        updates, opt = tx.update(found.grad_x, opt)
        x, state = optax.apply_updates(x, updates), found.state
    train, validation, _ = jax.device_get(search.parts(config))
    y = search.init(config.search.channels, config.seed)
    given = (search.make_problem(config.lower.ridge), np.asarray(made.x), y)
    cluster = {"secs_per_microbatch": (1.0, 2.0, 4.0, 4.0), "clock": "virtual"}
    fields = {"outer_steps": 2, "workers": 4, "local": "virtual", "microbatch_size": 10}
    fields |= {"upper_source": validation, "lower_source": train, "progress": False}
    result = hetjax.fit_bilevel(*given, estimators.make(config), tx, cluster=cluster, **fields)
    np.testing.assert_allclose(result.x, x, rtol=2e-3, atol=2e-5)


def test_modes_are_counted_as_in_a_case_done_by_hand():
    middle = gan.centres()
    np.testing.assert_allclose(np.linalg.norm(middle, axis=1), 2, rtol=1e-6)
    points = np.repeat(middle[:7], 100, axis=0)
    points[:50, 0] += 0.31  # beyond three deviations of the first
    points = np.concatenate([points, np.zeros((300, 2))]).astype(np.float32)
    found = np.asarray(gan.shares(jnp.asarray(points), 0.1))
    np.testing.assert_allclose(found, [0.05] + [0.1] * 6 + [0], atol=1e-6)


@pytest.mark.slow
def test_a_gan_finds_modes_in_fewer_steps_than_it_takes_for_all():
    smaller = {"upper": {"steps": 1200}, "eval_every": 600, "gan": {"batch_size": 128}}
    found = problems.run(configured("gan", **smaller, **by("value_gap")))
    assert found["modes"] >= 5
    assert found["solved"] == (found["modes"] == 8)
    assert found["share_near"] == pytest.approx(sum(found["shares"]), abs=1e-5)


@pytest.mark.slow
def test_a_start_is_learned_by_a_value_gap():
    smaller = {"upper": {"steps": 600}, "eval_every": 300}
    found = problems.run(configured("few_shot", **smaller))
    assert found["solved"]
    assert found["medians"]["10"] <= 0.5 * found["joint_training"]["medians"]["10"]


def test_an_unrolled_start_is_learned_by_the_gradient_of_maml():
    steps = {"upper": {"steps": 2}, "eval_every": 1, "lower": {"optimizer": "sgd"}}  # not clipped
    config = configured("few_shot", **steps, **by("unrolled", steps=1))
    made = sinusoids.make(config)
    found = made.hypergradient(made.x, None, jax.random.key(0))
    batches = sinusoids.tasks(jax.random.key(0), 25, 10, 10)
    expected = sinusoids.gradient(sinusoids.ARMS["MAML"], made.x, batches)
    for ours, theirs in zip(*map(jax.tree.leaves, (found.grad_x, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_equal_seeds_make_equal_runs_and_others_do_not():
    smaller = {"upper": {"steps": 4}, "eval_every": 2, "gan": {"batch_size": 16}}

    def run(seed):
        config = configured("gan", seed=seed, **smaller)
        return one_device.solve(config, gan.make(config))

    (first, history), (second, _), (other, _) = run(1), run(1), run(2)
    assert [record["step"] for record in history] == [2, 4]
    assert first["upper_loss"] == second["upper_loss"] != other["upper_loss"]
    assert first["shares"] == second["shares"]


def test_a_loss_that_is_not_finite_is_told_with_the_rates():
    config = configured("gan", upper={"steps": 2}, eval_every=2, lower={"learning_rate": 1e30})
    with pytest.raises(ValueError, match=r"not finite after 2 hypergradients .* Lower lower\."):
        problems.run(config)


def test_the_command_leaves_a_run_and_says_whether_it_is_solved(tmp_path):
    fields = ("search.num_train=100", "search.num_validation=100", "upper.steps=4", "eval_every=2")
    command = ["-m", "experiments.train_bilevel", "--config=configs/digits_search.py"]
    fields = [f"--config.{field}" for field in fields]
    done = programs.run([*command, f"--workdir={tmp_path}", *fields], ROOT)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert ("not solved." in done.stdout) == (not summary["solved"])
    assert "4 hypergradients of 18 gradients and 0 products" in done.stdout
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    again = settings.validate_train(settings.load(str(tmp_path / "config.json")))
    assert again.search.num_train == 100
