"""Runs of the local launcher, as the benchmark of processes needs them."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hetjax.zoo import config as config_lib

SHARES = (1.0, 0.5, 0.25, 0.25)
MOST_SECS = 900.0  # of a run
_LAST = 20  # rounds; single ones are trials
_LOOK_SECS = 0.02


class Task(NamedTuple):
    """A model, its rounds, and how long each arm runs."""

    title: str
    model: dict[str, Any]
    microbatch_size: int
    budget: int
    rounds: Mapping[str, int]  # of each arm
    ddp_flags: tuple[str, ...]
    more: Mapping[str, Any] = MappingProxyType({})  # of its configuration

    @property
    def batch(self) -> int:
        return self.microbatch_size * self.budget


TASKS = {
    "mlp": Task(
        "MLP 3072-1024-1024-1024-10 (5.3 million parameters)",
        {"name": "mlp", "hidden": (1024, 1024, 1024)},
        microbatch_size=512,
        budget=8,  # half as many examples each take longer by a twentieth
        rounds={"adaptive": 98, "equal": 28, "ddp": 16},
        ddp_flags=(),
    ),
    "lenet": Task(
        "LeNet (62,006 parameters)",
        {"name": "lenet"},
        microbatch_size=32,
        budget=64,
        rounds={"adaptive": 200, "equal": 64, "ddp": 44},
        ddp_flags=("--channels_last",),  # 1.2x as fast
    ),
}


class Arm(NamedTuple):
    """What a run reached in its steady rounds."""

    examples_per_sec: float
    round_secs: float
    waiting: float = 0.0  # share of the workers' time in the local phase
    beside: float = 0.0  # share of a round beside its longest local phase
    quotas: tuple[int, ...] = ()  # of most of its last rounds
    first_examples_per_sec: float = 0.0  # of the rounds before


def of_lines(lines: Sequence[Mapping[str, Any]], skipped: int) -> Arm:
    """What the lines of a `metrics.jsonl` say, but for the first rounds and those not full."""
    steady = [line for line in lines[skipped:] if line["full"]]
    if not steady:
        raise ValueError(f"{len(lines)} rounds were done, and none of them is steady")
    secs = sum(line["round_secs"] for line in steady)
    return Arm(
        _speed(steady),
        secs / len(steady),
        statistics.mean(line["waiting_fraction"] for line in steady),
        1 - sum(line["local_secs"] for line in steady) / secs,
        statistics.mode(tuple(line["quotas"]) for line in steady[-_LAST:]),
        _speed(lines[:skipped]) if skipped else 0.0,
    )


def _speed(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(line["examples"] for line in lines) / sum(line["round_secs"] for line in lines)


def of_steps(result: Mapping[str, Any], skipped: int) -> Arm:
    """The same for what `ddp_baseline` has written."""
    secs = statistics.mean(result["step_secs"][skipped:])
    return Arm(result["examples"] / secs, secs)


@functools.cache
def directory() -> pathlib.Path:
    """Of this program's files; gone when it ends."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="hetjax-benchmark-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def environment(checkout: pathlib.Path | None = None) -> dict[str, str]:
    """Of the launchers. Compiled programs are kept, so that slow workers start sooner.

    Args:
        checkout: whose hetjax is imported; None: the one that is imported here.
    """
    own = {} if checkout is None else {"PYTHONPATH": str(checkout)}
    return {
        **os.environ,
        **own,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(directory() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def launch_command(num_workers: int, shares: Sequence[float], *options: str) -> list[str]:
    cpus = [f"--cpus={','.join(map(str, shares))}"] if shares else []
    launch = [sys.executable, "-m", "hetjax.launch", f"--workers={num_workers}"]
    return [*launch, *cpus, "--start_secs=inf", *options, "--"]


def run_workers(
    shares: Sequence[float], command: Sequence[str], *, checkout: pathlib.Path | None = None
) -> None:
    """Runs a command as workers at these shares of a core, to its end.

    Args:
        shares: of each worker.
        command: of a worker.
        checkout: whose launcher and programs are run, in its directory; None: those here.
    """
    full = [*launch_command(len(shares), shares, "--max_restarts=0"), *command]
    done = subprocess.run(
        full,
        env=environment(checkout),
        cwd=checkout,  # where `python -m` looks first
        capture_output=True,
        text=True,
        timeout=MOST_SECS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(full)} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def train_command(workdir: pathlib.Path, data_dir: str | None, **fields: Any) -> list[str]:
    """The command of a hetjax run on CIFAR-10; its configuration lies beside its directory.

    It holds the given fields alone, so that an earlier version knows all of them.
    """
    place = str(pathlib.Path(data_dir).absolute()) if data_dir else ""
    given = {"data": {"name": "cifar10", "dir": place, **fields.pop("data", {})}, **fields}
    config_lib.validate(given)
    path = workdir.with_suffix(".json")
    path.write_text(json.dumps(given))
    return [sys.executable, "-m", "experiments.train", f"--config={path}", f"--workdir={workdir}"]


def task_command(
    task: Task,
    policy: str,
    rounds: tuple[int, int],
    num_workers: int,
    workdir: pathlib.Path,
    data_dir: str | None,
) -> list[str]:
    """The command of a run of a task, with these epochs and rounds an epoch; nothing is saved."""
    epochs, per_epoch = rounds
    return train_command(
        workdir,
        data_dir,
        epochs=epochs,
        eval_every=1_000,
        microbatch_size=task.microbatch_size,
        budget=task.budget,
        data={"num_train": per_epoch * task.batch},
        model=task.model,
        quota={"policy": policy},
        cluster={"num_workers": num_workers},
        checkpoint={"every_secs": 0.0},
        **{"optimizer": {"learning_rate": 0.01}, **task.more},
    )


def run_lines(
    task: Task,
    policy: str,
    num_rounds: int,
    shares: Sequence[float],
    data_dir: str | None,
    *,
    checkout: pathlib.Path | None = None,
) -> list[dict[str, Any]]:
    """Trains a task at these shares, and returns the lines of its rounds.

    Args:
        task: what is trained.
        policy: of the quotas.
        num_rounds: as many as there are.
        shares: of each worker.
        data_dir: has CIFAR-10.
        checkout: as of `run_workers`.
    """
    workdir = pathlib.Path(tempfile.mkdtemp(dir=directory()))
    epochs = -(-num_rounds * task.batch // 50_000)
    per_epoch = -(-num_rounds // epochs)
    command = task_command(task, policy, (epochs, per_epoch), len(shares), workdir, data_dir)
    run_workers(shares, command, checkout=checkout)
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


class NewLines:
    """Those that have been added to a file.

    Args:
        path: of the file, where there is one.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[str]:
        """The whole ones since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._offset = min(self._offset, self._path.stat().st_size)  # of a run begun anew
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            return whole.decode().splitlines()
        return []


class Commits(threading.Thread):
    """Notes when each round of a run was decided, in unix seconds: its line is written when the
    next one begins.

    Args:
        workdir: of the run.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        super().__init__(daemon=True)
        self._lines = NewLines(workdir / "metrics.jsonl")
        self.at: dict[int, float] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(_LOOK_SECS):
            now = time.time()
            for line in self._lines.read():
                with contextlib.suppress(ValueError):  # the rest of one that was written again
                    self.at.setdefault(json.loads(line)["round"], now)


def workers_of(launcher: int, named: str) -> list[int]:
    """Ids of the launcher's processes whose command line has this text."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and named.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return sorted(found)
