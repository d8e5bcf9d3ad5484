"""The main job from the command line, and its result in Python."""

import subprocess
import sys

import hetjax

command = [
    sys.executable,
    "-m",
    "experiments.train",
    "--config=configs/digits.py",
    "--workdir=digits",
]
command += ["--config.epochs=2", "--config.cluster.secs_per_microbatch=()"]
subprocess.run(command, check=True)
run = hetjax.load("digits")
assert run.summary["test_accuracy"] > 0.5
print(run)
