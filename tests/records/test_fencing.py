"""A process that leads a run is stopped, another leads on, and the first one wakes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import types

import pytest

from hetjax.checkpoints import checkpoint, generations
from hetjax.comm import join
from hetjax.records import lock
from tests import programs
from tests.checkpoints import checkpoints
from tests.launcher import launches


def process(run_id="", incarnation=0):
    return types.SimpleNamespace(run_id=run_id, incarnation=incarnation)


def leads(directory, step=-1, **of):
    return generations.Lead(directory, generations.newest(directory), step, process(**of))


def save(directory, lead, *steps, keep=9):
    store = checkpoint.Checkpoints(directory, lead=lead, keep=keep)
    for step in steps:
        store.save(step, checkpoints.arrays_of(step), {"written_by": lead.about} if lead else {})
    store.close()


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_a_stopped_leader_was_about_to_change_stays_as_it_is(every, tmp_path):
    """Before each kind of change that a run makes in its workdir."""
    command = ["-m", "tests.records.fencing_program", tmp_path, every, 9 % every]
    done = programs.run(command, launches.ROOT, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) >= 36 // every
    for each in told:
        assert each["changed"] == [], each
        assert each["code"] == 0 or "is in use by process" in each["said"], each


@pytest.mark.parametrize(
    ("begins", "read"),
    [
        ([], [1, 2, 3, 4]),
        ([4], [1, 2, 3, 4]),
        ([2], [1, 2]),
        ([-1], []),
        ([3, 2], [1, 2]),
        ([1, 3], [1]),
        ([-1, 3], []),
    ],
)
@pytest.mark.parametrize("is_old", [True, False])
def test_what_is_later_than_a_newer_generation_began_is_not_read(begins, read, is_old, tmp_path):
    """It appears after all have begun: its writer slept. Older versions told of no generation."""
    directory, late = tmp_path / "checkpoints", tmp_path / "late"
    save(directory, None if is_old else leads(directory), 1, 2, 3, 4)
    shutil.copytree(directory, late, ignore=shutil.ignore_patterns(".*"))
    for step in begins:
        lead = leads(directory, step)
    shutil.copytree(late, directory, dirs_exist_ok=True)
    assert generations.readable(directory) == read
    newest, about = checkpoint.newest(directory), checkpoint.newest_about(directory)
    assert (newest and newest.step) == (read[-1] if read else None)
    assert (about is None) == (not read)
    if begins:
        save(directory, lead, 5, keep=2)
        assert checkpoints.names_in(directory)[1:] == [f"{n:08d}" for n in [*read, 5][-2:]]
        assert len(os.listdir(tmp_path / "generations")) == 1


def write_in_turns(directory, incarnation):
    for step in range(20):
        with contextlib.suppress(ValueError):  # the other has come between
            save(directory, leads(directory, 0, run_id="a", incarnation=incarnation), step)


def test_two_leaders_of_a_generation_write_one_step(tmp_path):
    """Each in a process of its own: one comes while the other writes, which drops its own."""
    program = "import pathlib; from tests.records import test_fencing\n"
    program += "test_fencing.write_in_turns(pathlib.Path({!r}), {})"
    command, directory = [sys.executable, "-c"], tmp_path / "checkpoints"
    both = [
        subprocess.Popen([*command, program.format(str(directory), index)], cwd=launches.ROOT)
        for index in range(2)
    ]
    assert [each.wait(launches.PATIENCE_SECS) for each in both] == [0, 0]
    found = generations.readable(directory)
    assert found
    for step in found:
        arrays = checkpoint.read(directory, step).arrays
        checkpoints.assert_equal_arrays(arrays, checkpoints.arrays_of(step))


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
HOLDS = """
import contextlib, pathlib, sys
from hetjax.records import lock
from tests.records import test_fencing
with contextlib.ExitStack() as stack:
    holder = lock.Holder(stack, pathlib.Path(sys.argv[1]), test_fencing.process("a"))
    holder.hold()
    holder.begin(-1)
    print("leads", flush=True)
    input()
"""


def test_a_member_takes_the_lock_of_a_stopped_leader_which_never_gets_it_back(tmp_path):
    sleeper = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], cwd=launches.ROOT, text=True, **PIPES
    )
    assert sleeper.stdout.readline() == "leads\n"
    sleeper.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        other = lock.Holder(stack, tmp_path, process("b", 1))
        with pytest.raises(ValueError, match=f"in use by process {sleeper.pid} on .+ since"):
            other.take_over(9)
        member = lock.Holder(stack, tmp_path, process("a", 1))
        member.take_over(5)
        late = lock.Holder(stack, tmp_path, process("a", 2))
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .+ since"):
            late.take_over(4)  # it slept, and others have come further
        for _ in range(2):
            done = launches.python(HOLDS, tmp_path)
            assert f"in use by process {os.getpid()} on" in done.stderr
            if sleeper.poll() is None:
                sleeper.send_signal(signal.SIGCONT)
                sleeper.communicate("\n")
        assert sleeper.returncode == 0
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()
        assert member.lead.leads()
    assert not (tmp_path / "lock.json").exists()


SHARES = """
import sys
import hetjax
from hetjax.comm import join
from hetjax.records import workdir
from tests.rounds import problems
hetjax.join_processes(int(sys.argv[1]), 2, sys.argv[2])
join.machines = lambda: [[0], [1]]
workdir.PATIENCE_SECS = 0.5
problems.fit(*problems.given(), workers=2, epochs=1, workdir=sys.argv[3])
"""


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_workdir_that_not_all_machines_see_is_refused(name, tmp_path):
    """Two machines are two names of a directory."""
    address = f"127.0.0.1:{join.find_port('127.0.0.1')}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SHARES, str(own), address, str(tmp_path / str(own and name))],
            cwd=launches.ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in range(2)
    ]
    said = [each.communicate(timeout=launches.PATIENCE_SECS)[1] for each in both]
    if name == "0":
        assert [each.returncode for each in both] == [0, 0], said
        assert not list(tmp_path.glob("0/.*"))
    else:
        for text in said:
            assert "/1') does not see the workdir of process 0 (" in text
