"""The launcher's command line, and what its workers are told and print."""

import os
import platform
import sys

import pytest

from hetjax import launch as launcher
from hetjax.launcher import gang
from tests.launcher import launches


def test_lines_carry_the_workers_number_and_keep_their_stream(launch):
    program = "print('to out', worker); print('to err', file=sys.stderr); print('end', end='')"
    run = launch(program, "--workers=3")
    assert run.end() == 0
    for worker in range(3):
        own = [line for line in run.out() if line.startswith(f"[{worker}] ")]
        assert own[1:] == [f"[{worker}] to out {worker}", f"[{worker}] end"]
        assert f"[{worker}] to err" in run.err()
    assert len(run.out()) == 9
    assert any("no CPU shares" in line for line in run.err())


def test_progress_bars_are_seldom_and_of_worker_0_alone(launch):
    program = """
for step in range(300):
    print(f"\\rstep {step}", end="", file=sys.stderr)
print("\\rall steps", file=sys.stderr)
print("dos line\\r")
"""
    run = launch(program, "--workers=2")
    assert run.end() == 0
    assert run.text().count("step ") < 10
    assert "[0] step 0" in run.err()
    assert "[1] step" not in run.text()
    assert {"[0] all steps", "[1] all steps"} <= set(run.err())
    assert {"[0] dos line", "[1] dos line"} <= set(run.out())


def test_workers_are_told_who_they_are_and_restarts_get_a_new_port(launch):
    names = "PROCESS_ID NUM_PROCESSES ATTEMPT HEARTBEAT_SECS COORDINATOR BEACONS"
    program = f"""
print("told", *[os.environ["HETJAX_" + name] for name in "{names}".split()])
print("mode %o" % os.stat(os.environ["HETJAX_BEACONS"]).st_mode, os.environ["PYTHONUNBUFFERED"])
sys.exit(worker if attempt == 0 else 0)
"""
    run = launch(program, "--workers=2", "--heartbeat_secs=7")
    assert run.end() == 0
    told = [line.split()[2:] for line in run.out() if " told " in line]
    assert sorted(line[:4] for line in told) == [
        [str(worker), "2", str(attempt), "7.0"] for worker in (0, 1) for attempt in (0, 1)
    ]
    assert len({line[4] for line in told}) == 2
    assert len({line[5] for line in told}) == 2
    assert all(line[4].startswith("127.0.0.1:") for line in told)
    assert run.text().count("mode 40700 1") == 4
    assert "worker 1 ended with exit code 1; restart 1 of 3 from the last" in run.text()


@pytest.mark.slow
def test_no_worker_compiles_again_after_a_restart(launch, monkeypatch):
    for name in [name for name in os.environ if "_CACHE_" in name]:
        monkeypatch.delenv(name)
    program = """
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("cache_hits")))
import hetjax
hetjax.join_processes()
from hetjax import compiled
compiled.keep()
with compiled.shared():  # as in a run
    jax.jit(lambda x: 3 * x + worker)(2.0)
print("programs found:", sum(hits))
sys.exit(1 - attempt)  # JAX waits for the other one here
"""
    # A worker that has ended with 1 must not be ended by the launcher before JAX's exit is over.
    run = launch(program, "--workers=2", settle_secs=launches.PATIENCE_SECS)
    assert run.end() == 0
    found = sorted(line for line in run.out() if "found" in line)
    assert found == [f"[{w}] programs found: {n}" for w in (0, 1) for n in (0, 1)]


@pytest.mark.slow
def test_who_has_the_coordinator_ends_last(launch):
    """A run has no communicator of its own at the end: JAX has one when a process exits."""
    program = """
import atexit
ended, asked = told("ended"), told("asked")
if worker == 0:
    atexit.register(ended.touch)  # who registers first runs last: after JAX's own exit
import jax, hetjax
from hetjax.comm import key_value_store
hetjax.join_processes()
jax.jit(lambda x: x + worker)(2.0)
if worker == 0:
    atexit.register(asked.touch)
else:
    wait_for(asked.exists)
    time.sleep(1)  # more than enough for a process that does not wait
    answers = key_value_store.KeyValueStore("the end")
    answers.post("worker 1", 17)
    print("answer", answers.wait("worker 1", 60.0), "first ended", ended.exists())
"""
    run = launch(program, "--workers=2", "--max_restarts=0")
    assert run.end() == 0
    assert "[1] answer 17 first ended False" in run.out()


def test_processes_join_whatever_proxies_there_are(launch, monkeypatch):
    """gRPC reads http_proxy and the like, and no NO_PROXY."""
    kinds = ("http", "https", "grpc", "all")
    given = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in kinds} | {"NO_PROXY": "127.0.0.1"}
    given |= {name.upper(): value for name, value in given.items()}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("no_proxy", raising=False)
    program = f"""
import hetjax
hetjax.join_processes()
print("joined", {given}.items() <= os.environ.items())
"""
    run = launch(program, "--workers=2", "--max_restarts=0")
    assert run.end() == 0
    assert run.text().count("joined True") == 2


@pytest.mark.parametrize("own", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_memory_is_kept_unless_the_user_says_how(own, launch, monkeypatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    program = """
import resource
import numpy as np
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    for _ in range(20):
        np.ones(40 << 20, np.uint8)
use()
before = faults()
use()
print("again:", faults() - before)
"""
    run = launch(program, "--workers=1")
    assert run.end() == 0
    (again,) = [int(line.split()[-1]) for line in run.out() if "again:" in line]
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35):  # 32 MB at most before
        assert (again < 20) == (not own)


def test_shares_are_told_and_their_groups_removed(launch):
    run = launch("print('ready'); wait_for(told('end').exists)", "--workers=2", "--cpus=0.5,0.25")
    run.wait_for("ready", 2)
    in_groups = len(launches.groups_of(run.pid))
    (run.heartbeats / "end").touch()
    assert run.end() == 0
    message = "by CPU controller groups" if in_groups else "by affinity"
    assert f"CPU shares 0.5, 0.25 {message}" in run.text()
    assert in_groups in (0, 2)


GOOD = [sys.executable, "-c", "pass"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", *GOOD], "the following arguments are required: --workers"),
        (["--workers=2", "--"], "'' is no command; put one behind --"),
        (["--workers=2", "python"], "unrecognized arguments: python"),
        (["--workers=0", "--", *GOOD, "--address=x"], "--workers=0: must be 1 or more"),
        (["--workers=2", "--", "no-such-program"], "'no-such-program' is no command"),
        (["--workers=2", "--cpus=1", "--", *GOOD], "1 shares for --workers=2"),
        (["--workers=2", "--cpus=1,nan", "--", *GOOD], "share of worker 1 is nan; it must"),
        (["--workers=2", "--cpus=1,x", "--", *GOOD], "must be numbers"),
        (["--workers=1", "--max_restarts=-1", "--", *GOOD], "--max_restarts=-1: must be 0 or"),
        (["--workers=1", "--start_secs=nan", "--", *GOOD], "--start_secs=nan: must be above 0"),
        (["--workers=1", "--port=70000", "--", *GOOD], "--port=70000: must be from 0"),
        (
            ["--workers=1", "--host=192.0.2.1", "--", *GOOD],
            "--host=192.0.2.1 --port=0: no process can",
        ),
        (["--workers=2", "--max_workers=3", "--", *GOOD], "--max_workers=3: needs --runtime=apart"),
        (["--workers=2", "--late_secs=3", "--", *GOOD], "--late_secs=3: needs --runtime=apart"),
        (["--workers=2", "--runtime=apart", "--late_secs=-1", "--", *GOOD], "=-1: must be 0 or m"),
        (["--workers=2", "--runtime=apart", "--max_workers=1", "--", *GOOD], "=1: must be at l"),
        (["--add=/no/run"], "/no/run: there is no such run, or it has ended"),
        (["--remove=/no/run"], "--remove=/no/run: must be RUNDIR:WORKER"),
    ],
)
def test_messages(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        launcher.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_launcher_starts_without_jax_and_numpy():
    done = launches.python("import hetjax.launch, sys; print(*sys.modules)")
    assert not done.returncode
    assert not {"jax", "flax", "numpy", "optax"} & set(done.stdout.split())


def test_a_reader_that_goes_away_does_not_block_the_workers():
    read, write = os.pipe()
    source, sink = os.pipe()
    os.close(read)
    os.write(sink, b"line\n" * 3)
    os.close(sink)
    gang.Log(out=write).copy(source, 0, to_stderr=False)
    assert os.read(source, 1) == b""  # all of it was taken
    for end in (source, write):
        os.close(end)
