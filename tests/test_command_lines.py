"""The programs that people run: `--help`, and mistakes in flags."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = {
    "experiments.train": ("--workdir", "--config.optimizer.learning_rate=0.05"),
    "experiments.compare": ("--seeds=0", "--set=cluster.num_workers=4"),
    "experiments.simulate": ("--workers=8,64,1000,10000", "--microbatch_secs=0.1"),
    "experiments.compare_orders": ("--data_dir", "--minutes=90.0"),
    "hetjax.launch": ("--workers WORKERS", "--heartbeat_secs"),
    "hetjax.report": ("the work directory of the run",),
    "hetjax.data.prepare": ("--data_dir DIR",),
}


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_says_what_can_be_set_and_ends_well(program):
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr
    for text in PROGRAMS[program]:
        assert text in done.stdout
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["experiments.compare", "--epochs=3"], "write --set=epochs=3."),
        (["experiments.simulate", "--wrkers=3"], "Unknown command line flag 'wrkers'. Did you"),
        (["experiments.compare_orders", "--jobs=0"], "--help shows all flags"),
        (["experiments.train", "epochs=3", "--config=configs/digits.py"], "--config.epochs=3."),
    ],
)
def test_a_mistake_in_a_flag_gets_one_message(command, message):
    done = run(*command)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
