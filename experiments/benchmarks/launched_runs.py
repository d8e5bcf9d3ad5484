"""Runs of the local launcher, as the benchmark of processes needs them."""

import atexit
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hetjax.zoo import config as config_lib

SHARES = (1.0, 0.5, 0.25, 0.25)
MOST_SECS = 900.0  # of a run


class Arm(NamedTuple):
    """What a run reached in its steady rounds."""

    examples_per_sec: float
    round_secs: float
    waiting: float = 0.0  # share of the workers' time in the local phase
    beside: float = 0.0  # share of a round beside its longest local phase
    quotas: tuple[int, ...] = ()
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
        tuple(steady[-1]["quotas"]),
        _speed(lines[:skipped]) if skipped else 0.0,
    )


def _speed(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(line["examples"] for line in lines) / sum(line["round_secs"] for line in lines)


def of_steps(result: Mapping[str, Any], skipped: int) -> Arm:
    """The same for what `ddp_baseline` has written."""
    secs = statistics.mean(result["step_secs"][skipped:])
    return Arm(result["examples"] / secs, secs)


def middle(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the range where there are several."""
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{spread}"


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
