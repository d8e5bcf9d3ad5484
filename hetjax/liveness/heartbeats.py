"""What is each worker of a process doing? Said in a file, for the launcher.

A process that a supervisor started writes a file several times a heartbeat. It says that the
process is alive, and since when each of its workers computes, loads or waits. The supervisor reads
the files of all processes and names the process at fault (`launcher/faults.py`).
Assumes one machine: the times are those of its monotonic clock, which all processes share.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetjax import process_info

WRITES_PER_HEARTBEAT = 8
STACKS = signal.SIGQUIT
"""The signal at which a process writes its stacks; schedulers send others."""

OWN_WORK = ("evaluating", "reporting", "checkpointing")
"""Phases in which a process may be slow, for which the others wait."""

_MOST_SECS = 2.5  # between two of them: in a run apart a process that is silent is taken as late
# A file has two places, written in turn. So one of them is whole at any time.
_PLACE_BYTES = 1 << 20


class Entry(NamedTuple):
    """What one worker, or one thread, does, and since when (monotonic seconds)."""

    phase: str
    since: float
    round_index: int | None = None
    worker: int | None = None


class Snapshot(NamedTuple):
    """What a process last said of itself."""

    pid: int
    alive: float
    entries: tuple[Entry, ...] = ()
    closed: bool = False


class Heartbeats:
    """Writes nothing: what a process has if no supervisor started it. `start` makes either kind."""

    def __init__(self) -> None:
        self._entries: dict[Any, Entry] = {}

    def at(self, phase: str, round_index: int | None = None, worker: int | None = None) -> None:
        """Says what a worker, or else this thread, begins to do now.

        Costs about a microsecond and may be called from any thread. A call with the same phase
        counts as progress: call it for each microbatch, not only for each round.

        Args:
            phase: starting (imports, restoring, compiling: start_secs are allowed), waiting (for
                other workers: never at fault by itself), loading (waiting for data), computing,
                evaluating, reporting (callbacks), checkpointing or done.
            round_index: the round that it belongs to.
            worker: whose phase it is, by its position on the mesh. None: this thread's.
        """
        key = ("thread", threading.get_ident()) if worker is None else worker
        self._entries[key] = Entry(phase, time.monotonic(), round_index, worker)

    def busy(self) -> Entry | None:
        """The entry that has lasted longest of all that are no wait for other processes."""
        entries = [e for e in list(self._entries.values()) if e.phase not in ("waiting", "done")]
        return min(entries, key=lambda entry: entry.since, default=None)

    def now(self) -> Entry | None:
        """The same; if there is no such entry, the wait that began last."""
        waiting = max(list(self._entries.values()), key=lambda entry: entry.since, default=None)
        return self.busy() or waiting

    def close(self) -> None:
        """Says that all is done and stops writing. The process should end soon after."""
        self._entries.clear()


class _Writer(Heartbeats):
    def __init__(self, directory: pathlib.Path, process: int, heartbeat_secs: float):
        super().__init__()
        self._file = open(path(directory, process), "wb", buffering=0)  # noqa: SIM115
        self._num_written = 0
        self._period_secs = min(heartbeat_secs / WRITES_PER_HEARTBEAT, _MOST_SECS)
        self._closed = self._has_begun = False
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._stack_file = open(stack_path(directory, process), "w")  # noqa: SIM115
        faulthandler.register(STACKS, file=self._stack_file, all_threads=True)
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def at(self, phase: str, round_index: int | None = None, worker: int | None = None) -> None:
        is_first = not self._entries
        super().at(phase, round_index, worker)
        if is_first:
            self._wake.set()
        if round_index is not None and not (self._has_begun or self._closed):
            self._has_begun = True
            self._write()  # before it can end: the launcher asks whether a round has begun

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._file.close()
        faulthandler.unregister(STACKS)
        self._stack_file.close()
        super().close()

    def _run(self) -> None:
        while not self._closed:
            self._write()
            self._wake.wait(self._period_secs)
            self._wake.clear()
        self._write()

    def _write(self) -> None:
        # One system call: each releases the interpreter. A process with a tenth of a core and busy
        # threads gets it back after a long time.
        with self._writing, contextlib.suppress(OSError):  # a full disk must not end the run
            entries = tuple(self._entries.values())
            said = Snapshot(os.getpid(), time.monotonic(), entries, self._closed)
            data = json.dumps(said._asdict()).encode()
            data = b"%08x%08x" % (zlib.crc32(data), len(data)) + data
            os.pwrite(self._file.fileno(), data, self._num_written % 2 * _PLACE_BYTES)
            self._num_written += 1


def start(environ: Mapping[str, str] = os.environ) -> Heartbeats:
    """Begins to say what this process does, if a supervisor asked for it.

    Reads `HETJAX_BEACONS` (a directory), `HETJAX_PROCESS_ID` and `HETJAX_HEARTBEAT_SECS`. From
    then on SIGQUIT makes the process write the stacks of its threads into the directory.

    Args:
        environ: where the variables are.

    Returns:
        An object that writes, or one that does nothing: `HETJAX_BEACONS` is not set, or a child has
        inherited it.

    Example:
        >>> heartbeats = start({})
        >>> heartbeats.at("computing", round_index=3, worker=0)
        >>> heartbeats.close()
    """
    directory = environ.get("HETJAX_BEACONS")
    if not directory or process_info.is_child(environ):
        return Heartbeats()
    process = int(environ["HETJAX_PROCESS_ID"])
    return _Writer(pathlib.Path(directory), process, float(environ["HETJAX_HEARTBEAT_SECS"]))


def stack_path(directory: pathlib.Path, process: int) -> pathlib.Path:
    """Where a process writes its stacks on SIGQUIT."""
    return directory / f"process-{process}.stack"


def read(directory: pathlib.Path, process: int) -> Snapshot | None:
    """Returns what a process last said, or None if it said nothing that can be read."""
    try:
        with open(path(directory, process), "rb") as file:
            places = [os.pread(file.fileno(), _PLACE_BYTES, at) for at in (0, _PLACE_BYTES)]
    except OSError:
        return None
    snapshots = [snapshot for place in places if (snapshot := _parse(place)) is not None]
    return max(snapshots, key=lambda snapshot: snapshot.alive, default=None)


def any_round(directory: pathlib.Path) -> bool:
    """Whether any process has begun a round."""
    processes = [int(file.stem.split("-")[1]) for file in directory.glob("*.beacon")]
    told = [said.entries for process in processes if (said := read(directory, process))]
    return any(entry.round_index is not None for entries in told for entry in entries)


def _parse(place: bytes) -> Snapshot | None:
    """What one place of a file says; None where it is empty or being written."""
    try:
        data = place[16 : 16 + int(place[8:16], 16)]
        if zlib.crc32(data) != int(place[:8], 16):
            return None
        content = json.loads(data)
        content["entries"] = tuple(Entry(*entry) for entry in content["entries"])
        return Snapshot(**content)
    except (ValueError, KeyError, TypeError):
        return None


def path(directory: pathlib.Path, process: int) -> pathlib.Path:
    """Of the file of a process."""
    return directory / f"process-{process}.beacon"
