"""Programs of several processes that a test starts, and what they said."""

import os
import socket
import subprocess
import sys
import time

import hetjax
from hetjax import process_info
from hetjax.comm import join

PATIENCE_SECS = 1200  # 30 are usual; a busy machine may need twenty times as long


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(module, num_processes, directory, *arguments, **variables):
    """Runs a module once for each process and waits for all: [(exit code, what it said)].

    A process gets its number, their number, the coordinator's address and the arguments. What it
    says goes to a file of the directory, so that none waits for a reader.
    """
    command = [sys.executable, "-m", module]
    address = f"127.0.0.1:{free_port()}"
    paths = [directory / f"said-{index}" for index in range(num_processes)]
    gang = []
    try:
        for index, path in enumerate(paths):
            with path.open("w") as said:
                gang.append(
                    subprocess.Popen(
                        [*command, str(index), str(num_processes), address, *arguments],
                        env={**os.environ, **variables},
                        stderr=said,
                    )
                )
        deadline = time.monotonic() + PATIENCE_SECS
        while any(process.poll() is None for process in gang):
            said = "\n".join(path.read_text() for path in paths)
            assert time.monotonic() < deadline, f"not done in {PATIENCE_SECS} s:\n{said}"
            time.sleep(0.05)
    finally:
        for process in gang:
            process.kill()
            process.wait()
    codes = [process.returncode for process in gang]
    return [(code, path.read_text()) for code, path in zip(codes, paths, strict=True)]


def joined(process_id, num_processes, coordinator, workers=4):
    """In such a program: its place, once it has joined, with its part of so many CPU workers."""
    place = process_info.find(int(process_id), int(num_processes), coordinator)
    join.join(place)
    hetjax.use_cpu_workers(workers // place.num_processes)
    return place
