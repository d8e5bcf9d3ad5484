"""A launcher under test: what it prints, what it leaves behind, programs for it to run."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

from hetjax.launcher import cpu_shares

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_SECS = 240  # with ten busy processes a core a program may take a minute to start
# A beacon is written by a thread of its own and read by the launcher. A busy machine may keep
# each of them waiting for a second: two heartbeats are long beside that.
HEARTBEAT_SECS = 3

LAUNCHER = """
import dataclasses, json, sys
from hetjax import launch
from hetjax.launcher import cpu_shares, supervisor
given = json.loads(sys.argv[1])
if not given.pop("groups", True):
    cpu_shares.find_controller = lambda *files: open("/there/is/none")
options = dataclasses.replace(launch.parse(sys.argv[2:]), **given)
sys.exit(supervisor.supervise(options))
"""
PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
worker = int(os.environ["HETJAX_PROCESS_ID"])
attempt = int(os.environ["HETJAX_ATTEMPT"])
print("pid", os.getpid())
def told(name):
    return pathlib.Path(os.environ["HETJAX_BEACONS"], name)
def wait_for(condition):
    while not condition():
        time.sleep(0.01)
"""
BEACONS = """
from hetjax.liveness import heartbeats
beacon = heartbeats.start()
beacon.at("computing" if worker == 1 else "waiting", 17)
print("ready")
"""
SAVES = """
def save(signum, frame):
    print("saved")
    sys.exit(128 + signum)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, save)
print("ready")
"""


class Launch:
    """A launcher that runs, what it prints with the times, and what it leaves behind.

    Args:
        tmp_path: where it and its workers have their temporary files.
        program: what each worker runs, after `PREAMBLE`.
        *flags: of the launcher's command line.
        **options: of `supervisor.Options`, where the command line has no flag for them;
            `groups=False`: without CPU controller groups.
    """

    def __init__(self, tmp_path, program, *flags, **options):
        self.tmp = tmp_path
        command = [sys.executable, "-c", PREAMBLE + program]
        launcher = ["-c", LAUNCHER, json.dumps(options)] if options else ["-m", "hetjax.launch"]
        command = [sys.executable, *launcher, *flags, "--", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
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

        def find():
            found = [(at, re.search(pattern, line)) for at, _, line in list(self.lines)]
            found = [(at, match) for at, match in found if match]
            return found if len(found) >= count else None

        found = eventually(find, lambda: f"{count} lines like {pattern!r} in\n{self.text()}")
        return [match for _, match in found], found[count - 1][0]

    def pids(self, count):
        """Process ids by worker, of the first `count` that printed theirs."""
        matches, _ = self.wait_for(r"\[(\d+)\] pid (\d+)", count)
        return {int(match[1]): int(match[2]) for match in matches[:count]}

    @property
    def heartbeats(self):
        """The directory of the attempt's heartbeats, in which `told` finds files too."""
        (found,) = self.tmp.glob("hetjax-heartbeats-*")
        return found

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
        pids = {int(match[1]) for match in re.finditer(r"pid (\d+)", self.text())}
        is_gone(lambda: list(filter(runs, pids)))
        is_gone(lambda: [path for path in self.tmp.iterdir() if path.suffix != ".stack"])
        is_gone(lambda: groups_of(self.pid))
        return code


def python(program, *arguments, **variables):
    """What a Python program did, with variables beside this process's own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, **variables}
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=600, check=False, **options)


def runs(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        if sys.platform != "linux":
            return True
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def groups_of(pid):
    try:
        own = (pathlib.Path("/proc/self", name).read_text() for name in ("mountinfo", "cgroup"))
        directory, _ = cpu_shares.find_controller(*own)
    except OSError:
        return []
    return list(directory.glob(f"hetjax-{pid}-*"))


def eventually(condition, what=lambda: ""):
    """Waits until the condition is true; returns what made it true, or says `what` there is."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {PATIENCE_SECS} s: {what()}"
        time.sleep(0.02)
    return found


def is_gone(find):
    """Waits until nothing is found any more."""
    eventually(lambda: not find(), lambda: f"still there: {find()}")
