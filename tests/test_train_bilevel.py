"""The cleaning of polluted labels, from the command line to its report."""

import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import config_flag
from experiments.bilevel import baselines, cleaning, estimators, settings
from experiments.bilevel import data as data_lib

ROOT = pathlib.Path(__file__).parents[1]
FILE = str(ROOT / "configs" / "digits_cleaning.py")


def configured(**dotted):
    """`configured(data__num_train=60)`, checked."""
    given: dict = {}
    for name, value in dotted.items():
        *groups, last = name.split("__")
        target = given
        for group in groups:
            target = target.setdefault(group, {})
        target[last] = value
    return settings.validate(given)


SMALL = {
    "data__num_train": 60,
    "data__num_validation": 40,
    "upper__steps": 4,
    "eval_every": 2,
    "estimator__steps": 3,
    "estimator__back": 2,
    "estimator__products": 2,
    "retrain_steps": 5,
}


@pytest.fixture(autouse=True)
def _promoting():
    """Optax raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def digits():
    return data_lib.make(settings.Data(), seed=1)


def test_half_of_the_labels_are_drawn_anew_and_some_of_them_are_right(digits):
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
    whole = configured(estimator__name="implicit_cg", **SMALL)
    cut = configured(estimator__name="implicit_cg", data__block_size=20, **SMALL)
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
    config = configured(estimator__name=name, **SMALL)
    data = data_lib.make(config.data, 0)
    found = cleaning.clean(config, data)
    assert [record["step"] for record in found.history] == [2, 4]
    each = found.summary["cost_of_a_hypergradient"]
    assert found.summary["gradients"] == 4 * each["gradients"] > 0
    assert np.all(np.isfinite(found.weights))
    moved = np.ptp(found.weights) > 0
    assert moved == (name != "first_order")  # F does not depend on x but through y


@pytest.mark.slow
def test_an_mlp_with_a_learned_start_runs():
    config = configured(model__name="mlp", model__hidden=8, **SMALL)
    config = settings.validate(
        settings.to_dict(config) | {"estimator": {"name": "unrolled_worst", "steps": 2}}
    )
    assert estimators.learns_start(config)
    found = cleaning.clean(config, data_lib.make(config.data, 0))
    assert found.y["hidden"]["weights"].shape == (64, 8)
    assert {"step_chosen"} <= found.history[0].keys()


@pytest.mark.slow
def test_the_main_job_cleans_and_leaves_its_files(tmp_path):
    command = ["experiments.train_bilevel", f"--config={FILE}", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    base = summary["baselines"]
    for title in baselines.TITLES.values():
        assert title in done.stdout
    assert "100 hypergradients of 18 gradients and 0 products: 1,800 rounds" in done.stdout
    assert summary["retrained_test_accuracy"] > base["both"]["test_accuracy"] + 0.02
    assert summary["retrained_test_accuracy"] > base["validation"]["test_accuracy"]
    assert summary["test_accuracy"] > base["both"]["test_accuracy"]
    assert summary["f1_true_labels"] > 0.95
    assert summary["mean_weight_right"] > summary["mean_weight_wrong"] + 0.5
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
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
    def start(workdir):
        fields = (
            "local=virtual",
            "upper.steps=24",
            "eval_every=2",
            "checkpoint.every_rounds=2",
            "cluster.clock=virtual",
            "gate.trigger=first",
            "sums.lower=8",
            "cluster.delay=exponential",
        )
        command = ["experiments.train_bilevel", f"--config={FILE}", f"--workdir={workdir}"]
        more = [f"--config.{field}" for field in fields]
        return subprocess.Popen([sys.executable, "-m", *command, *more], cwd=ROOT)

    whole = start(tmp_path / "whole")
    assert whole.wait() == 0
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
    assert start(tmp_path / "cut").wait() == 0
    resumed = json.loads((tmp_path / "cut" / "run" / "summary.json").read_text())["resumed"]
    assert len(resumed) == 2
    assert 2 <= resumed[0]["round"] <= seen
    assert 14 <= resumed[1]["round"] < 24
    found = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "cut")
    ]
    same = ("validation_loss", "weights", "levels", "rounds", "chosen_step", "f1_drawn")
    assert [found[0][name] for name in same] == [found[1][name] for name in same]
    steps = [
        [
            json.loads(line)["step"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "cut")
    ]
    assert steps[0] == steps[1] == list(range(2, 26, 2))
    levels = found[1]["levels"]["lower"]
    assert levels["examples_missing"] == levels["examples_duplicated"] == 0


@pytest.mark.slow
def test_the_workdir_of_another_run_is_refused_before_anything_is_computed(tmp_path):
    def run(*fields):
        command = ["experiments.train_bilevel", f"--config={FILE}", f"--workdir={tmp_path}"]
        few = ["--config.upper.steps=1", "--config.eval_every=1", *fields]
        done = subprocess.run(
            [sys.executable, "-m", *command, *few], capture_output=True, text=True, cwd=ROOT
        )
        return done.returncode, done.stderr

    assert run()[0] == 0
    config, kept = tmp_path / "config.json", (tmp_path / "summary.json").read_bytes()
    code, said = run("--config.seed=1")
    assert (code, "another configuration (seed: 0 there, 1 here)" in said) == (2, True), said
    gossip = ("--config.estimator.name=implicit_cg", "--config.reducer.name=d_psgd")
    code, said = run("--resume=overwrite", *gossip)
    assert (code, "this estimator cannot gossip" in said) == (2, True), said
    assert (tmp_path / "summary.json").read_bytes() == kept
    assert run("--resume=overwrite", "--config.seed=1")[0] == 0
    assert json.loads(config.read_text())["seed"] == 1


def test_a_wrong_field_is_named():
    with pytest.raises(ValueError, match=r"^eval_every: got 7, must divide"):
        settings.validate({"eval_every": 7})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": {"block_size": 20}}, "data.block_size: got 20, must be 0: a worker has one"),
        (
            {"sums": {"lower": 8, "upper": 30}, "quota": {"max_microbatches": 4}},
            r"quota.max_microbatches(.|\n)*budget is sums.upper",
        ),
    ],
)
def test_a_wrong_field_of_the_rounds_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        settings.validate_train(given)
    assert settings.validate_train(
        {"sums": {"lower": 8, "upper": 8}, "quota": {"max_microbatches": 4}}
    )


def test_overrides_on_the_command_line_are_of_its_own_fields(capsys):
    from absl import flags

    def run(*arguments):
        values, argv = flags.FlagValues(), ["program", *arguments]
        config_flag.define(settings.SCHEMA, flag_values=values, argv=argv)
        config_flag.parse_flags(argv, flag_values=values)
        return config_flag.get(flag_values=values)

    found = run(f"--config={FILE}", "--config.estimator.name=implicit_cg", "--config.seed=3")
    assert (found.estimator.name, found.seed) == ("implicit_cg", 3)
    with pytest.raises(SystemExit):
        run(f"--config={FILE}", "--config.estimator.nme=x")
    assert "estimator.nme: there is no such field" in capsys.readouterr().err
