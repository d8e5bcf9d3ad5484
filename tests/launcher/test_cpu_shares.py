"""CPU shares: where processes go, what they really get, and that nothing is left."""

import contextlib
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from hetjax.launcher import cpu_shares, enter, gang, guardian
from tests.launcher import launches

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
BUSY = "while True: pass"
ENTER = [sys.executable, "-I", "-S", enter.__file__, str(os.getpid())]


def held_by(method, shares):
    if method == "duty_cycle":
        return cpu_shares.DutyCycle(shares)
    files = [pathlib.Path("/proc/self", name).read_text() for name in ("mountinfo", "cgroup")]
    return cpu_shares.ControllerGroups(shares, *cpu_shares.find_controller(*files))


def groups_permitted():
    try:
        held_by("group", [0.5]).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=["group", "duty_cycle"])
def method(request):
    if request.param == "group" and not groups_permitted():
        pytest.skip("this system lets nobody make a CPU controller group here")
    return request.param


@contextlib.contextmanager
def running(shares, method):
    """Process ids of busy processes that are held to their shares."""
    held = held_by(method, shares)
    processes = []
    try:
        for index in range(len(shares)):
            place = held.confinement(index)
            cores = ",".join(map(str, place.cores))
            command = [*ENTER, cores, place.group, sys.executable, "-S", "-c", BUSY]
            processes.append(subprocess.Popen(command, start_new_session=True))
            held.started(index, processes[-1].pid)
        yield held, [process.pid for process in processes]
    finally:
        for index, process in enumerate(processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            held.ended(index)
        held.close()


def cpu_secs(pid):
    return time.clock_gettime((~pid << 3) | 2)


def shares_got(pids, secs=1.0):
    before, began = [cpu_secs(pid) for pid in pids], time.monotonic()
    time.sleep(secs)
    wall = time.monotonic() - began
    return [(cpu_secs(pid) - b) / wall for pid, b in zip(pids, before, strict=True)]


def idle_secs(core):
    """How long nobody has used a core so far, by /proc/stat."""
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            return (int(ticks[3]) + int(ticks[4])) / os.sysconf("SC_CLK_TCK")
    raise AssertionError(f"there is no core {core}")


def check_shares_got(pids, shares, core, tries=30):
    """What they get is never much more; it is less only while others use their core."""
    for _ in range(tries):
        idle, began = idle_secs(core), time.monotonic()
        got = shares_got(pids)
        used_by_all = 1 - (idle_secs(core) - idle) / (time.monotonic() - began)
        for one, share in zip(got, shares, strict=True):
            assert one < 1.15 * share, f"asked for {shares}, got {got}"
        if all(one > 0.85 * share for one, share in zip(got, shares, strict=True)):
            return
        by_others = used_by_all - sum(got)
        assert by_others > 0.05, f"asked for {shares}, got {got}, and others used {by_others:.2f}"
    pytest.skip(f"others use core {core} all the time; asked for {shares}, got {got}")


@pytest.mark.slow
@LINUX
def test_processes_get_their_shares(method):
    shares = [0.25, 0.5]  # both on one core
    with running(shares, method) as (held, pids):
        launches.eventually(lambda: all(cpu_secs(pid) > 0.1 for pid in pids))  # they are at work
        cores = [os.sched_getaffinity(pid) for pid in pids]
        assert cores[0] == cores[1]
        (core,) = cores[0]
        check_shares_got(pids, shares, core)
        assert ("groups" if method == "group" else "duty cycle") in held.description


@LINUX
def test_groups_are_removed_with_whatever_is_in_them():
    if not groups_permitted():
        pytest.skip("this system lets nobody make a CPU controller group here")
    held = held_by("group", [0.5, 0.5])
    assert all(pathlib.Path(path).is_dir() for path in held.groups)
    process = subprocess.Popen([*ENTER, "", held.confinement(0).group, "sleep", "600"])
    launches.eventually(pathlib.Path(held.confinement(0).group).read_text)
    held.close()
    assert process.wait() == -signal.SIGKILL
    assert not any(pathlib.Path(path).exists() for path in held.groups)


@LINUX
def test_a_stopped_duty_cycle_leaves_its_processes_running():
    with running([0.05], "duty_cycle") as (held, pids):
        launches.eventually(lambda: gang.is_stopped(pids[0]))
        held.close()
        used = cpu_secs(pids[0])
        launches.eventually(lambda: cpu_secs(pids[0]) > used + 0.2)
        assert not gang.is_stopped(pids[0])


@hypothesis.given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=12), st.integers(0, 6))
def test_every_packing_has_room(shares, more):
    cores = list(range(math.ceil(sum(shares)) + more))
    if max(shares) > len(cores):
        return
    places = cpu_shares.pack(shares, cores)
    for share, place in zip(shares, places, strict=True):
        assert set(place) <= set(cores)
        assert len(place) >= share - 1e-6
    for core in cores:  # what is bound to one core alone fits on it
        alone = sum(s for s, place in zip(shares, places, strict=True) if place == (core,))
        assert alone <= 1 + 1e-6


@pytest.mark.parametrize(
    ("shares", "placed", "places"),
    [
        ([1, 0.5, 0.25, 0.25], {}, [(0,), (1,), (1,), (1,)]),
        ([0.75, 0.75, 0.5], {}, [(0,), (1,), (0, 1)]),
        ([0.1] * 10, {}, [(0,)] * 10),
        # Who comes later gets a core that has room beside who runs there.
        ([0.3, 0.3, 0.7], {0: (0,), 1: (0,)}, [(0,), (0,), (1,)]),
        ([0.3, 0.3, 1.2], {0: (0,), 1: (0,)}, [(0,), (0,), (0, 1)]),
    ],
)
def test_packings_by_hand(shares, placed, places):
    assert cpu_shares.pack(shares, [0, 1], placed=placed) == places


V1 = "31 24 0:27 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
CONTAINER = "31 24 0:27 /docker/ab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
CPUSET = "32 24 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


@pytest.mark.parametrize(
    ("mounts", "own", "directory"),
    [
        (f"{CPUSET}\n{V1}", "5:cpuset:/\n4:cpu,cpuacct:/user/me", "/sys/fs/cgroup/cpu/user/me"),
        (CONTAINER, "4:cpu:/docker/ab/job", "/sys/fs/cgroup/cpu/job"),
    ],
)
def test_the_controller_of_version_1_is_found(mounts, own, directory):
    assert cpu_shares.find_controller(mounts, own) == (pathlib.Path(directory), 1)


def test_the_controller_of_version_2_is_found_where_it_is_passed_on(tmp_path):
    mounts = f"30 24 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate"
    own = tmp_path / "user.slice" / "session"
    own.mkdir(parents=True)
    for directory, controllers in ((own, ""), (own.parent, "cpu memory"), (tmp_path, "cpu")):
        (directory / "cgroup.subtree_control").write_text(controllers)
    found = cpu_shares.find_controller(mounts, "0::/user.slice/session")
    assert found == (own.parent, 2)
    assert cpu_shares.find_controller(mounts, "0::/") == (tmp_path, 2)
    (own.parent / "cgroup.subtree_control").write_text("memory")
    with pytest.raises(OSError, match="no CPU controller"):
        cpu_shares.find_controller(mounts, "0::/user.slice/session")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5, 0.0], "share of worker 1 is 0; it must be from 0.01 to 2"),
        ([1, 1, 0.5], "1, 1, 0.5 add up to 2.5; 2 cores may be used"),
    ],
)
def test_messages(shares, message):
    with pytest.raises(ValueError, match=message):
        cpu_shares.check_shares(shares, 2)


def test_the_guardian_puts_away_what_was_not_dropped(tmp_path):
    for name in ("kept of all", "dropped"):
        (tmp_path / name).mkdir()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    dropped, group = f"directory {tmp_path / 'dropped'}\n", f"process_group {process.pid}\n"
    kept = f"+ directory {tmp_path / 'kept of all'}\n"
    guardian.clean([f"+ {dropped}", f"+ {group}", kept, f"- {dropped}"])
    assert process.wait() == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["dropped"]


def test_a_worker_that_cannot_take_its_place_says_so(tmp_path):
    group, program = str(tmp_path / "missing" / "cgroup.procs"), str(tmp_path / "program")
    for given, words in (
        ((group, "true"), "cannot take its CPU share"),
        (("", program), f"{program} cannot be run: No such file"),
    ):
        done = subprocess.run([*ENTER, "", *given], capture_output=True, text=True)
        assert done.returncode == 2
        assert words in done.stderr


def test_an_empty_seat_has_no_share(monkeypatch):
    monkeypatch.setattr(cpu_shares, "available_cores", lambda: [0, 1])
    held = cpu_shares.Shares([0.5, 1.0, 0.5])
    assert [held.confinement(index).cores for index in range(3)] == [(1,), (0,), (1,)]
    with pytest.raises(ValueError, match=r"add up to 2\.5"):
        held.give(0, 1.0, [1, 2])
    held.give(0, 1.0, [2])
    assert [held.confinement(index).cores for index in (0, 2)] == [(0,), (1,)]
