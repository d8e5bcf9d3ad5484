"""The arms of the benchmark of processes whose workers are killed: hetjax, and torchft.

Both train LeNet on CIFAR-10 under `hetjax.launch --runtime=apart`, at the same shares and batch,
and the launcher starts again what is killed. A commit of hetjax is a line of its record, which is
written when the next round begins; one of torchft is a step of which any process says that it was
committed.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from experiments.benchmarks import launched_runs
from experiments.benchmarks import process_arms as arms_lib
from experiments.benchmarks.launched_runs import SHARES, TASKS
from experiments.benchmarks.rows import Row, most

_BASELINE = pathlib.Path(__file__).with_name("torchft_baseline.py")
_TASK = TASKS["lenet"]
_SETTLED = 60  # commits, before what is measured begins
_HEARTBEAT_MS = 1000  # torchft's lighthouse takes a process for dead without one for so long
_START_SECS = 300.0
_EVERY = (np.inf, 60.0, 30.0)  # seconds between two kills

Commits = Callable[[], dict[int, tuple[float, int]]]  # by number: unix seconds, examples


class Disturbed(NamedTuple):
    """A run whose workers were killed now and then."""

    speeds: list[float]  # examples committed in each second
    kills: list[float]  # seconds
    waits: list[float]  # seconds from each to the next commit
    round_secs: float  # median

    @property
    def examples_per_sec(self) -> float:
        return float(np.mean(self.speeds))


@contextlib.contextmanager
def _hetjax() -> Iterator[tuple[list[str], dict[str, str], Commits]]:
    """The command of a worker, its environment, and what was committed."""
    workdir = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    command = launched_runs.task_command(
        _TASK, "adaptive", (1_000_000, 24), len(SHARES), workdir, arms_lib.DATA_DIR.value
    )
    commits = launched_runs.Commits(workdir)
    commits.start()
    try:
        environment = launched_runs.environment()
        yield command, environment, lambda: {k: (v, _TASK.batch) for k, v in [*commits.at.items()]}
    finally:
        commits.over.set()


@contextlib.contextmanager
def _torchft() -> Iterator[tuple[list[str], dict[str, str], Commits]]:
    """As `_hetjax`, with a lighthouse."""
    log = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    images, labels = arms_lib.arrays()
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    python = arms_lib.TORCH_PYTHON.value
    lighthouse = pathlib.Path(python).with_name("torchft_lighthouse")
    options = ["--min_replicas=1", f"--bind=127.0.0.1:{port}", "--join_timeout_ms=1000"]
    options.append(f"--heartbeat_timeout_ms={_HEARTBEAT_MS}")
    command = [python, str(_BASELINE), "--model=lenet", f"--images={images}", f"--labels={labels}"]
    command += [f"--batch={_TASK.batch}", "--steps=1000000000", *_TASK.ddp_flags, f"--out={log}"]

    def committed() -> dict[int, tuple[float, int]]:
        lines = [line for path in log.iterdir() for line in path.read_text().splitlines()]
        found: dict[int, tuple[float, int]] = {}
        for at, step, groups in map(json.loads, lines):
            own = (at, groups * _TASK.batch // len(SHARES))
            found[step] = min(own, found.get(step, own))
        return found

    with subprocess.Popen([lighthouse, *options], stderr=subprocess.DEVNULL) as process:
        address = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        try:
            yield command, {**launched_runs.environment(), **address}, committed
        finally:
            process.kill()


SIDES = {"hetjax": _hetjax, "torchft": _torchft}


def run(side: str, secs: float, every: float) -> Disturbed:
    """Trains, and kills a random worker each `every` seconds (inf: none) of those measured."""
    rng = random.Random(0)
    with SIDES[side]() as (command, environment, committed):
        options = ("--runtime=apart", "--max_restarts=9999")
        launch = launched_runs.launch_command(len(SHARES), SHARES, *options)
        with tempfile.TemporaryFile("w+") as said:
            launcher = subprocess.Popen(
                [*launch, *command], env=environment, stdout=said, stderr=said
            )
            try:
                gives_up = time.time() + _START_SECS
                while len(committed()) < _SETTLED:
                    if launcher.poll() is not None or time.time() > gives_up:
                        said.seek(0)
                        sys.exit(f"{side} did not begin:\n{said.read()[-4000:]}")
                    time.sleep(0.2)
                began, kills = time.time(), []
                while (at := began + every * (len(kills) + 0.5)) < began + secs:
                    time.sleep(max(at - time.time(), 0))
                    pid = rng.choice(launched_runs.workers_of(launcher.pid, command[-1]))
                    kills.append(time.time())
                    os.kill(pid, signal.SIGKILL)
                time.sleep(max(began + secs - time.time(), 0))
                return _judge(committed(), kills, began, secs)
            finally:
                launcher.send_signal(signal.SIGINT)
                launcher.wait()


def _judge(
    commits: dict[int, tuple[float, int]], kills: list[float], began: float, secs: float
) -> Disturbed:
    at, examples = np.array(sorted(commits.values())).T
    inside = (at >= began) & (at < began + secs)
    speeds = np.bincount((at[inside] - began).astype(int), examples[inside], int(secs))
    waits = [float(at[at > kill].min() - kill) if (at > kill).any() else np.inf for kill in kills]
    relative = [kill - began for kill in kills]
    return Disturbed(speeds.tolist(), relative, waits, float(np.median(np.diff(at[inside]))))


def survival_rows(secs: float, out: str | None) -> Iterator[Row | str]:
    """Both in turn: undisturbed, and with a kill of a random worker each 60 s and each 30 s.

    Args:
        secs: of each run, behind its first commits.
        out: file that gets all runs, JSON.
    """
    if not arms_lib.torch_version("torchft"):
        yield arms_lib.no_torch("torchft", "torchft")
        return
    runs = {(side, every): run(side, secs, every) for every in _EVERY for side in SIDES}
    if out:
        told = {f"{side} {every:g}": each._asdict() for (side, every), each in runs.items()}
        pathlib.Path(out).write_text(json.dumps(told) + "\n")
    for every, target in zip(_EVERY, ("≥ 2", "none", "≥ 3"), strict=True):
        own, other = (runs[side, every].examples_per_sec for side in SIDES)
        name = f"hetjax over torchft, a kill each {every:g} s"
        name = name if every < np.inf else "hetjax over torchft, undisturbed"
        yield Row(name, target, f"{own / other:.2f}: {own:,.0f} over {other:,.0f} examples/s")
    for side in SIDES:
        usual = runs[side, np.inf]
        for every in _EVERY[1:]:
            kept = runs[side, every].examples_per_sec / usual.examples_per_sec
            target = "≥ 95 %" if (side, every) == ("hetjax", 60.0) else "none"
            yield Row(f"{side}: kept, a kill each {every:g} s", target, f"{kept:.0%}")
        waits = np.concatenate([runs[side, every].waits for every in _EVERY[1:]])
        rounds, target = waits / usual.round_secs, "≤ 2" if side == "hetjax" else "none"
        yield Row(f"{side}: kill to next commit, rounds", target, most(rounds), len(waits))
        yield Row(f"{side}: kill to next commit, seconds", "none", most(waits), len(waits))
    yield (
        f"{_TASK.title}, CIFAR-10, {_TASK.batch} examples a round, shares "
        f"{' : '.join(f'{share:g}' for share in SHARES)}, {secs:g} s each."
    )
    yield (
        "torchft has DDP over Gloo with timeouts of 5 s (collectives) and 10 s (manager); its "
        f"lighthouse waits {_HEARTBEAT_MS / 1000:g} s for a heartbeat. Mended: survivors raised."
    )
