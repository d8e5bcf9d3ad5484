"""For whom a process says that it waits; real ones in the drill."""

import re
import types

import pytest

from hetjax.liveness import blocking_waits, heartbeats, stall_reporter
from tests.liveness import test_failure_detector


class Clock:
    """In place of `time`, for all processes of a test."""

    now = 1000.0

    def monotonic(self):
        return self.now


class Process:
    """What one process tells, hears and says, without threads."""

    def __init__(self, index, num_processes, board):
        self.notices = stall_reporter.StallReporter(index, num_processes, board)
        self.heartbeats, self.wait, self.board = heartbeats.Heartbeats(), None, board

    def look(self):
        self.notices.asks()
        self.notices.tell(self.heartbeats)
        self.notices.hears(self.board.read_all())


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (stall_reporter, blocking_waits, heartbeats):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def gang(clock, monkeypatch):
    """Three processes, and `passes(secs, *who)`: who looks and speaks in each second of them."""
    board = test_failure_detector.Board()
    gang = [Process(index, 3, board) for index in range(3)]

    def passes(secs, *who):
        for _ in range(secs):
            clock.now += 1.0
            for index in who:
                monkeypatch.setattr(blocking_waits, "longest", lambda index=index: gang[index].wait)
                gang[index].look()
                gang[index].notices.speak()

    def waiting(what, processes=None):
        wait = blocking_waits.Wait(what, processes)
        wait.since = clock.now
        return wait

    return types.SimpleNamespace(gang=gang, passes=passes, waiting=waiting)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_wait_is_said_every_ten_seconds_and_for_whom(gang, capsys):
    zero, one, _ = gang.gang
    zero.heartbeats.at("evaluating", 3)
    one.wait = gang.waiting("find the checkpoint to go on from", lambda: [0])
    gang.passes(23, 0, 1, 2)
    ten, twenty = lines(capsys)
    start = "hetjax: process 1 has waited {} s for process 0 (pid "
    assert ten.startswith(start.format(10))
    assert twenty.startswith(start.format(20))
    assert ten.endswith(": evaluating in round 3 for 10 s) to find the checkpoint to go on from")


def test_in_a_collective_who_does_not_wait_is_named_by_each_of_the_others(gang, capsys):
    zero, one, two = gang.gang
    zero.wait, two.wait = gang.waiting("end the round"), gang.waiting("end the round")
    one.heartbeats.at("reporting", 7)
    gang.passes(12, 0, 1, 2)
    said = lines(capsys)
    wanted = [f"hetjax: process {index} has waited 10 s for process 1" for index in (0, 2)]
    assert [line.partition(" (pid ")[0] for line in said] == wanted
    words = re.compile(r"in a callback in round 7 for \d+ s\) to end the round$")
    assert all(words.search(line) for line in said)


def test_one_that_is_silent_is_named_though_nobody_waits(gang, capsys):
    gang.gang[2].heartbeats.at("computing", 4)
    gang.passes(3, 0, 1, 2)
    gang.passes(8, 0, 1)
    assert lines(capsys) == []
    gang.passes(13, 0, 1)
    said = lines(capsys)
    wanted = [f"hetjax: process {index} hears nothing of process 2" for index in (0, 0, 1, 1)]
    assert sorted(line.partition(" (pid ")[0] for line in said) == wanted
    assert said[0].endswith("no sign of life for 10 s, last seen computing in round 4)")


def test_where_the_board_does_not_answer_process_0_is_silent(gang, clock, monkeypatch, capsys):
    _, one, _ = gang.gang
    gang.passes(5, 0, 1, 2)
    one.wait = gang.waiting("end the round")
    monkeypatch.setattr(blocking_waits, "longest", lambda: one.wait)
    one.notices.asks()
    for _ in range(12):  # process 2 may wait, too, or not: nobody hears of it
        clock.now += 1.0
        one.notices.speak()
    (said,) = lines(capsys)
    assert said.startswith("hetjax: process 1 has waited 10 s for process 0 (pid ")
    assert ": no sign of life for " in said
    one.look()  # the board answers: what others could not tell meanwhile is no silence of theirs
    assert one.notices._silence(2) == 0.0


def test_one_that_was_stopped_itself_blames_nobody(gang, clock, capsys):
    one = gang.gang[1]
    gang.passes(3, 0, 1, 2)
    one.notices.asks()
    clock.now += 60.0
    one.notices.speak()
    assert lines(capsys) == []
