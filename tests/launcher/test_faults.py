"""Who is at fault, as a function of what was said."""

import pytest

from hetjax.launcher import faults
from hetjax.liveness import heartbeats

Entry, Snapshot = heartbeats.Entry, heartbeats.Snapshot
NOW = 1000.0


def said(*entries, silent=0.0, closed=False):
    """A snapshot with entries (phase, seconds ago, round, worker)."""
    entries = tuple(Entry(phase, NOW - ago, *more) for phase, ago, *more in entries)
    return Snapshot(7, NOW - silent, entries, closed)


def find(snapshots, *, launched_ago=200.0, **more):
    if not isinstance(snapshots, dict):
        snapshots = dict(enumerate(snapshots))
    limits = {"heartbeat_secs": 30.0, "start_secs": 300.0, **more}
    launched = dict.fromkeys(snapshots, NOW - launched_ago)
    fault = faults.find_fault(snapshots, now=NOW, launched=launched, **limits)
    return None if fault is None else (fault.process, fault.reason)


WAITS = said(("waiting", 50, 17, 0))


@pytest.mark.parametrize(
    ("snapshots", "process", "reason"),
    [
        # An entry that is too old.
        ([WAITS, said(("computing", 46, 17, 1))], 1, "worker 1: computing for 46 s in round 17"),
        # The oldest of several, over all processes and workers.
        ([WAITS, said(("waiting", 60, 5), ("computing", 47, 5, 2), ("loading", 48, 5, 3))], 1,
         "worker 3 (process 1)'s data: loading for 48 s in round 5"),
        # Of several that say nothing, who has been silent longest, whatever its place.
        ([said(("computing", 60, 5, 0), silent=60), said(("computing", 90, 5, 1), silent=50)], 0,
         "worker 0: frozen, no sign of life for 60 s"),
        # Starting has a limit of its own, and begins with the launch.
        ([WAITS, said(("starting", 301))], 1,
         "worker 1: starting for 301 s, where --start_secs=300 are allowed"),
        # Silence comes before whatever was said.
        ([said(("computing", 90, 5, 0)), said(("waiting", 60, 5, 1), silent=46)], 1,
         "worker 1: frozen, no sign of life for 46 s"),
        # All wait.
        ([said(("waiting", 61, 5, 0)), said(("waiting", 70, 5, 1))], None,
         "all workers wait for each other for 61 s in round 5"),
        ([said(("waiting", 61, 6, 0)), said(("waiting", 70, 5, 1)), said(("done", 80))], 1,
         "worker 1: waiting in round 5, others in round 6; all workers wait for each other for 61"),
    ],
)  # fmt: skip
def test_who_is_at_fault(snapshots, process, reason):
    found = find(snapshots)
    assert found is not None
    assert found[0] == process
    assert found[1].startswith(reason)


@pytest.mark.parametrize(
    "snapshots",
    [
        [said(("computing", 44, 17, 0)), WAITS],
        [said(("computing", 1, 17, 0)), said(("waiting", 5000, 17, 1))],  # waiting is no fault
        [said(("waiting", 59, 5, 0)), said(("waiting", 5000, 5, 1))],
        [said(("waiting", 61, 5, 0), ("computing", 3, 5, 1))],
        [said(("starting", 299)), WAITS],
        [said(("starting", 299), silent=290), WAITS],  # compiling may hold the interpreter
        [said(("computing", 60, 5, 0), silent=30), WAITS],  # starved: what it does is not known
        [None, None],
        [said(), WAITS],  # alive, and has said nothing yet
        [said(("done", 200)), said(silent=200, closed=True)],
        [said(silent=200, closed=True), said(("computing", 10, 5, 1))],  # the others go on
    ],
)
def test_who_is_not_at_fault(snapshots):
    assert find(snapshots) is None


def test_a_process_that_never_spoke_is_starting_since_its_launch():
    assert find({3: None, 4: WAITS}, launched_ago=299) is None
    process, reason = find({3: None, 4: WAITS}, launched_ago=301)
    assert process == 3
    assert reason.startswith("worker 3: starting for 301 s")
    assert reason.endswith("a program without heartbeats needs --start_secs=inf")


@pytest.mark.parametrize(
    "snapshot", [said(("waiting", 60, 5, 0), silent=46), said(silent=46, closed=True), None]
)
def test_a_stopped_process_is_named_in_every_phase(snapshot):
    process, reason = find([WAITS, snapshot, said(("computing", 99, 5, 2))], stopped={1})
    assert process == 1
    assert reason.startswith("worker 1: stopped (SIGSTOP), no sign of life for ")


def test_where_others_wait_for_it_work_of_its_own_has_a_longer_limit():
    evaluates = [said(("evaluating", 99, 5)), WAITS]
    assert find(evaluates, busy_secs=100.0) is None
    assert find(evaluates, busy_secs=98.0) == (0, "worker 0: evaluating for 99 s in round 5")
    assert find([said(("evaluating", 44, 5)), WAITS], busy_secs=1.0) is None


def test_who_was_started_later_has_its_time():
    limits = {"now": NOW, "heartbeat_secs": 30.0, "start_secs": 300.0}
    launched = {0: NOW - 900.0, 1: NOW - 299.0}
    assert faults.find_fault({0: WAITS, 1: None}, launched=launched, **limits) is None
    assert faults.find_fault({0: WAITS, 1: said()}, launched=launched, **limits) is None
    assert faults.find_fault({0: None, 1: None}, launched=launched, **limits).process == 0


def test_a_short_stop_is_no_fault():
    assert find([WAITS, said(("computing", 3, 5, 1), silent=44)], stopped={1}) is None
    saves = said(("checkpointing", 46, 5, None), silent=44)
    assert find([WAITS, saves], stopped={1})[1].startswith("worker 1: stopped (SIGSTOP)")


@pytest.mark.parametrize("heartbeat_secs", [0.5, 1.0, 30.0])
def test_a_fault_is_noticed_within_two_heartbeats_at_the_worst(heartbeat_secs):
    """With the file written last just before the stop, and read last just before the limit."""
    period = heartbeat_secs / heartbeats.WRITES_PER_HEARTBEAT
    snapshot = Snapshot(7, 0.0, (Entry("computing", 0.0, 5, 0),))
    look = period / 3
    limits = {"launched": {0: 0.0}, "heartbeat_secs": heartbeat_secs, "start_secs": 99}
    while not faults.find_fault({0: snapshot}, now=look, **limits):
        look += period
    assert look + period <= 2 * heartbeat_secs
