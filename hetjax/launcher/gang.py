"""The processes of one attempt: how they are started, what they print, and how they are ended.

Each has a session and a process group of its own. So a Ctrl-C of the terminal reaches the launcher
alone, and all that a worker started can be ended with it. On Linux none outlives the launcher
(`enter.py`), and the guardian puts away what a killed launcher leaves.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hetjax import process_info
from hetjax.launcher import cpu_shares, enter, guardian
from hetjax.liveness import exit_reports

_PROGRESS_SECS = 5.0  # between two states of a progress bar in the log
_MAX_LINE_BYTES = 1 << 16
_DRAIN_SECS = 10.0  # for the last lines; only a process that left its group can hold them up


class WorkerExit(NamedTuple):
    """A worker's process is over."""

    worker: int
    returncode: int  # negative: the signal that ended it, but SIGINT, by which Python ends itself
    time: float  # monotonic


Events = queue.SimpleQueue[WorkerExit | signal.Signals]
"""What happens to an attempt: a worker has ended, or the launcher got a signal."""


class Log:
    """Writes whole lines from many threads to two file descriptors.

    Args:
        out: gets what workers print to standard output.
        err: gets what they print to standard error.
    """

    def __init__(self, out: int = 1, err: int = 2):
        self._out, self._err = out, err
        self._lock = threading.Lock()
        self._broken: set[int] = set()

    def copy(self, source: int, index: int, *, to_stderr: bool) -> None:
        """Copies lines until the source ends, each with the worker's number before it.

        The states of a progress bar end in a carriage return. Worker 0's become lines at a modest
        rate; those of other workers are left out.
        """
        target = self._err if to_stderr else self._out
        prefix = f"[{index}] ".encode()
        rest, shown = b"", -_PROGRESS_SECS
        while chunk := os.read(source, 1 << 16):
            rest += chunk
            pieces = rest.splitlines(keepends=True)
            # A carriage return at the end may have its newline in the next chunk.
            rest = b"" if pieces[-1].endswith(b"\n") else pieces.pop()
            if len(rest) > _MAX_LINE_BYTES:
                pieces.append(rest + b"\n")
                rest = b""
            for piece in pieces:
                if piece.endswith(b"\r"):
                    if index or not piece.strip() or time.monotonic() - shown < _PROGRESS_SECS:
                        continue
                    shown = time.monotonic()
                self._write(target, prefix + piece.rstrip(b"\r\n") + b"\n")
        if rest.strip():
            self._write(target, prefix + rest.rstrip(b"\r") + b"\n")

    def _write(self, target: int, data: bytes) -> None:
        with self._lock:
            while data and target not in self._broken:
                try:
                    data = data[os.write(target, data) :]
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:  # it is not read any more; the workers go on all the same
                    self._broken.add(target)


class Guardian:
    """The process that cleans up when the launcher cannot. It is told of each thing to put away."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, kind: str, name: object) -> None:
        """Hands over a thing, with a kind that `guardian.clean` knows."""
        self._tell(f"+ {kind} {name}\n")

    def drop(self, kind: str, name: object) -> None:
        """Says that it has been put away."""
        self._tell(f"- {kind} {name}\n")

    def close(self) -> None:
        """Ends the guardian, which puts away what has not been dropped."""
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())


@dataclasses.dataclass
class Gang:
    """Processes that all have the same command.

    Args:
        command: the program and its arguments.
        shares: gives the cores and the group of each process.
        log: gets what they print.
        events: gets an `WorkerExit` for each.
        guardian: is told of their process groups.
    """

    _command: Sequence[str]
    _shares: cpu_shares.NoShares
    _log: Log
    _events: Events
    _guardian: Guardian

    def __post_init__(self) -> None:
        self._running: dict[int, subprocess.Popen] = {}
        self._threads: list[threading.Thread] = []
        self.launched: dict[int, float] = {}
        """When the newest process of each number was started, monotonic seconds."""

    @property
    def running(self) -> dict[int, int]:
        """Process ids of the workers whose end has not been handled with `ended`."""
        return {index: process.pid for index, process in self._running.items()}

    def send(self, signum: int) -> None:
        """Sends a signal to each worker, and none to the processes that it started."""
        self._send(signum, os.kill)

    def terminate(self) -> None:
        """Asks all to end, and continues those that are stopped, so that they can."""
        self.send(signal.SIGTERM)
        self._send(signal.SIGCONT, os.killpg)

    def kill(self) -> None:
        """Ends all, with the processes that they started."""
        self._send(signal.SIGKILL, os.killpg)

    def kill_one(self, index: int) -> None:
        """Ends one, with the processes that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._running[index].pid, signal.SIGKILL)

    def ended(self, index: int) -> None:
        """Ends what a worker that is over left behind."""
        self.kill_one(index)
        self._shares.ended(index)
        self._guardian.drop("process_group", self._running.pop(index).pid)

    def close(self) -> None:
        """Ends whatever still runs and copies the last of what was printed."""
        self.kill()
        for process in self._running.values():
            process.wait()
        for index in self.running:
            self.ended(index)
        deadline = time.monotonic() + _DRAIN_SECS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def start(self, index: int, environment: Mapping[str, str]) -> None:
        """Starts a process with these variables beside those of this process; one of its number
        that ran before has ended."""
        held = self._shares.confinement(index)
        cores = ",".join(map(str, held.cores))
        # The main thread starts it: the kernel takes the end of the thread that started a process
        # for the end of the parent.
        entrance = [sys.executable, "-I", "-S", enter.__file__]
        process = subprocess.Popen(
            [*entrance, str(os.getpid()), cores, held.group, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, process_info.JOINED: "", **environment},
            start_new_session=True,
        )
        self._guardian.add("process_group", process.pid)
        self._running[index], self.launched[index] = process, time.monotonic()
        self._shares.started(index, process.pid)
        for pipe, to_stderr in ((process.stdout, False), (process.stderr, True)):
            self._begin(self._copy, pipe, index, to_stderr)
        self._begin(
            lambda: self._events.put(WorkerExit(index, _code(process.wait()), time.monotonic()))
        )

    def _begin(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _copy(self, pipe, index: int, to_stderr: bool) -> None:
        with pipe:
            self._log.copy(pipe.fileno(), index, to_stderr=to_stderr)

    def _send(self, signum: int, send: Callable[[int, int], None]) -> None:
        for process in self._running.values():
            with contextlib.suppress(OSError):
                send(process.pid, signum)


def _code(code: int) -> int:
    """The exit code of a process; Ctrl-C is 130 in whatever way it ended."""
    return exit_reports.INTERRUPTED if code == -signal.SIGINT else code


def is_stopped(pid: int) -> bool:
    """Whether the operating system says that a process is stopped; False if it cannot tell."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
