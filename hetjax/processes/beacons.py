"""What is each worker doing, and which of them holds the others up?

A process that a supervisor started says in a file, several times a heartbeat, that it is alive
and since when each of its workers computes, loads or waits. The supervisor reads the files of
all processes and names who is at fault: `find_fault` is a pure function of them and the clock.
Assumes one machine: the times are those of its monotonic clock, which all processes share.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import pathlib
import signal
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

PHASES = (
    "starting",  # imports, restoring, compiling: start_secs are allowed
    "waiting",  # for other workers: never at fault by itself
    "loading",  # waiting for data
    "computing",
    "evaluating",
    "reporting",  # callbacks
    "checkpointing",
    "done",
)
WRITES_PER_HEARTBEAT = 8
# A fault is older than this when it is named: with the time until the file is written and until
# it is read, each an eighth of a heartbeat, it is noticed within two heartbeats.
FAULT_HEARTBEATS = 1.5
DEADLOCK_HEARTBEATS = 2.0
# A file has two places, which are written in turn, so that one of them is whole at any time.
_PLACE_BYTES = 1 << 20


class Entry(NamedTuple):
    """What one worker, or one thread, does, and since when (monotonic seconds)."""

    phase: str
    since: float
    round_index: int | None = None
    worker: int | None = None
    thread: int = 0


class Beacons:
    """Tells nobody outside: what a process has that no supervisor started. `start` makes the other
    kind."""

    def __init__(self) -> None:
        self._entries: dict[Any, Entry] = {}

    def at(self, phase: str, round_index: int | None = None, worker: int | None = None) -> None:
        """Says what a worker, or else this thread, begins to do now.

        Costs about a microsecond and may be called from any thread. A call with the same phase
        counts as progress: call it for each microbatch, not only for each round.

        Args:
            phase: one of PHASES.
            round_index: the round that it belongs to.
            worker: whose phase it is, by its position on the mesh. None: this thread's.
        """
        thread = threading.get_ident()
        key = ("thread", thread) if worker is None else worker
        self._entries[key] = Entry(phase, time.monotonic(), round_index, worker, thread)

    def busy(self) -> Entry | None:
        """What has lasted longest of all that is no wait for other processes."""
        entries = [e for e in list(self._entries.values()) if e.phase not in ("waiting", "done")]
        return min(entries, key=lambda entry: entry.since, default=None)

    def now(self) -> Entry | None:
        """The same, and where there is no such thing the wait that began last."""
        waiting = max(list(self._entries.values()), key=lambda entry: entry.since, default=None)
        return self.busy() or waiting

    def close(self) -> None:
        """Says that all is done and stops writing. The process should end soon after."""
        self._entries.clear()


class _Writer(Beacons):
    def __init__(self, directory: pathlib.Path, process: int, heartbeat_secs: float):
        super().__init__()
        self._process = process
        self._file = open(_path(directory, process), "wb", buffering=0)  # noqa: SIM115
        self._num_written = 0
        self._period_secs = heartbeat_secs / WRITES_PER_HEARTBEAT
        self._spoke = False
        self._closed = False
        self._wake = threading.Event()
        self._stack_file = open(stack_path(directory, process), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=self._stack_file, all_threads=True)
        self._thread = threading.Thread(target=self._run, name="beacons", daemon=True)
        self._thread.start()

    def at(self, phase: str, round_index: int | None = None, worker: int | None = None) -> None:
        super().at(phase, round_index, worker)
        if not self._spoke:
            self._spoke = True
            self._wake.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._file.close()
        faulthandler.unregister(signal.SIGUSR1)
        self._stack_file.close()
        super().close()

    def _run(self) -> None:
        while not self._closed:
            self._write()
            self._wake.wait(self._period_secs)
            self._wake.clear()
        self._write()

    def _write(self) -> None:
        now = time.monotonic()
        content = {
            "process": self._process,
            "pid": os.getpid(),
            "alive": now,
            "closed": self._closed,
            "entries": list(self._entries.values()),
        }
        # One call of the system: each gives the interpreter away, and a process with a tenth of
        # a core whose other threads are busy waits for it a long time.
        data = json.dumps(content).encode()
        with contextlib.suppress(OSError):  # a full disk must not end the run
            place = self._num_written % 2 * _PLACE_BYTES
            os.pwrite(
                self._file.fileno(), b"%08x%08x" % (zlib.crc32(data), len(data)) + data, place
            )
        self._num_written += 1


def start(environ: Mapping[str, str] | None = None) -> Beacons:
    """Begins to say what this process does, where a supervisor asked for it.

    Reads `HETJAX_BEACONS` (a directory), `HETJAX_PROCESS_ID` and `HETJAX_HEARTBEAT_SECS`. From
    then on SIGUSR1 makes the process write the stacks of its threads into the directory.

    Args:
        environ: where the variables are. None: `os.environ`.

    Returns:
        An object that writes; one that does nothing where `HETJAX_BEACONS` is not set.

    Example:
        >>> beacons = start({})
        >>> beacons.at("computing", round_index=3, worker=0)
        >>> beacons.close()
    """
    environ = os.environ if environ is None else environ
    directory = environ.get("HETJAX_BEACONS")
    if not directory:
        return Beacons()
    try:
        process = int(environ["HETJAX_PROCESS_ID"])
        heartbeat_secs = float(environ["HETJAX_HEARTBEAT_SECS"])
    except (KeyError, ValueError) as error:
        raise ValueError(
            "HETJAX_BEACONS is set, and then HETJAX_PROCESS_ID must be an integer and "
            f"HETJAX_HEARTBEAT_SECS a number of seconds ({error}). hetjax.launch sets all three; "
            "to run without it, unset HETJAX_BEACONS."
        ) from None
    return _Writer(pathlib.Path(directory), process, heartbeat_secs)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a process last said of itself."""

    pid: int
    alive: float
    entries: tuple[Entry, ...] = ()
    closed: bool = False


@dataclasses.dataclass(frozen=True)
class Fault:
    """Who holds the others up, and why.

    Args:
        process: whose fault it is; None: nobody's in particular.
        reason: a sentence that names the worker.
        thread: the identifier of the thread that it is about, or 0.
    """

    process: int | None
    reason: str
    thread: int = 0


def stack_path(directory: pathlib.Path, process: int) -> pathlib.Path:
    """Where a process writes its stacks on SIGUSR1."""
    return directory / f"process-{process}.stack"


def read(directory: pathlib.Path, process: int) -> Snapshot | None:
    """Returns what a process last said, or None where it said nothing that can be read."""
    try:
        with open(_path(directory, process), "rb") as file:
            places = [os.pread(file.fileno(), _PLACE_BYTES, at) for at in (0, _PLACE_BYTES)]
    except OSError:
        return None
    snapshots = [snapshot for place in places if (snapshot := _parse(place)) is not None]
    return max(snapshots, key=lambda snapshot: snapshot.alive, default=None)


def _parse(place: bytes) -> Snapshot | None:
    """What one place of a file says; None where it is empty or being written."""
    try:
        data = place[16 : 16 + int(place[8:16], 16)]
        if zlib.crc32(data) != int(place[:8], 16):
            return None
        content = json.loads(data)
        entries = tuple(Entry(*entry) for entry in content["entries"])
        return Snapshot(
            int(content["pid"]), float(content["alive"]), entries, bool(content["closed"])
        )
    except (ValueError, KeyError, TypeError):
        return None


def _path(directory: pathlib.Path, process: int) -> pathlib.Path:
    return directory / f"process-{process}.beacon"


def find_fault(
    snapshots: Mapping[int, Snapshot | None],
    *,
    now: float,
    launched: float,
    heartbeat_secs: float,
    start_secs: float,
    stopped: Collection[int] = (),
) -> Fault | None:
    """Names the worker that holds the others up.

    In this order: a process that is stopped or says nothing any more; the entry that is longest
    over its limit, 1.5 heartbeats, or `start_secs` while starting; and where all have waited for
    each other for 2 heartbeats nobody, but the one in the earliest round first.

    Args:
        snapshots: of each process that still runs; None: it has said nothing yet, and counts as
            starting since `launched`.
        now: monotonic seconds.
        launched: when the processes were started, monotonic seconds.
        heartbeat_secs: how long a phase may take without a new call of `at`, roughly.
        start_secs: how long starting may take.
        stopped: the processes that the operating system reports as stopped.

    Returns:
        The fault, or None where all is well.

    Example:
        >>> stuck = Snapshot(11, alive=99.9, entries=(Entry("computing", 50.0, 17, 1),))
        >>> waits = Snapshot(12, alive=99.9, entries=(Entry("waiting", 51.0, 17, 0),))
        >>> find_fault({0: waits, 1: stuck}, now=100.0, launched=0.0, heartbeat_secs=30.0,
        ...            start_secs=300.0).reason
        'worker 1: computing for 49 s in round 17'
    """
    limit_secs = FAULT_HEARTBEATS * heartbeat_secs
    silent: list[tuple[float, Fault]] = []
    overdue: list[tuple[float, Fault]] = []
    for process, snapshot in snapshots.items():
        alive = launched if snapshot is None else snapshot.alive
        entries = _entries_of(snapshot, launched)
        # Imports and exits can hold the interpreter for long: they have a limit of their own.
        may_be_silent = all(entry.phase in ("starting", "done") for entry in entries)
        state = "stopped (SIGSTOP)" if process in stopped else "frozen"
        no_sign = f"worker {process}: {state}, no sign of life for {_secs(now - alive)}"
        if now - alive > limit_secs and (process in stopped or not may_be_silent):
            silent.append((now - alive, Fault(process, no_sign)))
        for entry in entries:
            age = now - entry.since
            allowed = start_secs if entry.phase == "starting" else limit_secs
            if not (entry.phase == "starting" or process in stopped):
                age = alive - entry.since  # what it did after its last word nobody knows
            if entry.phase not in ("waiting", "done") and age > allowed:
                if process in stopped:  # in the midst of this, and that is why it lasts
                    silent.append((now - alive, Fault(process, no_sign)))
                    continue
                reason = _reason(process, entry, age, start_secs)
                if snapshot is None:
                    reason += "; a program without beacons needs --start_secs=inf"
                overdue.append((age / allowed, Fault(process, reason, entry.thread)))
    for found in (silent, overdue):
        if found:
            return max(found, key=lambda pair: pair[0])[1]
    return _find_deadlock(snapshots, now, launched, heartbeat_secs)


def _find_deadlock(
    snapshots: Mapping[int, Snapshot | None],
    now: float,
    launched: float,
    heartbeat_secs: float,
) -> Fault | None:
    everyone = [
        (process, entry)
        for process, snapshot in snapshots.items()
        for entry in _entries_of(snapshot, launched)
    ]
    waiting = [(process, entry) for process, entry in everyone if entry.phase == "waiting"]
    if not everyone or any(entry.phase not in ("waiting", "done") for _, entry in everyone):
        return None
    if not waiting:  # all are done, and what else the program does is its own business
        return None
    age = now - max(entry.since for _, entry in waiting)
    if age <= DEADLOCK_HEARTBEATS * heartbeat_secs:
        return None
    rounds = {entry.round_index for _, entry in waiting if entry.round_index is not None}
    text = f"all workers wait for each other for {_secs(age)}"
    if len(rounds) < 2:
        return Fault(None, text + (f" in round {rounds.pop()}" if rounds else ""))
    process, entry = min(
        ((p, e) for p, e in waiting if e.round_index is not None),
        key=lambda pair: (pair[1].round_index, pair[0]),
    )
    reason = (
        f"{_name(process, entry)}: waiting in round {entry.round_index}, others in round "
        f"{max(rounds)}; {text}"
    )
    return Fault(process, reason, entry.thread)


def _entries_of(snapshot: Snapshot | None, launched: float) -> tuple[Entry, ...]:
    if snapshot is None or not (snapshot.entries or snapshot.closed):
        return (Entry("starting", launched),)
    if snapshot.closed:
        return (Entry("done", snapshot.alive),)
    return snapshot.entries


def _reason(process: int, entry: Entry, age: float, start_secs: float) -> str:
    name = _name(process, entry)
    if entry.phase == "starting":
        return f"{name}: starting for {_secs(age)}, where --start_secs={start_secs:g} are allowed"
    if entry.phase == "loading":
        name += "'s data"
    where = "" if entry.round_index is None else f" in round {entry.round_index}"
    return f"{name}: {entry.phase} for {_secs(age)}{where}"


def _name(process: int, entry: Entry) -> str:
    if entry.worker is None or entry.worker == process:
        return f"worker {process}"
    return f"worker {entry.worker} (process {process})"


def _secs(secs: float) -> str:
    return f"{secs:.1f} s" if secs < 10 else f"{math.floor(secs)} s"
