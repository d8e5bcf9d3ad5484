"""Which worker holds the others up? A pure function of what all said of themselves, and the clock.

The processes say it in files (`liveness/heartbeats.py`), which the supervisor reads.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hetjax.liveness import heartbeats

# A fault is named when it is older than this. It takes an eighth of a heartbeat until the file is
# written and another until it is read, so a fault is noticed within two heartbeats.
FAULT_HEARTBEATS = 1.5
DEADLOCK_HEARTBEATS = 2.0


class Fault(NamedTuple):
    """Who holds the others up, and why.

    Args:
        process: the one at fault; None: none in particular.
        reason: a sentence that names the worker.
    """

    process: int | None
    reason: str


def find_fault(
    snapshots: Mapping[int, heartbeats.Snapshot | None],
    *,
    now: float,
    launched: Mapping[int, float],
    heartbeat_secs: float,
    start_secs: float,
    busy_secs: float = 0.0,
    stopped: Collection[int] = (),
) -> Fault | None:
    """Names the worker that holds the others up.

    First it looks for a process that is stopped or says nothing any more. Then it looks for the
    entry that is longest over its limit: 1.5 heartbeats, or `start_secs` while starting. If all
    have waited for each other for 2 heartbeats, none is at fault; the reason names the one in
    the earliest round first.

    Args:
        snapshots: of each process that still runs; None: it has said nothing yet, and counts as
            starting since `launched`.
        now: monotonic seconds.
        launched: when each process was started, monotonic seconds.
        heartbeat_secs: how long a phase may take without a new call of `at`, roughly.
        start_secs: how long starting may take.
        busy_secs: how long work of a process's own may take, if that is longer.
        stopped: the processes that the operating system reports as stopped.

    Returns:
        The fault, or None where all is well.

    Example:
        >>> Entry, Snapshot = heartbeats.Entry, heartbeats.Snapshot
        >>> stuck = Snapshot(11, alive=99.9, entries=(Entry("computing", 50.0, 17, 1),))
        >>> waits = Snapshot(12, alive=99.9, entries=(Entry("waiting", 51.0, 17, 0),))
        >>> find_fault({0: waits, 1: stuck}, now=100.0, launched={0: 0.0, 1: 0.0},
        ...            heartbeat_secs=30.0, start_secs=300.0).reason
        'worker 1: computing for 49 s in round 17'
    """
    limit_secs = FAULT_HEARTBEATS * heartbeat_secs
    longer = dict.fromkeys(heartbeats.OWN_WORK, max(busy_secs, limit_secs))
    longer["starting"] = start_secs
    silent: list[tuple[float, Fault]] = []
    overdue: list[tuple[float, Fault]] = []
    entries_of = {process: _entries(said, launched[process]) for process, said in snapshots.items()}
    for process, entries in entries_of.items():
        snapshot = snapshots[process]
        alive = launched[process] if snapshot is None else snapshot.alive
        # Imports and exits can hold the interpreter for long, so they have a limit of their own.
        may_be_silent = all(entry.phase in ("starting", "done") for entry in entries)
        state = "stopped (SIGSTOP)" if process in stopped else "frozen"
        no_sign = f"worker {process}: {state}, no sign of life for {_secs(now - alive)}"
        if now - alive > limit_secs and (process in stopped or not may_be_silent):
            silent.append((now - alive, Fault(process, no_sign)))
        for entry in entries:
            age = now - entry.since
            allowed = longer.get(entry.phase, limit_secs)
            if not (entry.phase == "starting" or process in stopped):
                age = alive - entry.since  # what it did after its last word is not known
            if entry.phase not in ("waiting", "done") and age > allowed:
                if process in stopped:  # it was stopped in this phase, which therefore lasts
                    silent.append((now - alive, Fault(process, no_sign)))
                    continue
                reason = _reason(process, entry, age, start_secs)
                if snapshot is None:
                    reason += "; a program without heartbeats needs --start_secs=inf"
                overdue.append((age / allowed, Fault(process, reason)))
    if found := silent or overdue:
        return max(found, key=lambda pair: pair[0])[1]
    everyone = [(process, entry) for process, entries in entries_of.items() for entry in entries]
    return _find_deadlock(everyone, now, heartbeat_secs)


def _find_deadlock(
    everyone: Sequence[tuple[int, heartbeats.Entry]], now: float, heartbeat_secs: float
) -> Fault | None:
    if any(entry.phase not in ("waiting", "done") for _, entry in everyone):
        return None
    waiting = [(process, entry) for process, entry in everyone if entry.phase == "waiting"]
    age = now - max((entry.since for _, entry in waiting), default=now)  # where all are done: 0
    if age <= DEADLOCK_HEARTBEATS * heartbeat_secs:
        return None
    rounds = {entry.round_index for _, entry in waiting if entry.round_index is not None}
    text = f"all workers wait for each other for {_secs(age)}"
    if len(rounds) < 2:
        return Fault(None, text + (f" in round {rounds.pop()}" if rounds else ""))
    first = [(p, e) for p, e in waiting if e.round_index == min(rounds)]
    process, entry = min(first, key=lambda pair: pair[0])
    where = f"waiting in round {entry.round_index}, others in round {max(rounds)}"
    return Fault(process, f"{_name(process, entry)}: {where}; {text}")


def _entries(snapshot: heartbeats.Snapshot | None, launched: float) -> tuple[heartbeats.Entry, ...]:
    if snapshot is None or not (snapshot.entries or snapshot.closed):
        return (heartbeats.Entry("starting", launched),)
    if snapshot.closed:
        return (heartbeats.Entry("done", snapshot.alive),)
    return snapshot.entries


def _reason(process: int, entry: heartbeats.Entry, age: float, start_secs: float) -> str:
    name = _name(process, entry)
    if entry.phase == "starting":
        return f"{name}: starting for {_secs(age)}, where --start_secs={start_secs:g} are allowed"
    if entry.phase == "loading":
        name += "'s data"
    where = "" if entry.round_index is None else f" in round {entry.round_index}"
    return f"{name}: {entry.phase} for {_secs(age)}{where}"


def _name(process: int, entry: heartbeats.Entry) -> str:
    if entry.worker is None or entry.worker == process:
        return f"worker {process}"
    return f"worker {entry.worker} (process {process})"


def _secs(secs: float) -> str:
    return f"{secs:.1f} s" if secs < 10 else f"{math.floor(secs)} s"
