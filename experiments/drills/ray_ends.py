"""Ends the head, the driver or the referee of an elastic run over Ray, and calls it again.

The driver is a program of its own. What it runs tells its processes in a file `processes` and its
rounds in `rounds`, and ends when there is a file `over` (`ray_elastic.train`).
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.drills import fault_cases

WHAT = ("head", "driver", "referee")
_MOST_SECS = 120.0
_ROUNDS = 60  # before the end: there is a checkpoint; and after the second call
_SAID = re.compile(r"hetjax: worker \d+ has lost .*|The actor is dead because its owner has died")


def parent(pid: int) -> int:
    """Of a process; 0 where it is gone."""
    try:
        state, ppid = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(ppid)


def children(pid: int) -> list[int]:
    found = [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
    return [child for child in found if parent(child) == pid]


def trainers(directory: pathlib.Path) -> list[int]:
    """The processes that train now."""
    path = directory / "processes"
    told = path.read_text().splitlines() if path.exists() else []
    return [pid for line in told if parent(pid := int(line.split()[0]))]


def rounds(directory: pathlib.Path) -> list[int]:
    """That have been done, in the order in which it was told."""
    path = directory / "rounds"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def wait(condition: Callable[[], Any], what: str, secs: float = _MOST_SECS) -> float:
    """Waits until something is so; the seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + secs:
            sys.exit(f"not within {secs:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


class Program:
    """A driver: a program that calls `launch`.

    Args:
        code: of it, in Python.
        directory: its argument.
        address: of the cluster.
    """

    def __init__(self, code: str, directory: pathlib.Path, address: str) -> None:
        self._log = directory / "driver"
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(directory)],
                cwd=fault_cases.ROOT,
                env=os.environ | {"RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0"},
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_for_rounds(self, directory: pathlib.Path, count: int) -> None:
        def is_there() -> bool:
            if self.process.poll() is not None:
                sys.exit(f"the driver has ended:\n{self.said()[-2000:]}")
            return len(rounds(directory)) >= count

        wait(is_there, f"{count} rounds")


@dataclasses.dataclass
class Outcome:
    """What came of an end."""

    secs: float  # until no process was left
    workers: int
    said: list[str]  # by workers that said what they had lost
    lost_rounds: int  # that were done again
    summary: dict[str, Any]  # of the second call


def ended(
    what: str, directory: pathlib.Path, code: str, nodes: Any, again: Callable[[], Any]
) -> Outcome:
    """Ends something, waits until no process is left, and makes the same call again.

    Args:
        what: of `WHAT`.
        directory: of the run; new.
        code: of the driver.
        nodes: as `ray_nodes.Nodes`.
        again: the nodes for the second call.
    """
    driver = Program(code, directory, nodes.address)
    driver.wait_for_rounds(directory, _ROUNDS)
    referee = _referees(nodes)
    workers, processes = trainers(directory), nodes.head_processes
    kill = {"driver": [driver.process.pid], "referee": referee}
    for pid in kill.get(what, processes):
        os.kill(pid, signal.SIGKILL)
    secs = wait(
        lambda: driver.process.poll() is not None and not any(map(parent, [*workers, *referee])),
        "the end of all processes",
    )
    said = [line for pid in workers for line in _said(nodes.logs, pid)]
    before = rounds(directory)
    nodes = again()
    second = Program(code, directory, nodes.address)
    second.wait_for_rounds(directory, len(before) + _ROUNDS)
    (directory / "over").touch()
    wait(lambda: second.process.poll() is not None, "the end of the second call")
    if second.process.returncode:
        sys.exit(f"the second call failed:\n{second.said()[-2000:]}")
    lost = 1 + before[-1] - rounds(directory)[len(before)]
    summary = json.loads((directory / "run" / "summary.json").read_text())
    return Outcome(secs, len(workers), said, lost, summary)


def _referees(nodes: Any) -> list[int]:
    def is_one(pid: int) -> bool:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RefereeHost")

    return [pid for pid in children(nodes.head_processes[-1]) if is_one(pid)]


def _said(logs: pathlib.Path, pid: int) -> Sequence[str]:
    """The last sentence of a worker about what it has lost: its own, or Ray's."""
    texts = [path.read_text() for path in sorted(logs.glob(f"*[-_]{pid}.*"))]
    return [found for text in texts for found in _SAID.findall(text)][:1]
