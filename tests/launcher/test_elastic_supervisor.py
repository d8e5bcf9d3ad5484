"""Workers that come and go one by one: what the launcher says, starts and writes into the roll."""

import json
import os
import pathlib
import re
import signal
import sys
import time

import pytest

from hetjax import launch as launcher
from hetjax.comm import file_store
from hetjax.launcher import elastic, seats
from tests.launcher import launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
SAYS = """
start, own = int(os.environ["HETJAX_START"]), pathlib.Path(os.environ["HETJAX_RUN"])
beat = lambda: None
def go_on():
    code = told(f"code-{start}")
    wait_for(lambda: beat() or code.exists() or (own / "roll").read_bytes()[start] == 3)
    sys.exit(int(code.read_text()) if code.exists() else 76)
print("start", start, "of", own, "founders", os.environ["HETJAX_FOUNDERS"])
"""
GOES_ON = SAYS + "go_on()\n"


class Apart:
    """A launcher with `--runtime=apart`, and its run directory."""

    def __init__(self, launch, *flags, program=GOES_ON, **options):
        self.launch = launch(program, "--runtime=apart", *flags, **options)
        (found,), _ = self.launch.wait_for(r"workers come and go by .*--add=(\S+) ")
        self.run = pathlib.Path(found[1])

    def seats(self, count):
        """The seats of the first starts, in the order in which they were said."""
        matches, _ = self.launch.wait_for(r"\[(\d+)\] start (\d+) of", count)
        return {int(match[2]): int(match[1]) for match in matches[:count]}

    def roll(self, attempt=0):
        return (self.run / str(attempt) / "roll").read_bytes().rstrip(b"\0")

    def decides(self, *starts):
        """Writes that these, each in the seat of its number, begin the run."""
        self.seats(len(starts))
        members = [(start, start) for start in starts]
        board = file_store.FileStore(self.run / "0" / "board")
        board.key_value_set("decision/-1", json.dumps([-1, [], members, -1, 0, []]))

    def finish(self, start, code=0, *, over=True):
        if code == 0 and over:
            for board in self.run.glob("*/board"):
                (board / "over").touch()
        new = self.launch.heartbeats / "new"
        new.write_text(str(code))
        new.rename(self.launch.heartbeats / f"code-{start}")

    def end(self, *starts):
        """Lets the starts finish; the launcher's exit code. Checks that nothing is left."""
        for start in starts:
            self.finish(start)
        code = self.launch.end()
        launches.is_gone(self.run.exists)
        return code

    def kill(self, index, count, number=signal.SIGKILL):
        """Of the first so many that printed their number, one."""
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
    assert run.roll() == bytes([1, 1])
    for path in (run.run, run.run / "0", run.run / "0" / "board"):
        assert path.stat().st_mode & 0o777 == 0o700
    run.kill(1, 2)
    run.says("worker 1 ended by SIGKILL; the others go on; restart 1 of 3")
    assert run.seats(3)[2] == 1
    assert run.roll() == bytes([1, 4, 1])
    assert f"[1] start 2 of {run.run}/0 founders 2" in run.launch.out()
    assert run.end(0, 2) == 0
    assert run.launch.text().count("restart") == 1


def test_who_was_late_is_started_anew_and_not_counted(apart):
    run = apart("--workers=2", "--max_restarts=0")
    run.seats(2)
    for start in (1, 2):
        run.finish(start, elastic.LEFT_OUT)
        assert run.seats(start + 2)[start + 1] == 1
    assert run.roll() == bytes([1, 2, 2, 1])
    assert run.end(0, 3) == 0
    assert run.launch.text().count("worker 1 was late and left out; it is started anew") == 2
    assert "restart" not in run.launch.text()


def test_workers_leave_and_are_added_when_asked(apart, capsys):
    program = SAYS + "wait_for(told('go').exists)\ngo_on()\n"
    run = apart("--workers=2", "--cpus=0.5,0.5", program=program)
    run.seats(2)
    assert "all 2 seats are taken" in refused([f"--add={run.run}"], capsys)
    assert "worker 2 does not run" in refused([f"--remove={run.run}:2"], capsys)
    assert launcher.main([f"--remove={run.run}:1"]) == 0
    assert capsys.readouterr().out == "worker 1 is to leave after its round\n"
    assert run.roll() == bytes([1, 3])
    last = refused([f"--remove={run.run}:0"], capsys)
    assert "worker 0 is the last; end the run by Ctrl-C" in last
    (run.launch.heartbeats / "go").touch()
    run.says("worker 1 has left; its seat is empty")
    assert run.roll() == bytes([1, 2])
    assert "99" in refused([f"--add={run.run}", "--cpus=99"], capsys)
    assert launcher.main([f"--add={run.run}", "--cpus=0.25"]) == 0
    assert capsys.readouterr().out == "worker 1 is started\n"
    assert run.seats(3)[2] == 1
    assert len(os.sched_getaffinity(run.launch.pids(3)[1])) == 1
    run.finish(0)
    launches.eventually(lambda: run.roll() == bytes([2, 2, 1]))
    launches.eventually(lambda: "the run is at its end" in refused([f"--add={run.run}"], capsys))
    assert run.end(2) == 0
    assert "there is no such run, or it has ended" in refused([f"--add={run.run}"], capsys)


def test_seats_stay_empty_when_the_restarts_are_spent(apart):
    run = apart("--workers=2", "--max_restarts=1")
    run.kill(1, 2)
    run.seats(3)
    run.kill(1, 3)
    run.says("worker 1 ended by SIGKILL; the others go on; its seat stays empty")
    assert run.roll() == bytes([1, 4, 4])
    assert run.end(0) == 0


def test_who_ends_early_or_aborts_is_not_the_end_of_all(apart):
    run = apart("--workers=3")
    run.decides(0, 1, 2)
    run.finish(0, over=False)
    run.says("worker 0 ended before the run, without a fault; its seat is empty")
    run.kill(1, 3, signal.SIGABRT)
    run.says("worker 1 ended by SIGABRT; the others go on; restart 1 of 3")
    run.seats(4)
    assert run.roll() == bytes([2, 4, 1, 1])
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
    run = apart("--workers=2", "--max_restarts=3")
    run.decides(0, 1)
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
    run.says("hung: worker 1: stopped (SIGSTOP) for")
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


def test_a_request_that_nobody_answers_is_taken_back(tmp_path, capsys, monkeypatch):
    (tmp_path / seats.ASKS).mkdir()
    monkeypatch.setattr(seats, "_PATIENCE_MILLISECS", 50)
    assert "the launcher does not answer" in refused([f"--add={tmp_path}"], capsys)
    assert not list((tmp_path / seats.ASKS).iterdir())
