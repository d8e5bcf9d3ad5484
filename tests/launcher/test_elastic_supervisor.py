"""Workers that come and go one by one: what the launcher says, starts and tells the referee."""

import os
import pathlib
import re
import signal
import socket
import sys
import time

import pytest

from hetjax import launch as launcher
from hetjax.comm import local_carrier
from hetjax.launcher import elastic, seats
from tests.launcher import launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
SAYS = """
start, directory = int(os.environ["HETJAX_START"]), pathlib.Path(os.environ["HETJAX_RUN"])
print("start", start, "of", directory)
from hetjax.comm import local_carrier, membership, referee
own = referee.Member(worker, start)
carrier = local_carrier.LocalCarrier(directory, start)
founders, _ = carrier.call("enter", own)
def order(number, *event):
    event = (event[0], own, *event[1:]) if event else None
    return carrier.call("call", own, number, event, None, False).order
def go_on():
    ends, number, event = told(f"ends-{start}"), None, ("joins",)
    if own in founders:
        wait_for(lambda: ends.exists() or told("begins").exists())
        number, event = -1, ("begins", -1)
    is_ready = False
    while is_ready or not ends.exists():
        kind, what = order(number, *event)
        event = ()
        if kind == "leave":
            sys.exit(membership.REMOVED if what == "left" else membership.LEFT_OUT)
        elif kind == "add":
            changes = [f"{member.rank} {how}" for member, how in what[0].changes]
            number, is_ready = number + 1, False
            if changes or not number:
                print("changes", *changes)
        elif kind == "compute":
            event, is_ready = ("ready", number, "", ()), True
        elif kind == "over":
            is_ready = False
        elif kind == "donate":
            event = ("donated", number, "state")
        elif kind == "receive":
            number = what[0]
            event = ("holds", number)
        time.sleep(0.02)
    ends = ends.read_text()
    if ends == "over":
        order(number, "finished")
    sys.exit(int(ends) if ends.isdigit() else 0)
"""
GOES_ON = SAYS + "go_on()\n"


class Apart:
    """A launcher with `--runtime=apart`, and its run directory. Its workers take part in rounds,
    which have neither sums nor states."""

    def __init__(self, launch, *flags, program=GOES_ON, **options):
        self.launch = launch(program, "--runtime=apart", *flags, **options)
        (found,), _ = self.launch.wait_for(r"workers come and go by .*--add=(\S+) ")
        self.run = pathlib.Path(found[1])

    def seats(self, count):
        """The seats of the first starts, in the order in which they were said."""
        matches, _ = self.launch.wait_for(r"\[(\d+)\] start (\d+) of", count)
        return {int(match[2]): int(match[1]) for match in matches[:count]}

    def begins(self, workers):
        """Has the founders begin the run, and waits until each is a member."""
        self.seats(workers)
        (self.launch.heartbeats / "begins").touch()
        self.launch.wait_for(r"\] changes", workers)

    def finish(self, start, how="over"):
        """Ends a start: all is written, if it leads ("over"); without that ("early"); or by an exit
        code."""
        new = self.launch.heartbeats / "new"
        new.write_text(str(how))
        new.rename(self.launch.heartbeats / f"ends-{start}")

    def end(self, *starts):
        """Lets the starts finish; the launcher's exit code. Checks that nothing is left."""
        for start in starts:
            self.finish(start)
        code = self.launch.end()
        launches.is_gone(self.run.exists)
        return code

    def kill(self, index, count, number=signal.SIGKILL):
        """Of the first so many that printed their number, one."""
        self.seats(count)
        os.kill(self.launch.pids(count)[index], number)

    def says(self, words):
        self.launch.wait_for(re.escape(words))


@pytest.fixture
def apart(launch):
    return lambda *flags, **options: Apart(launch, *flags, **options)


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        launcher.main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_a_killed_worker_is_started_anew_in_its_seat(apart):
    run = apart("--workers=2", "--max_workers=3")
    assert run.seats(2) == {0: 0, 1: 1}
    for path in (run.run, run.run / "0"):
        assert path.stat().st_mode & 0o777 == 0o700
    run.begins(2)
    run.kill(1, 2)
    run.says("worker 1 ended by SIGKILL; the others go on; restart 1 of 3")
    assert run.seats(3)[2] == 1
    run.says("[0] changes 1 was killed")
    run.says("[1] changes 1 joined")
    assert f"[1] start 2 of {run.run}/0" in run.launch.out()
    assert run.end(0, 2) == 0
    assert run.launch.text().count("restart") == 1


def test_who_was_late_is_started_anew_and_not_counted(apart):
    run = apart("--workers=2", "--max_restarts=0")
    run.seats(2)
    for start in (1, 2):
        run.finish(start, elastic.LEFT_OUT)
        assert run.seats(start + 2)[start + 1] == 1
    assert run.end(0, 3) == 0
    assert run.launch.text().count("worker 1 was late and left out; it is started anew") == 2
    assert "restart" not in run.launch.text()


def test_workers_leave_and_are_added_when_asked(apart, capsys):
    program = SAYS + "wait_for(told('go').exists)\ngo_on()\n"
    run = apart("--workers=2", "--cpus=0.5,0.5", program=program)
    run.seats(2)
    (run.launch.heartbeats / "begins").touch()
    assert "all 2 seats are taken" in refused([f"--add={run.run}"], capsys)
    assert "worker 2 does not run" in refused([f"--remove={run.run}:2"], capsys)
    assert launcher.main([f"--remove={run.run}:1"]) == 0
    assert capsys.readouterr().out == "worker 1 is to leave after its round\n"
    last = refused([f"--remove={run.run}:0"], capsys)
    assert "worker 0 is the last; end the run by Ctrl-C" in last
    (run.launch.heartbeats / "go").touch()
    run.says("worker 1 has left; its seat is empty")
    run.says("[0] changes 1 left")
    assert "99" in refused([f"--add={run.run}", "--cpus=99"], capsys)
    assert launcher.main([f"--add={run.run}", "--cpus=0.25"]) == 0
    assert capsys.readouterr().out == "worker 1 is started\n"
    assert run.seats(3)[2] == 1
    assert len(os.sched_getaffinity(run.launch.pids(3)[1])) == 1
    run.says("[1] changes 1 joined")
    run.finish(0)
    launches.eventually(lambda: "the run is at its end" in refused([f"--add={run.run}"], capsys))
    assert run.end(2) == 0
    assert "there is no such run, or it has ended" in refused([f"--add={run.run}"], capsys)


def test_seats_stay_empty_when_the_restarts_are_spent(apart):
    run = apart("--workers=2", "--max_restarts=1")
    run.kill(1, 2)
    run.seats(3)
    run.kill(1, 3)
    run.says("worker 1 ended by SIGKILL; the others go on; its seat stays empty")
    assert run.end(0) == 0


def test_who_ends_early_or_aborts_is_not_the_end_of_all(apart):
    run = apart("--workers=3")
    run.begins(3)
    run.finish(0, "early")
    run.says("worker 0 ended before the run, without a fault; its seat is empty")
    run.kill(1, 3, signal.SIGABRT)
    run.says("worker 1 ended by SIGABRT; the others go on; restart 1 of 3")
    run.seats(4)
    for change in ("0 ended", "1 was killed", "1 joined"):
        run.says(f"[2] changes {change}")
    assert run.end(2, 3) == 0


def test_who_is_killed_when_it_is_to_leave_does_not_come_back(apart):
    program = SAYS + "wait_for(told('no').exists)\n"
    run = apart("--workers=2", program=program)
    run.seats(2)
    assert launcher.main([f"--remove={run.run}:1"]) == 0
    run.kill(1, 2)
    run.says("worker 1 has left; its seat is empty")
    run.kill(0, 2, signal.SIGTERM)
    run.says("worker 0 ended by SIGTERM; the others go on; restart 1 of 3")
    run.launch.send(signal.SIGTERM)
    assert run.launch.end() == 143


def test_where_nobody_has_the_state_all_begin_again(apart):
    program = f"{SAYS}if start > 1:\n    wait_for(told('ends-1').exists)\ngo_on()\n"
    run = apart("--workers=2", "--max_restarts=3", program=program)
    run.begins(2)
    run.kill(1, 2)
    run.says("worker 1 ended by SIGKILL; the others go on; restart 1 of 3")
    run.seats(3)
    run.kill(0, 2)
    run.says("worker 0 ended by SIGKILL; restart 2 of 3 from the last checkpoint")
    run.launch.wait_for(rf"start \d of {run.run}/1", 2)
    assert run.end(0, 1) == 0


def test_who_is_stopped_for_long_is_killed(apart):
    run = apart("--workers=2", f"--heartbeat_secs={launches.HEARTBEAT_SECS}", "--start_secs=inf")
    run.kill(1, 2, signal.SIGSTOP)
    run.says("hung: worker 1: stopped (SIGSTOP), no sign of life for")
    run.says("worker 1 ended by SIGKILL; the others go on; restart 1 of 3")
    run.seats(3)
    assert run.end(0, 2) == 0


BEGUN = "beacon = heartbeats.start()\nbeacon.at('waiting', {})\nbeacon.close()\n"
RAISES = "exit_reports.write(told('.'), 1, exit_reports.of_error(1, {}('x')))\nsys.exit(1)\n"
AGAIN, VALUE_ERROR = "; restart 1 of 3 from the last checkpoint", RAISES.format("ValueError")


@pytest.mark.parametrize(
    ("own", "said", "code"),
    [
        (RAISES.format("KeyError"), "raised KeyError.*" + AGAIN, 0),
        ("", "ended with exit code 5.*" + AGAIN, 0),
        (BEGUN.format(3) + VALUE_ERROR, "raised ValueError: x" + AGAIN, 0),
        # Before the first round it is not tried again.
        (BEGUN.format(None) + VALUE_ERROR, "raised ValueError: x.*", 2),
    ],
)
def test_an_end_that_is_told_or_no_signal_is_that_of_all(own, said, code, apart):
    own = f"from hetjax.liveness import exit_reports, heartbeats\n{own}sys.exit(5)"
    program = SAYS + f"if (worker, attempt) == (1, 0):\n    exec({own!r})\ngo_on()\n"
    run = apart("--workers=2", "--grace_secs=0.2", program=program)
    run.launch.wait_for(f"worker 1 {said}")
    if not code:
        run.launch.wait_for(rf"start \d of {run.run}/1", 2)
    assert (run.launch.end() if code else run.end(0, 1)) == code
    assert ("nothing is restarted" in run.launch.text()) == (code == 2)


def test_work_of_its_own_is_no_hang(apart):
    own = "from hetjax.liveness import heartbeats\nbeacon = heartbeats.start()\n"
    program = SAYS + own + "beacon.at('reporting', 1)\nprint('busy')\ngo_on()\n"
    run = apart("--workers=1", f"--heartbeat_secs={launches.HEARTBEAT_SECS}", program=program)
    run.says("busy")
    time.sleep(2.5 * launches.HEARTBEAT_SECS)
    assert run.end(0) == 0
    assert "hung" not in run.launch.text()


@pytest.mark.parametrize(
    ("name", "words"),
    [("x" * 66, "70 bytes at most"), ("none", "no directory in which this user can write")],
)
def test_a_directory_in_which_no_socket_can_be_is_refused(name, words, capsys, monkeypatch):
    """Sockets have longer names yet."""
    monkeypatch.setenv(local_carrier.SHARED, f"/dev/{name}")
    said = refused(["--workers=1", "--runtime=apart", "--", sys.executable], capsys)
    assert f"{local_carrier.SHARED}=/dev/{name}: {words}" in said


def test_a_launcher_that_does_not_answer_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(seats, "_PATIENCE_SECS", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / local_carrier.SOCKET))
        silent.listen()
        assert "the launcher does not answer" in refused([f"--add={tmp_path}"], capsys)
