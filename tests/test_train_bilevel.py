"""The cleaning of polluted labels, from the command line to its report."""

import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.bilevel import baselines, cleaning, estimators, settings
from experiments.bilevel import data as data_lib
from tests import programs
from tests.promotion import casts_of_optax  # noqa: F401

ROOT = pathlib.Path(__file__).parents[1]
FILE = str(ROOT / "configs" / "digits_cleaning.py")


def small(*, data=(), model=(), **estimator):
    """A configuration of a few steps on few images, checked."""
    given = {"eval_every": 2, "retrain_steps": 5, "upper": {"steps": 4}, "model": dict(model)}
    given["data"] = {"num_train": 60, "num_validation": 40, **dict(data)}
    given["estimator"] = {"steps": 3, "back": 2, "products": 2, **estimator}
    return settings.validate(given)


def run(workdir, *fields, flags=()):
    """What `experiments.train_bilevel` did."""
    fields = [f"--config.{field}" for field in fields]
    command = ["-m", "experiments.train_bilevel", f"--config={FILE}", f"--workdir={workdir}"]
    return programs.run([*command, *flags, *fields], ROOT)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_half_of_the_labels_are_drawn_anew_and_some_of_them_are_right():
    digits = data_lib.make(settings.Data(), seed=1)
    assert digits.train.images.shape == (600, 64)
    assert len(digits.validation.labels) == 400
    assert len(digits.test.labels) == 797
    assert digits.is_drawn.sum() == 300
    assert np.all(digits.is_right[~digits.is_drawn])
    assert 10 <= (digits.is_right & digits.is_drawn).sum() <= 55  # a tenth of 300, about
    rows = [part.images for part in (digits.train, digits.validation, digits.test)]
    assert len(np.unique(np.concatenate(rows), axis=0)) > 1790  # hardly an image twice


@pytest.mark.slow
def test_images_in_blocks_are_cleaned_alike():
    """In float32; every example finds its own number of x."""
    whole = small(name="implicit_cg")
    cut = small(name="implicit_cg", data={"block_size": 20})
    data = data_lib.make(whole.data, seed=1)
    first, second = cleaning.clean(whole, data), cleaning.clean(cut, data)
    np.testing.assert_allclose(first.weights, second.weights, atol=1e-4)
    assert first.summary["work"] == second.summary["work"]
    for ours, theirs in zip(first.history, second.history, strict=True):
        assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], abs=1e-4)


def test_f1_is_that_of_a_case_done_by_hand():
    kept, good = np.array([1, 1, 1, 0], bool), np.array([1, 1, 0, 1], bool)
    assert cleaning.f1(kept, good) == pytest.approx(2 / 3)  # precision and recall 2/3
    assert cleaning.f1(np.zeros(4, bool), good) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", settings.ESTIMATORS)
def test_each_estimator_runs_and_counts_its_cost(name):
    config = small(name=name)
    found = cleaning.clean(config, data_lib.make(config.data, 0))
    assert [record["step"] for record in found.history] == [2, 4]
    each = found.summary["cost_of_a_hypergradient"]
    assert found.summary["gradients"] == 4 * each["gradients"] > 0
    assert np.all(np.isfinite(found.weights))
    moved = np.ptp(found.weights) > 0
    assert moved == (name != "first_order")  # F does not depend on x but through y


@pytest.mark.slow
def test_an_mlp_with_a_learned_start_runs():
    config = small(model={"name": "mlp", "hidden": 8}, name="unrolled_worst", steps=2)
    assert estimators.learns_start(config)
    found = cleaning.clean(config, data_lib.make(config.data, 0))
    assert found.y["hidden"]["weights"].shape == (64, 8)
    assert {"step_chosen"} <= found.history[0].keys()


@pytest.mark.slow
def test_the_main_job_cleans_and_leaves_its_files(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    base = summary["baselines"]
    assert all(title in done.stdout for title in baselines.TITLES.values())
    assert "100 hypergradients of 18 gradients and 0 products: 1,800 rounds" in done.stdout
    assert summary["retrained_test_accuracy"] > base["both"]["test_accuracy"] + 0.02
    assert summary["retrained_test_accuracy"] > base["validation"]["test_accuracy"]
    assert summary["test_accuracy"] > base["both"]["test_accuracy"]
    assert summary["f1_true_labels"] > 0.95
    assert summary["mean_weight_right"] > summary["mean_weight_wrong"] + 0.5
    records = lines_of(tmp_path / "metrics.jsonl")
    assert len(records) == 20
    best = min(records, key=lambda record: record["validation_loss"])
    assert summary["chosen_step"] == best["step"]  # by validation, not by test
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 20  # five of the cleaning, five of the workers; two widths
    assert summary["levels"]["lower"]["examples_missing"] == 0
    assert summary["levels"]["lower"]["examples_revisited"] == 100 * 600
    assert (tmp_path / "run" / "report.html").is_file()
    assert "http" not in page.replace("http://www.w3.org", "")
    again = settings.validate_train(settings.load(str(tmp_path / "config.json")))
    assert again == settings.validate_train(settings.load(FILE))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path):
    fields = (
        *("local=virtual", "upper.steps=24", "eval_every=2", "checkpoint.every_rounds=2"),
        *("cluster.clock=virtual", "gate.trigger=first", "sums.lower=8"),
        "cluster.delay=exponential",
    )

    def start(workdir):
        command = ["experiments.train_bilevel", f"--config={FILE}", f"--workdir={workdir}"]
        more = [f"--config.{field}" for field in fields]
        return subprocess.Popen([sys.executable, "-m", *command, *more], cwd=ROOT)

    assert run(tmp_path / "whole", *fields).returncode == 0
    cut = start(tmp_path / "cut")
    lines = tmp_path / "cut" / "run" / "metrics.jsonl"
    while cut.poll() is None and not (lines.is_file() and lines.read_text().count("\n") >= 7):
        time.sleep(0.01)
    cut.kill()
    cut.wait()
    again = start(tmp_path / "cut")
    seen = lines.read_text().count("\n")
    while again.poll() is None and lines.read_text().count("\n") < 15:
        time.sleep(0.01)
    again.terminate()
    assert again.wait() == 143  # as experiments.train ends
    assert not (tmp_path / "cut" / "summary.json").exists()
    assert run(tmp_path / "cut", *fields).returncode == 0
    resumed = json.loads((tmp_path / "cut" / "run" / "summary.json").read_text())["resumed"]
    assert len(resumed) == 2
    assert 2 <= resumed[0]["round"] <= seen
    assert 14 <= resumed[1]["round"] < 24
    first, found = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "cut")
    )
    for name in ("validation_loss", "weights", "levels", "rounds", "chosen_step", "f1_drawn"):
        assert first[name] == found[name]
    for name in ("whole", "cut"):
        steps = [line["step"] for line in lines_of(tmp_path / name / "metrics.jsonl")]
        assert steps == list(range(2, 26, 2))
    levels = found["levels"]["lower"]
    assert levels["examples_missing"] == levels["examples_duplicated"] == 0


@pytest.mark.slow
def test_the_workdir_of_another_run_is_refused_before_anything_is_computed(tmp_path):
    def code_and_said(*fields, **flags):
        done = run(tmp_path, "upper.steps=1", "eval_every=1", *fields, **flags)
        return done.returncode, done.stderr

    assert code_and_said()[0] == 0
    kept = (tmp_path / "summary.json").read_bytes()
    code, said = code_and_said("seed=1")
    assert (code, "another configuration (seed: 0 there, 1 here)" in said) == (2, True), said
    gossip, over = ("estimator.name=implicit_cg", "reducer.name=d_psgd"), ["--resume=overwrite"]
    code, said = code_and_said(*gossip, flags=over)
    assert (code, "this estimator cannot gossip" in said) == (2, True), said
    assert (tmp_path / "summary.json").read_bytes() == kept
    assert code_and_said("seed=1", flags=over)[0] == 0
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_every": 7}, r"^eval_every: got 7, must divide"),
        ({"data": {"block_size": 20}}, "data.block_size: got 20, must be 0: a worker has one"),
        (
            {"sums": {"lower": 8, "upper": 30}, "quota": {"max_microbatches": 4}},
            r"quota.max_microbatches(.|\n)*budget is sums.upper",
        ),
    ],
)
def test_a_wrong_field_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        settings.validate_train(given)
    right = {"sums": {"lower": 8, "upper": 8}, "quota": {"max_microbatches": 4}}
    assert settings.validate_train(right)
