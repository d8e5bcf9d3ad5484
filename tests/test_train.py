"""The main job's program: its files, its table, and what it says to a user's mistakes."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

import hetjax
from experiments import train
from hetjax.zoo import config as config_lib
from tests import programs
from tests.once import once

ROOT = pathlib.Path(__file__).parent.parent
FILES = {
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    "generations",
}
FIELDS = {
    *("train_loss", "test_loss", "test_accuracy", "rounds", "epochs", "wall_secs", "quotas"),
    *("examples_processed", "examples_missing", "examples_duplicated", "waiting_fraction"),
    *("round_secs_mean", "optimal_round_secs", "fraction_of_optimum", "continuous_bound_secs"),
}


def run(*arguments, **environment):
    return programs.run(["-m", "experiments.train", *arguments], ROOT, **environment)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    return once(tmp_path_factory, "first_run", train_digits)


def train_digits(workdir):
    where = f"--workdir={os.path.relpath(workdir, ROOT)}"  # as in the README
    fields = ("--config.epochs=2", "--config.cluster.clock=virtual")
    done = run("--config=configs/digits.py", where, *fields)
    assert done.returncode == 0, done.stderr
    return workdir, done


@pytest.mark.slow
def test_the_main_job_writes_its_files_and_prints_its_table(first_run):
    workdir, done = first_run
    assert {path.name for path in workdir.iterdir()} == FILES
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary.keys() >= FIELDS
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["quotas"] == [8, 6, 4, 2]
    assert summary["rounds"] == 10
    for text in ("test accuracy", "quotas  ", "exact optimum", "equal split", "0 missing"):
        assert text in done.stdout
    assert "waiting" in done.stderr  # the progress bar
    assert "tensorflow" not in done.stderr.lower()


@pytest.mark.slow
def test_a_finished_run_of_another_configuration_is_overwritten_where_the_command_says_so(
    first_run, tmp_path
):
    workdir = shutil.copytree(first_run[0], tmp_path / "run")
    other = [f"--config={workdir / 'config.json'}", f"--workdir={workdir}", "--config.seed=1"]
    done = run(*other)
    assert (done.returncode, "seed: 0 there, 1 here" in done.stderr) == (2, True), done.stderr
    assert "resume='overwrite' to write over it" in done.stderr
    done = run(*other, "--config.epochs=1", "--resume=overwrite")
    assert done.returncode == 0, done.stderr
    assert json.loads((workdir / "config.json").read_text())["seed"] == 1


@pytest.mark.slow
def test_the_written_configuration_runs_the_same_again(first_run, tmp_path):
    workdir, _ = first_run
    again = run(f"--config={workdir / 'config.json'}", f"--workdir={tmp_path}")
    assert again.returncode == 0, again.stderr
    texts = [(folder / "metrics.jsonl").read_text() for folder in (workdir, tmp_path)]
    first, second = ([json.loads(line) for line in text.splitlines()] for text in texts)
    for one, other in zip(first, second, strict=True):
        assert one | {"overruns": 0} == other | {"overruns": 0}  # to the last digit, and the clock


def test_data_that_are_missing_get_one_message_and_status_2(tmp_path):
    flags = [f"--workdir={tmp_path / 'run'}", f"--config.data.dir={tmp_path}"]
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = run("--config=configs/digits.py", "--config.data.name=cifar10", *flags, **proxies)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data_batch_1.bin" in done.stderr


def test_a_local_form_that_is_asked_for_is_not_replaced_where_devices_lack(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(hetjax, "use_cpu_workers", lambda num_workers: None)
    monkeypatch.setattr(jax, "devices", lambda platform=None: first)
    config = config_lib.validate(config_lib.load(str(ROOT / "configs/digits.py")))
    with pytest.raises(ValueError, match=r"num_workers = 4, but JAX has 1 cpu .*local='virtual'"):
        train.train_and_evaluate(config, None, progress=False, local_is_asked_for=True)


@pytest.mark.slow
def test_lenet_learns_from_real_cifar10(test_data, tmp_path):
    (tmp_path / "cifar10").symlink_to(test_data / "cifar10")  # the prepared copy goes beside it
    fields = {"epochs": 2, "microbatch_size": 16, "budget": 4, "model": {"name": "lenet"}} | {
        "data": {"name": "cifar10", "dir": str(tmp_path), "num_train": 3000},
        "optimizer": {"name": "adam", "learning_rate": 0.002},
        "cluster": {"secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"},
    }
    result = train.train_and_evaluate(config_lib.validate(fields), None, progress=False)
    losses = [line["loss"] for line in result.history]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
