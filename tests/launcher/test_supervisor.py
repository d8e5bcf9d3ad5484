"""Gangs of real processes that die, hang and are told to end; none of them needs JAX."""

import os
import pathlib
import re
import signal
import sys

import pytest

from hetjax.launcher import faults, gang
from tests.launcher import launches

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
PATIENT = [f"--heartbeat_secs={launches.HEARTBEAT_SECS}"]


def check_noticed(began, noticed, age_secs):
    """Named after 1.5 heartbeats, and within two; the third is the machine's, which may be busy."""
    heartbeat = launches.HEARTBEAT_SECS
    assert faults.FAULT_HEARTBEATS * heartbeat <= age_secs < 3 * heartbeat
    assert noticed - began < 3 * heartbeat


TOLD = """
from hetjax.liveness import exit_reports
def tell(error):
    exit_reports.write(told("."), worker, exit_reports.of_error(worker, error))
"""
GONE = f"""{TOLD}
if worker == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
tell(RuntimeError("worker 0 is gone"))
sys.exit(1)
"""
INTERRUPTED = f"""{TOLD}
if worker == 1:
    tell(KeyboardInterrupt())
    time.sleep(600)
wait_for(told("process-1.ending").exists)
sys.exit(1)
"""
KILL = """
if (worker, attempt) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if attempt else 600)
"""
SEGV, KILLED = "worker 0 ended by SIGSEGV; ", "worker 0 ended by SIGKILL; no restart is left"
SILENT = "--heartbeat_secs=0.4 --start_secs=0.6 --max_restarts=0"


@pytest.mark.parametrize(
    ("program", "flags", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "--max_restarts=2", 1,
         [f"{SEGV}restart 1 of 2", f"{SEGV}restart 2 of 2", f"{SEGV}no restart is left of --m"]),
        (KILL, "--workers=3", 0, ["launch: worker 1 ended by SIGKILL; restart 1 of 3 from the l"]),
        # The killed one is the cause of what others raise later.
        (GONE, "--workers=2 --max_restarts=0", 1, [KILLED]),
        # One that never speaks.
        ("time.sleep(600)", SILENT, 1, ["--start_secs=0.6 are allowed; a program without hear"]),
        # Codes and ends that no restart mends.
        (INTERRUPTED, "--workers=2 --grace_secs=0.2", 130, ["worker 1 was interrupted"]),
        ("sys.exit(2) if worker else time.sleep(600)", "--workers=2 --grace_secs=0.2", 2,
         ["worker 1 refused its input"]),
        ("time.sleep(0.3 * worker); sys.exit(130)", "--workers=2 --grace_secs=30", 130, []),
        ("sys.exit(143) if worker else time.sleep(600)", "--workers=2 --grace_secs=0.2", 1,
         ["worker 0 did not end within 0.6"]),
    ],
)  # fmt: skip
def test_a_gang_ends_by_its_code_and_says_why(launch, program, flags, code, words):
    run = launch(program, "--workers=1", *flags.split())
    assert run.end() == code
    for each in words:
        assert each in run.text()
    restarts = sum("; restart" in each for each in words)
    assert run.text().count("; restart") == restarts
    assert run.text().count("[0] pid ") <= 1 + restarts


@LINUX
def test_the_cause_is_the_killed_one_and_not_who_noticed_first(launch):
    program = """
told(str(worker)).write_text(str(os.getpid()))
wait_for(lambda: all(told(name).exists() and told(name).read_text() for name in "012"))
if worker == 0:
    sys.exit("the connection is lost")
wait_for(lambda: not pathlib.Path("/proc", told("0").read_text()).exists())
os.kill(os.getpid(), signal.SIGKILL if worker == 1 else signal.SIGABRT)
"""
    run = launch(program, "--workers=3", "--max_restarts=0", settle_secs=launches.PATIENCE_SECS)
    assert run.end() == 1
    assert "worker 1 ended by SIGKILL; no restart is left" in run.text()
    assert "[0] the connection is lost" in run.err()


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", subprocess.Popen(["sleep", "600"]).pid)
print("ready")
time.sleep(600)
"""


def test_who_ignores_sigterm_is_killed_with_what_it_started(launch):
    run = launch(STUBBORN, "--workers=2", "--max_restarts=0", "--grace_secs=0.2")
    run.wait_for("ready", 2)
    os.kill(run.pids(1).popitem()[1], signal.SIGKILL)
    assert run.end() == 1
    assert len(re.findall(r"pid \d+", run.text())) == 4  # none of them runs: `end` looks


@LINUX
def test_nothing_outlives_a_killed_launcher(launch):
    run = launch(STUBBORN, "--workers=2", "--cpus=0.3,0.3")
    run.wait_for("ready", 2)
    assert len(list(run.tmp.iterdir())) == 2  # heartbeats, compiled programs
    run.send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL


def test_a_worker_that_told_of_its_raise_is_named_while_it_still_runs(launch):
    """The others end first, and it waits for them at its exit: nobody has to guess."""
    program = f"""{TOLD}
def broken():
    raise OSError("no such file")
if attempt == 0 and worker == 1:
    try:
        broken()
    except OSError as error:
        tell(error)
    wait_for(told("named").exists)
    sys.exit(1)
if attempt == 0:
    wait_for(told("process-1.ending").exists)
    sys.exit(1)
"""
    run = launch(program, "--workers=3", settle_secs=launches.PATIENCE_SECS)
    run.wait_for("hetjax.launch: worker 1 raised OSError: no such file:")
    run.wait_for("hetjax.launch:     File .*, in broken")
    run.wait_for("hetjax.launch:   OSError: no such file")
    (run.heartbeats / "named").touch()
    assert run.end() == 0
    assert "worker 1 raised OSError: no such file; restart 1 of 3 from the las" in run.text()
    assert run.text().count("restart") == 1


@LINUX
def test_a_stopped_worker_is_the_cause_when_others_lose_patience_first(launch):
    program = """
print("ready")
wait_for(told("stopped").exists if worker == 0 else lambda: False)
sys.exit(5)
"""
    run = launch(program, "--workers=2", "--max_restarts=0", "--grace_secs=0.2")
    pid = run.pids(2)[1]
    os.kill(pid, signal.SIGSTOP)
    launches.eventually(lambda: gang.is_stopped(pid))
    (run.heartbeats / "stopped").touch()
    assert run.end() == 1
    assert "worker 1: stopped (SIGSTOP), and then worker 0 ended with exit code 5" in run.text()


@pytest.mark.slow
def test_an_endless_sleep_is_noticed_and_its_stack_kept(launch):
    program = f"""{launches.BEACONS.replace("computing", "loading")}
def endless():
    time.sleep(600)
if worker == 1 and attempt == 0:
    endless()
while attempt == 0:
    time.sleep(0.1)
"""
    run = launch(program, "--workers=2", *PATIENT, "--grace_secs=0.5")
    _, began = run.wait_for("ready", 2)
    words = r"hung: worker 1's data: loading for (\d+\.?\d*) s in round 17"
    (match,), noticed = run.wait_for(words)
    check_noticed(began, noticed, float(match[1]))
    (match,), _ = run.wait_for(r"the stacks of worker 1 are in (.*)")
    assert run.end() == 0
    path = pathlib.Path(match[1])
    assert path.stat().st_mode & 0o777 == 0o600
    assert "in endless" in path.read_text()


def test_ctrl_c_is_forwarded_once(launch):
    program = """
pressed = []
signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
print("ready")
while not pressed:
    time.sleep(0.05)
time.sleep(0.3)
print("ends after the round", len(pressed))
sys.exit(130)
"""
    run = launch(program, "--workers=2")
    run.wait_for("ready", 2)
    run.send(signal.SIGINT)
    assert run.end() == 130
    assert run.text().count("ends after the round 1") == 2
    assert run.text().count("Ctrl-C: ending after this round; once more to stop at once") == 1


def test_a_second_ctrl_c_stops_at_once(launch):
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); time.sleep(600)"
    run = launch(program, "--workers=2")
    run.wait_for("ready", 2)
    run.send(signal.SIGINT)
    run.wait_for("Ctrl-C")
    run.send(signal.SIGINT)
    assert run.end() == 130


@pytest.mark.parametrize("program", [launches.SAVES, "print('ready')\n"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_all_and_lets_them_save(number, program, launch):
    run = launch(program + "time.sleep(600)", "--workers=2")
    run.wait_for("ready", 2)
    run.send(number)
    assert run.end() == 128 + number
    assert run.text().count("saved") == (2 if program == launches.SAVES else 0)


def test_what_is_ignored_stays_ignored(launch):
    """As SIGHUP by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = launch(launches.SAVES + "wait_for(told('end').exists)", "--workers=2")
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = run.pids(2)
    run.wait_for("ready", 2)
    run.send(signal.SIGHUP)
    os.kill(pids[1], signal.SIGHUP)
    (run.heartbeats / "end").touch()
    assert run.end() == 0
    assert "saved" not in run.text()


def test_sigterm_has_a_limit(launch):
    run = launch(STUBBORN, "--workers=2", "--grace_secs=0.1")
    run.wait_for("ready", 2)
    run.send(signal.SIGTERM)
    assert run.end() == 1
    assert "worker 0, 1 did not end within 0.3 s and was killed" in run.text()


@pytest.mark.slow
@LINUX
def test_a_duty_cycle_does_not_look_like_a_hang(launch):
    """Its workers are stopped most of the time, and by nobody else."""
    program = f"""{launches.BEACONS}
end = time.monotonic() + {2.0 * launches.HEARTBEAT_SECS}  # a fault is named after 1.5
while time.monotonic() < end:
    beacon.at("computing", 17)
"""
    flags = ["--workers=2", "--cpus=0.1,0.1", "--max_restarts=0", *PATIENT]
    run = launch(program, *flags, groups=False)
    assert run.end() == 0
    assert "CPU shares 0.1, 0.1 by affinity to cores" in run.text()
    assert "hung" not in run.text()
