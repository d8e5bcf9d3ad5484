"""The main job as an engine starts it, what has to be left of it, and a script of a user's own."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import hetjax
from experiments.drills import engine_gangs, fault_cases
from tests.pages.blocks import ROOT, blocks

TRAIN = ["python", "-m", "experiments.train", "--config=configs/digits.py", "--workdir=runs/slurm"]
"""As the batch script of the page has it."""

NUM_ROUNDS = 100
KILL_AT = 13  # between two checkpoints
_CONFIG = f"""
from hetjax.zoo import config

def get_config():
    experiment = config.base()  # speeds that nobody emulates
    experiment.epochs = {NUM_ROUNDS // 5}
    experiment.quota.policy = "static"
    experiment.quota.proportions = (4.0, 3.0, 2.0, 1.0)
    experiment.checkpoint.every_rounds = 10
    return experiment
"""


class Job:
    """A directory where the job's commands run.

    Args:
        directory: gets `configs/digits.py`, `script.py`, and what runs leave.
        environment: of the engine's commands, beside this process's.
    """

    def __init__(self, directory: pathlib.Path, environment: dict[str, str]) -> None:
        self.directory, self.workdir = directory, directory / "runs/slurm"
        (directory / "configs").mkdir()
        (directory / "configs/digits.py").write_text(_CONFIG)
        page = blocks(ROOT / "docs/processes.md")
        (script,) = (text for title, text in page if title == "1. Let the script join")
        (directory / "script.py").write_text(script)
        path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {"JAX_PLATFORMS": "cpu", "PATH": path, "PYTHONPATH": str(ROOT)}
        self.environment = {**os.environ, **ours, **environment}

    def start(self, *command: str) -> engine_gangs.EngineRun:
        """Starts a command; its processes end with the context."""
        of_all = {"log": self.directory / "log", "cwd": self.directory}
        return engine_gangs.EngineRun(command, self.workdir, environment=self.environment, **of_all)

    def run(self, *command: str) -> None:
        """A command to its end, which has to be good."""
        with self.start(*command) as run:
            try:
                code = run.end()
            except subprocess.TimeoutExpired:
                pytest.fail(f"it does not end: {self.said}")
        assert code == 0, self.said

    @property
    def resumed(self) -> list[int]:
        """After how many rounds it has gone on, each time."""
        return [once["round"] for once in self.summary["resumed"]]

    @property
    def summary(self) -> dict[str, Any]:
        """What the run has last left of itself."""
        return json.loads((self.workdir / "summary.json").read_text())

    @property
    def said(self) -> str:
        """What the commands and the batch jobs have printed."""
        paths = [self.directory / "log", *self.directory.glob("slurm-*.out")]
        return "".join(path.read_text() for path in paths if path.exists())


def check_whole(job: Job) -> None:
    """Each round was done once, by four processes, and each example once in each pass."""
    assert engine_gangs.is_whole(job.workdir, NUM_ROUNDS), job.said
    assert engine_gangs.lost_and_doubled(job.workdir) == (0, 0)
    assert job.summary["num_workers"] == engine_gangs.NUM_WORKERS


def check_equal(job: Job, undisturbed: Job) -> None:
    """It is whole, and equal to the bit to a run that nobody disturbed."""
    check_whole(job)
    assert fault_cases.are_bit_equal(job.workdir, undisturbed.workdir)


def check_script(job: Job, num_processes: int) -> None:
    """The script of docs/processes.md, as it stands there, trained in all processes."""
    run = hetjax.load(job.directory / "runs/launched")
    np.testing.assert_allclose(run.params, np.ones(8), atol=0.05)
    assert run.summary["num_workers"] == num_processes, job.said
