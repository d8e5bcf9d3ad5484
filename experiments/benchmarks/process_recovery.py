"""What does one kill of a worker cost? Where the seconds go until the run is beyond it."""

import functools
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks import launched_runs
from experiments.benchmarks.rows import Row
from hetjax.processes import beacons


class Recovery(NamedTuple):
    """Seconds from a kill until process 0 has done a round that is new, and until the stages
    before that."""

    restarted: float  # the launcher starts all workers again
    joined: float  # imports are done, and the others are there
    restored: float  # the data is loaded, the checkpoint read
    new_round: float  # programs are compiled, what was lost is done again, and one round more


def recover(beacons_root: pathlib.Path, metrics: pathlib.Path, worker: int) -> Recovery:
    """Kills a worker of the run that writes there, and watches what the others leave."""
    (before,) = beacons_root.glob("hetjax-beacons-*")
    seen = beacons.read(before, worker)
    if seen is None:
        raise RuntimeError(f"worker {worker} does not run")
    with metrics.open() as lines:
        os.kill(seen.pid, signal.SIGKILL)
        killed = time.monotonic()

        def until(condition: Callable[[], Any]) -> tuple[Any, float]:
            return _until(condition), time.monotonic() - killed

        now = functools.partial(beacons_root.glob, "hetjax-beacons-*")
        (after, *_), restarted = until(lambda: [found for found in now() if found != before])
        _, joined = until(lambda: beacons.read(after, 0))
        _, restored = until(lambda: metrics.stat().st_ino != os.fstat(lines.fileno()).st_ino)
        done = lines.read().count("\n")
        _, new_round = until(lambda: metrics.read_text().count("\n") > done)
    return Recovery(restarted, joined, restored, new_round)


def _until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + launched_runs.MOST_SECS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came of it in {launched_runs.MOST_SECS:g} s")
        time.sleep(0.01)
    return value


def kill_rows(data_dir: str | None, trials: int = 5, period_rounds: int = 10) -> list[Row]:
    """Seconds that one kill of a worker costs, and where they go."""
    root = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    metrics, found = root / "run" / "metrics.jsonl", []
    command = launched_runs.train_command(
        metrics.parent,
        data_dir,
        epochs=1_000,
        microbatch_size=32,
        budget=16,
        model={"name": "lenet"},
        checkpoint={"every_rounds": period_rounds, "every_secs": 0.0},
    )
    num_workers = len(launched_runs.SHARES)
    launch = launched_runs.launch_command(num_workers, (), f"--max_restarts={trials + 1}")
    environment = {**launched_runs.environment(), "TMPDIR": str(root)}
    rng = random.Random(0)
    with (root / "log").open("w") as log:
        launcher = subprocess.Popen([*launch, *command], env=environment, stdout=log, stderr=log)
        try:
            for trial in range(trials + 1):  # the first fills the compilation cache
                begun = _until(lambda: metrics.exists() and metrics.read_text().count("\n"))
                more = begun + rng.randrange(3 * period_rounds)
                _until(lambda more=more: metrics.read_text().count("\n") > more)
                recovered = recover(root, metrics, rng.randrange(num_workers))
                found += [recovered] if trial else []
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    columns = [statistics.median(column) for column in zip(*found, strict=True)]
    noticed, joined, restored, again = np.diff([0.0, *columns])
    return [
        Row(
            f"LeNet, 4 processes without limits on {os.cpu_count()} cores, a checkpoint every "
            f"{period_rounds} rounds, warm compilation cache: seconds from kill -9 of a random "
            f"worker to the first new round, {trials} trials",
            "≤ 20",
            f"{columns[-1]:.1f}, most {max(r.new_round for r in found):.1f}",
        ),
        Row(
            "the same, medians: noticing it and ending the others; imports and joining; data, "
            "checks and the checkpoint; compiling and the rounds again",
            "none",
            "; ".join(f"{secs:.1f}" for secs in (noticed, joined, restored, again)),
        ),
    ]
