"""A launcher under test: what it prints, what it leaves behind, programs for it to run."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

from hetjax.launcher import cpu_shares

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_SECS = 30

PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
worker = int(os.environ["HETJAX_PROCESS_ID"])
attempt = int(os.environ["HETJAX_ATTEMPT"])
print("pid", os.getpid())
"""
BEACONS = """
from hetjax.processes import beacons
beacon = beacons.start()
beacon.at("computing" if worker == 1 else "waiting", 17)
print("ready")
"""
SAVES = """
def save(signum, frame):
    print("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready")
"""


class Launch:
    """A launcher that runs, what it prints with the times, and what it leaves behind."""

    def __init__(self, tmp_path, program, *flags):
        self.tmp = tmp_path
        command = [sys.executable, "-c", PREAMBLE + program]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetjax.launch", *flags, "--", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        self.pid = self._process.pid
        self.lines = []  # (seconds, standard output?, line)
        self._threads = [
            threading.Thread(target=self._collect, args=(pipe, pipe is self._process.stdout))
            for pipe in (self._process.stdout, self._process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, pipe, is_out):
        for line in pipe:
            self.lines.append((time.monotonic(), is_out, line.rstrip("\n")))

    def out(self):
        return [line for _, is_out, line in self.lines if is_out]

    def err(self):
        return [line for _, is_out, line in self.lines if not is_out]

    def text(self):
        return "\n".join(line for _, _, line in self.lines)

    def wait_for(self, pattern, count=1):
        """Waits for lines that have the pattern; returns the matches and the last one's time."""
        deadline = time.monotonic() + PATIENCE_SECS
        while time.monotonic() < deadline:
            found = [(at, re.search(pattern, line)) for at, _, line in list(self.lines)]
            found = [(at, match) for at, match in found if match]
            if len(found) >= count:
                return [match for _, match in found], found[count - 1][0]
            time.sleep(0.02)
        raise AssertionError(f"no {count} lines like {pattern!r} in\n{self.text()}")

    def pids(self, count):
        """Process ids by worker, of the first `count` that printed theirs."""
        matches, _ = self.wait_for(r"\[(\d+)\] pid (\d+)", count)
        return {int(match[1]): int(match[2]) for match in matches[:count]}

    def send(self, signum):
        self._process.send_signal(signum)

    @property
    def running(self):
        return self._process.poll() is None

    def end(self):
        """Waits for the launcher; returns its exit code, and checks that nothing is left."""
        code = self._process.wait(timeout=PATIENCE_SECS)
        for thread in self._threads:
            thread.join(timeout=PATIENCE_SECS)
        self._process.stdout.close()
        self._process.stderr.close()
        print(self.text())  # pytest shows it where the test fails
        for match in re.finditer(r"pid (\d+)", self.text()):
            eventually(lambda pid=int(match[1]): not runs(pid))
        eventually(lambda: not [p for p in self.tmp.iterdir() if p.suffix != ".stack"])
        eventually(lambda: not groups_of(self.pid))
        eventually(lambda: not list(pathlib.Path("/dev/shm").glob(f"hetjax-{self.pid}-*")))
        return code


def runs(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        if sys.platform != "linux":
            return True
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def groups_of(pid):
    try:
        directory, _ = cpu_shares.find_controller(
            pathlib.Path("/proc/self/mountinfo").read_text(),
            pathlib.Path("/proc/self/cgroup").read_text(),
        )
    except OSError:
        return []
    return list(directory.glob(f"hetjax-{pid}-*"))


def eventually(condition):
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
