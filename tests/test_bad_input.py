"""What bad input gets from whole commands: a message that says what to do, code 2, no damage."""

import contextlib
import functools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

PATIENCE_SECS = 300  # a few are usual, where the machine is not busy
ROOT = pathlib.Path(__file__).parents[1]
TRAIN = [sys.executable, "-m", "experiments.train", "--config=configs/digits.py"]
LAUNCH = [sys.executable, "-m", "hetjax.launch"]
TWO_WORKERS = [
    *("--config.epochs=2", "--config.data.num_train=64", "--config.model.name=logistic"),
    *("--config.cluster.num_workers=2", "--config.cluster.secs_per_microbatch=0.001,0.002"),
    "--config.checkpoint.every_rounds=1",
]
LONG = ["--config.budget=1", "--config.epochs=1000", "--config.eval_every=1000"]


@contextlib.contextmanager
def started(*command, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*command, **environment):
    """Exit code and what was said on stderr; a traceback is an error whatever else there is."""
    with started(*command, **environment) as process:
        _, said = process.communicate(timeout=PATIENCE_SECS)
        assert "Traceback" not in said, said
        return process.returncode, said


def refused(message, workdir, *more, before=(), **environment):
    """Checks that a training ends with code 2 and the message, and leaves nothing."""
    code, said = run(*before, *TRAIN, *TWO_WORKERS, f"--workdir={workdir}", *more, **environment)
    assert code == 2, said
    assert re.search(message, said, re.DOTALL), said
    assert not workdir.is_dir() or not any(workdir.iterdir())


def place(process_id, port):
    flags = {"process_id": process_id, "num_processes": 2, "coordinator": f"127.0.0.1:{port}"}
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# Ports and coordinators


def test_a_port_that_is_in_use_is_told(taken, tmp_path):
    message = f"process 0 cannot listen at 127.0.0.1:{taken}"
    refused(message, tmp_path, *place(0, taken), HETJAX_START_SECS="5")
    launch = [*LAUNCH, "--workers=2", f"--port={taken}", "--"]
    refused(rf"--port={taken}: no process can listen there", tmp_path, before=launch)


@pytest.mark.slow
def test_a_coordinator_that_comes_late_is_waited_for(port, tmp_path):
    command = [*TRAIN, *TWO_WORKERS, f"--workdir={tmp_path}"]
    with started(*command, *place(1, port)) as late:
        time.sleep(5)
        code, said = run(*command, *place(0, port))
        _, told = late.communicate(timeout=PATIENCE_SECS)
    assert (code, late.returncode) == (0, 0), said + told
    assert "Traceback" not in told
    assert json.loads((tmp_path / "summary.json").read_text())["examples_missing"] == 0


@pytest.mark.parametrize("process_id", [0, 1])
def test_who_waits_in_vain_is_told_what_to_look_at(process_id, port, tmp_path):
    message = rf"process {process_id} of 2 cannot join its run at 127.0.0.1:{port}: .*--coor"
    refused(message, tmp_path, *place(process_id, port), HETJAX_START_SECS="3")


@pytest.mark.parametrize(
    ("before", "arguments", "environment", "message"),
    [
        ([], ["--process_id=0"], {}, "--process_id is 0 and --num_processes None; give both"),
        ([], place(2, 7000), {}, "--process_id is 2; it must be from 0 to 1"),
        ([], place(0, 7000), {"HETJAX_START_SECS": "soon"}, "HETJAX_START_SECS is 'soon'; it must"),
        ([*LAUNCH, "--workers=2", "--cpus=1,0.5,0.5", "--"], [], {}, "3 shares for --workers=2"),
    ],
)
def test_half_a_place_and_a_share_too_many_are_refused(
    before, arguments, environment, message, tmp_path
):
    refused(message, tmp_path, *arguments, before=before, **environment)


@pytest.mark.slow
def test_another_number_of_processes_than_workers_is_refused(tmp_path):
    message = r"2 must be a multiple of 3.* input \(exit code 2\); nothing is restarted"
    refused(f"cluster.num_workers={message}", tmp_path, before=[*LAUNCH, "--workers=3", "--"])


# Directories


@functools.cache
def own_mounts():
    """How a command gets disks that nobody else sees; None where that is not allowed."""
    for options in ((), ("--map-root-user",)):
        command = ["unshare", "--mount", *options, "sh", "-c", "mount -t tmpfs none /mnt"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, capture_output=True).returncode == 0:
                return command[:-3]
    return None


def on_disk(disk, options, *lines):
    """The beginning of a command that runs with a disk of its own, after some lines of shell."""
    if own_mounts() is None:
        pytest.skip("needs disks of its own")
    disk.mkdir()
    script = "\n".join([f"mount -t tmpfs -o {options} none {disk}", *lines])
    return [*own_mounts(), "sh", "-ec", script, "sh"]


FILL = 'head -c 99999999 /dev/zero > filler 2> /dev/null || true; truncate -s "-{}K" filler'


@pytest.mark.parametrize(
    ("free_kb", "more", "message"),
    [
        (0, [], "workdir '.*run' cannot be used: .*No space left on device"),
        (700, LONG, r"checkpoint \d+ could not be written .*No space left"),
    ],
)
def test_a_full_disk_is_told(free_kb, more, message, tmp_path):
    disk = tmp_path / "disk"
    command = f'cd {disk}; {FILL.format(free_kb)}; cd {ROOT}; exec "$@"'
    refused(message, disk / "run", *more, before=on_disk(disk, "size=4m", command))


def test_a_directory_that_can_only_be_read_is_told(tmp_path):
    disk = tmp_path / "disk"
    before = on_disk(disk, "ro", 'exec "$@"')
    refused("cannot be used: .*Read-only file system", disk / "run", before=before)
