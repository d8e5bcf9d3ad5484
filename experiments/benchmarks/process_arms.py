"""The arms of the benchmark of processes: runs of hetjax and of the PyTorch program."""

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags

from experiments.benchmarks import launched_runs
from experiments.benchmarks.launched_runs import SHARES, Task
from hetjax.data import sources
from hetjax.zoo import datasets

# Other programs have a flag of this name too, and tests import several of them.
DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of the data sets.", allow_override=True)
TORCH_PYTHON = flags.DEFINE_string("torch_python", sys.executable, "Interpreter that has torch.")

_BASELINE = pathlib.Path(__file__).with_name("ddp_baseline.py")
# First rounds: until the policy has settled, and memory and caches are as they stay.
SKIPPED = {"adaptive": 50, "equal": 4, "ddp": 4}
# The faster one counts. Compiled is measured alone: a quarter of a core compiles for minutes.
DDP_VARIANTS = {
    "plain DDP": ("--plain",),
    "tuned DDP": (),  # bucket views, static graph, fused optimiser
}
COMPILED = {"compiled DDP": ("--compile",)}


def run_hetjax(
    task: Task,
    policy: str,
    num_rounds: int,
    shares: Sequence[float],
    *,
    checkout: pathlib.Path | None = None,
) -> launched_runs.Arm:
    """One run of hetjax at these shares, of another checkout where one is given."""
    lines = launched_runs.run_lines(
        task, policy, num_rounds, shares, DATA_DIR.value, checkout=checkout
    )
    return launched_runs.of_lines(lines, SKIPPED.get(policy, 4))


@functools.cache
def arrays() -> tuple[str, str]:
    """The training set as files for a program without hetjax."""
    data = sources.load_all(datasets.load("cifar10", DATA_DIR.value).train).arrays
    names = []
    for field in ("image", "label"):
        names.append(str(launched_runs.directory() / f"{field}.npy"))
        np.save(names[-1], data[field])
    return names[0], names[1]


@functools.cache
def torch_version(also: str = "torch") -> str | None:
    """Of torch's interpreter; None: it has no torch, or not what else is asked for."""
    code = f"import torch, {also}; print(torch.__version__)"
    with contextlib.suppress(OSError):
        found = subprocess.run(
            [TORCH_PYTHON.value, "-c", code], capture_output=True, text=True, check=False
        )
        return found.stdout.strip() if found.returncode == 0 else None
    return None


def no_torch(what: str = "DDP", also: str = "torch") -> str:
    return (
        f"{what} is not measured: {TORCH_PYTHON.value} has no {also}. Install 'hetjax[benchmark]' "
        "(the build for CPU will do), or name an interpreter that has it by --torch_python."
    )


def run_torch(
    name: str, task: Task, num_steps: int, shares: Sequence[float], options: Sequence[str]
) -> launched_runs.Arm:
    """One run of the PyTorch program at these shares; without DDP where there is one worker."""
    images, labels = arrays()
    out = launched_runs.directory() / "ddp.json"
    out.unlink(missing_ok=True)
    command = [TORCH_PYTHON.value, str(_BASELINE), f"--model={name}", f"--batch={task.batch}"]
    command += [f"--images={images}", f"--labels={labels}", f"--steps={num_steps}", f"--out={out}"]
    launched_runs.run_workers(shares, [*command, *task.ddp_flags, *options])
    return launched_runs.of_steps(json.loads(out.read_text()), SKIPPED["ddp"])


def part_of(task: Task) -> Task:
    """As much as a worker's part of an equal split."""
    return task._replace(budget=task.budget // len(SHARES))


def alone(name: str, task: Task, variants: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Examples a second of each side's part, one process on one core, without communication."""
    own = part_of(task)
    speeds = {"hetjax": run_hetjax(own, "equal", 24, (1.0,)).examples_per_sec}
    for title, options in variants.items():
        speeds[title] = run_torch(name, own, 24, (1.0,), options).examples_per_sec
    return speeds
