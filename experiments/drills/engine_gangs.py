"""A run that an engine has started, from outside: its processes, its rounds, its end.

An engine is a command that starts a process for each worker, such as `mpirun -n 4`. What a process
is in the run is read where the process itself reads it, in its environment.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax import process_info

NUM_WORKERS = 4
OPEN_MPI = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # more processes than cores
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
}
"""Environment in which `mpirun -n 4` works on this machine, too."""

PATIENCE_SECS = 900.0  # with 30 programs on two cores a cold start takes five minutes
_SHARED_MEMORY = pathlib.Path("/dev/shm")


class EngineRun:
    """A command that starts all processes of a run, as a context that ends them.

    Args:
        command: of the engine, with the program and its arguments.
        workdir: of the run.
        environment: of the command.
        log: a file that gets what all print.
        cwd: where the command runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        workdir: pathlib.Path,
        *,
        environment: Mapping[str, str] = os.environ,
        log: pathlib.Path,
        cwd: pathlib.Path | None = None,
    ) -> None:
        self._workdir, self._log = workdir, log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self) -> "EngineRun":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in ranks(self._workdir).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def wait_for_round(self, number: int) -> dict[int, int]:
        """As `wait_for_round`, and no longer than the command lasts."""
        return wait_for_round(self._workdir, number, self._log, lambda: self.is_over)

    def send(self, signum: int) -> None:
        """Sends a signal to the engine's command."""
        self._process.send_signal(signum)

    def end(self, secs: float = PATIENCE_SECS) -> int:
        """Waits for the end of the command; its exit code."""
        return self._process.wait(timeout=secs)


def until(condition: Callable[[], Any], secs: float = PATIENCE_SECS) -> Any:
    """Waits until a condition holds; what it gave.

    Raises:
        TimeoutError: it does not hold in time.
    """
    ends = time.monotonic() + secs
    while not (value := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"nothing came of it in {secs:g} s")
        time.sleep(0.01)
    return value


def wait_for_round(
    workdir: pathlib.Path,
    number: int,
    log: pathlib.Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Waits until so many rounds are done; the process ids by rank.

    Raises:
        RuntimeError: the run ended before; with the end of its log.
        TimeoutError: it does not come so far.
    """
    until(lambda: is_over() or num_rounds(workdir) > number)
    found = ranks(workdir)
    if len(found) < NUM_WORKERS:
        said = log.read_text()[-3000:] if log else ""
        raise RuntimeError(f"the run is over, or some of its processes are not there:\n{said}")
    return found


def num_rounds(workdir: pathlib.Path) -> int:
    """How many rounds its records have."""
    with contextlib.suppress(FileNotFoundError):
        return (workdir / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def ranks(workdir: pathlib.Path) -> dict[int, int]:
    """The process ids of a run's processes, by their numbers in the run."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            program, *words = (path / "cmdline").read_bytes().decode().split("\0")
            given = [word[10:] for word in words if word.startswith("--workdir=")]
            if not pathlib.Path(program).name.startswith("python") or not given:
                continue
            if (path / "cwd").readlink() / given[0] != workdir:
                continue
            pairs = (path / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        member = process_info.find(environment=dict(p.split("=", 1) for p in pairs if "=" in p))
        if member is not None:
            found[member.process_id] = int(path.name)
    return found


def is_whole(workdir: pathlib.Path, rounds: int) -> bool:
    """Whether a run came to its end, with each of so many rounds once in its records."""
    summary = json.loads((workdir / "summary.json").read_text())
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["round"] for line in lines]
    return not summary["interrupted"] and numbers == list(range(rounds))


def lost_and_doubled(workdir: pathlib.Path) -> tuple[int, int]:
    """How many examples were never processed in their pass, and how many more than once."""
    summary = json.loads((workdir / "summary.json").read_text())
    return summary["examples_missing"], summary["examples_duplicated"]


def files_in_memory() -> set[str]:
    """The names of what lies in shared memory."""
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.exists() else set()
