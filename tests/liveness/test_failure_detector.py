"""What a process hears of the others, and says while it waits for them; real ones in the drill."""

import pytest

from hetjax import process_info
from hetjax.comm import join, key_value_store
from hetjax.liveness import (
    blocking_waits,
    exit_reports,
    failure_detector,
    heartbeats,
    stall_reporter,
)
from tests.launcher import launches


class Board:
    """As `key_value_store.KeyValueStore`, of all processes in one."""

    values: dict

    def __init__(self):
        self.values = {}

    def post(self, key, value):
        self.values[key] = list(value) if isinstance(value, tuple) else value

    def read_all(self):
        return dict(self.values)

    def remove(self, key):
        self.values.pop(key, None)


def later(monkeypatch, after):
    detector = failure_detector.FailureDetector
    monkeypatch.setattr(detector, "_after", lambda self, *given: after(*given))


@pytest.fixture
def shared(monkeypatch):
    """A board; nobody ends this process, and waits of other tests are over."""
    later(monkeypatch, lambda secs, action: None)
    monkeypatch.setattr(blocking_waits.of_process(), "lost", [])
    return Board()


def test_a_raise_is_heard_by_all_and_ends_their_waits(shared, capsys, tmp_path):
    one, other = (
        failure_detector.FailureDetector(1, 2, shared, tmp_path),
        failure_detector.FailureDetector(0, 2, shared),
    )
    one._fail(ValueError("no such file"))
    assert exit_reports.read(tmp_path).words == "raised ValueError: no such file"
    with blocking_waits.Wait("end the round") as wait:
        wait.check()
        other._look()
        with pytest.raises(
            blocking_waits.LostProcessError, match="process 1 raised ValueError: no such"
        ):
            wait.check()
    said = capsys.readouterr().err
    assert "hetjax: process 1 raised ValueError: no such file; so process 0 of 2 ends, too" in said
    assert "the traceback of process 1:\nValueError: no such file" in said
    other._look()
    other._fail(blocking_waits.LostProcessError("process 1 has ended"))
    assert [key for key in shared.values if key.startswith("told/")] == ["told/1"]


def test_who_waits_for_one_that_has_left_ends_with_it(shared, capsys, monkeypatch):
    one, other = (
        failure_detector.FailureDetector(1, 3, shared),
        failure_detector.FailureDetector(2, 3, shared),
    )
    one.left(SystemExit(3))
    other._look()  # it computes, and waits for nobody
    with blocking_waits.Wait("end the round"):
        other._look()
    with blocking_waits.Wait("add up the sums"):  # another wait: the first is over
        other._look()
        assert not capsys.readouterr().err
        monkeypatch.setattr(failure_detector, "_LAST_MESSAGE_SECS", 0.0)
        other._look()
    words = "process 1 left by SystemExit(3), and process 2 waits for it to add up the sums"
    assert words in capsys.readouterr().err
    one._look()
    assert f"this {words.replace('process 1 ', 'process ')}" in capsys.readouterr().err


@pytest.mark.parametrize(("phase", "is_ended"), [("starting", True), ("evaluating", False)])
def test_one_that_hears_of_a_raise_is_ended_where_it_is_stuck(phase, is_ended, shared, monkeypatch):
    ended = []
    monkeypatch.setattr(
        failure_detector.FailureDetector, "_end_now", lambda self: ended.append(self)
    )
    later(monkeypatch, lambda secs, action: secs < 2 and action())
    zero, one = (
        failure_detector.FailureDetector(0, 2, shared),
        failure_detector.FailureDetector(1, 2, shared),
    )
    does = heartbeats.Heartbeats()
    does.at(phase)
    zero.follow(does)
    one.tell("refused its input", code=2)
    zero._look()
    assert ended == ([zero] if is_ended else [])


def test_what_it_has_printed_is_written_before_it_is_ended():
    program = """
import sys
from hetjax.liveness import failure_detector
one = failure_detector.FailureDetector(1, 2, store=None)  # process 0, which holds it, is gone
print("the last line of a log", end="")
one.tell("refused its input", code=7)
one._end_now()
"""
    done = launches.python(program, PYTHONUNBUFFERED="")  # else there is nothing left to write
    assert (done.stdout, done.returncode) == ("the last line of a log", 7)


def test_a_process_ends_as_it_is_to_where_its_exit_can_start_no_thread():
    program = """
import atexit, threading
from hetjax.liveness import failure_detector

def start(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12's words

one = failure_detector.FailureDetector(0, 1, store=None)
one.begin()
atexit.register(setattr, threading.Thread, "start", start)  # called before the watch's own
one._hear(failure_detector.exit_reports.ExitReport(1, "was interrupted", "", 130))
one._has_lost = True
"""
    done = launches.python(program)
    assert done.returncode == 130, done.stderr
    assert "Exception ignored" not in done.stderr


def test_who_goes_on_has_not_left(shared):
    one = failure_detector.FailureDetector(1, 2, shared)
    one.left(error := ValueError("caught in all processes alike"))
    assert shared.values.pop("left/1")[1] == "raised ValueError: caught in all processes alike"
    one.left(error)  # on its way through another function
    assert not shared.values
    one.left(ValueError("another"))
    assert "left/1" in shared.values
    one.follow(heartbeats.Heartbeats())  # a new run
    assert "left/1" not in shared.values


def test_the_loss_of_another_is_no_end_of_its_own(shared):
    one = failure_detector.FailureDetector(0, 2, shared)
    error = RuntimeError("of the callback")
    error.__cause__ = blocking_waits.LostProcessError("process 1 has ended")
    one.left(error)
    one._fail(error)
    assert not shared.values


def test_who_waits_to_join_says_so(capsys, monkeypatch):
    monkeypatch.setattr(stall_reporter, "PERIOD_SECS", 0.02)
    for own, who in (
        (0, "for the other 2 processes to join"),
        (2, "for process 0 at host:7000, or the other 2 processes to join"),
    ):
        said = ""
        with join._patience(process_info.ProcessInfo(own, 3, "host:7000"), 100):
            while said.count("\n") < 2:
                said += capsys.readouterr().err
        first = said.splitlines()[0]
        assert first.startswith(f"hetjax: process {own} of 3 has waited ")
        assert first.endswith(who)


def test_a_wait_at_the_board_can_be_ended(shared, monkeypatch):
    class Client:
        def blocking_key_value_get(self, key, milliseconds):
            blocking_waits.end_all("process 1 raised ValueError: no such file")
            raise RuntimeError("DEADLINE_EXCEEDED: of this slice")

    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", Client())
    with pytest.raises(blocking_waits.LostProcessError, match="no such file"):
        key_value_store.KeyValueStore("a test").wait("key", 600.0)
    blocking_waits.of_process().lost.clear()
    monkeypatch.setattr(blocking_waits, "end_all", lambda reason: None)
    with pytest.raises(TimeoutError, match=r"no process posted 'key' within 0\.1 s"):
        key_value_store.KeyValueStore("a test").wait("key", 0.1)
