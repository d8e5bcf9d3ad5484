"""`--config.writers=…` of both commands: what is written, and where."""

import json
import pathlib

import pytest

from experiments import train
from hetjax import extras
from hetjax.zoo import config as config_lib
from tests import programs
from tests.writers import readers

ROOT = pathlib.Path(__file__).parents[2]


def run(program, *arguments):
    return programs.run(["-m", f"experiments.{program}", *arguments], ROOT)


def test_the_command_writes_below_the_workdir(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra 'tensorboard' is not installed")
    done = run(
        *("train", "--config=configs/digits.py", f"--workdir={tmp_path}", "--config.epochs=2"),
        *("--config.writers=tensorboard,csv", "--config.local=virtual"),
    )
    assert done.returncode == 0, done.stderr
    kept = readers.read_csv(tmp_path)
    history = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in kept.values()] == [line["loss"] for line in history]
    assert kept[len(history) - 1]["eval/accuracy"] == history[-1]["eval"]["test_accuracy"]
    assert max(readers.read_tensorboard(tmp_path)) == len(history) - 1
    again = {"writers": "csv", "epochs": 2, "local": "virtual"}  # writers may be others
    assert json.loads((tmp_path / "config.json").read_text())["writers"] == ["tensorboard", "csv"]
    assert config_lib.validate(again).writers == ("csv",)


def test_a_missing_package_ends_the_command_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda package: None)
    config = config_lib.validate({"writers": ["wandb"], "epochs": 1})
    with pytest.raises(ValueError, match=r"writers: this needs wandb: .*'hetjax\[wandb\]'"):
        train.train_and_evaluate(config, tmp_path, progress=False)
