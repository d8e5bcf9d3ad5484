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
    "--config.epochs=2",
    "--config.data.num_train=64",
    "--config.model.name=logistic",
    "--config.cluster.num_workers=2",
    "--config.cluster.secs_per_microbatch=0.001,0.002",
    "--config.checkpoint.every_rounds=1",
]
LONG = ["--config.budget=1", "--config.epochs=1000", "--config.eval_every=1000"]
NEVER = ["--config.checkpoint.every_rounds=0", "--config.checkpoint.every_secs=0"]


@contextlib.contextmanager
def started(*command, **environment):
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )
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


def refused(message, *command, **environment):
    """Checks that a command ends with code 2 and the message; what it said."""
    code, said = run(*command, **environment)
    assert code == 2, said
    assert re.search(message, said, re.DOTALL), said
    return said


def place(process_id, port, num_processes=2):
    return [
        f"--process_id={process_id}",
        f"--num_processes={num_processes}",
        f"--coordinator=127.0.0.1:{port}",
    ]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# Ports and coordinators


def test_process_0_says_that_its_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = [*TWO_WORKERS, f"--workdir={tmp_path}", *place(0, port)]
        refused(
            f"process 0 cannot listen at 127.0.0.1:{port}",
            *TRAIN,
            *arguments,
            HETJAX_START_SECS="5",
        )
    assert not any(tmp_path.iterdir())


def test_the_launcher_says_that_its_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [*LAUNCH, "--workers=2", f"--port={port}", "--", *TRAIN, f"--workdir={tmp_path}"]
        refused(rf"--port={port}: nobody can listen there", *command)


@pytest.mark.slow
def test_a_coordinator_that_comes_late_is_waited_for(tmp_path):
    port = free_port()
    arguments = [*TWO_WORKERS, f"--workdir={tmp_path}"]
    with started(*TRAIN, *arguments, *place(1, port)) as late:
        time.sleep(5)
        code, said = run(*TRAIN, *arguments, *place(0, port))
        _, told = late.communicate(timeout=PATIENCE_SECS)
    assert (code, late.returncode) == (0, 0), said + told
    assert "Traceback" not in told
    assert json.loads((tmp_path / "summary.json").read_text())["examples_missing"] == 0


@pytest.mark.parametrize("process_id", [0, 1])
def test_who_waits_in_vain_is_told_what_to_look_at(process_id, tmp_path):
    port = free_port()
    arguments = [*TWO_WORKERS, f"--workdir={tmp_path}", *place(process_id, port)]
    message = rf"process {process_id} of 2 cannot join its run at 127.0.0.1:{port}: .*--coordinator"
    refused(message, *TRAIN, *arguments, HETJAX_START_SECS="3")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--process_id=0"], {}, "--process_id is 0 and --num_processes None; give both"),
        (place(2, 7000), {}, "--process_id is 2; it must be from 0 to 1"),
        (place(0, 7000), {"HETJAX_START_SECS": "soon"}, "HETJAX_START_SECS is 'soon'; it must be"),
    ],
)
def test_half_a_place_is_refused(arguments, environment, message, tmp_path):
    refused(message, *TRAIN, *TWO_WORKERS, f"--workdir={tmp_path}", *arguments, **environment)
    assert not any(tmp_path.iterdir())


# Workers and shares


def test_shares_that_fit_no_workers_are_refused(tmp_path):
    flags = ["--workers=2", "--cpus=1,0.5,0.5"]
    refused("3 shares for --workers=2", *LAUNCH, *flags, "--", *TRAIN, f"--workdir={tmp_path}")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_another_number_of_processes_than_workers_is_refused(tmp_path):
    command = [*LAUNCH, "--workers=3", "--", *TRAIN, *TWO_WORKERS, f"--workdir={tmp_path}"]
    said = refused("cluster.num_workers=2 must be a multiple of 3", *command)
    assert "refused its input (exit code 2); nothing is restarted" in said
    assert not any(tmp_path.iterdir())


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
    prefix = on_disk(disk, "size=4m", command)
    refused(message, *prefix, *TRAIN, *TWO_WORKERS, *more, f"--workdir={disk / 'run'}")


def test_a_directory_that_can_only_be_read_is_told(tmp_path):
    prefix = on_disk(tmp_path / "disk", "ro", 'exec "$@"')
    arguments = [*TWO_WORKERS, f"--workdir={tmp_path / 'disk' / 'run'}"]
    refused("cannot be used: .*Read-only file system", *prefix, *TRAIN, *arguments)
