"""Two hosts on this machine, joined by a link of a given rate, for as long as they are needed.

A host is a process that holds namespaces of its own: the network, the machine's name, the mounts
with an `/etc/hosts` and a `/dev/shm`, and on the second host a monotonic clock that is a day ahead.
Both ends of the link have a token bucket. All of it is gone when the holders have ended, which read
from a pipe of this program: a program that is killed leaves nothing. It needs root, and Linux.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from experiments.drills import engine_gangs
from hetjax.comm import join
from tests.engines import jobs

NAMES = ("first", "second")
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "tc", "mount", "hostname")
_AHEAD_SECS = 100_000  # the clock of the second host
_HOLD = (
    "hostname {name} && mount --bind {file} /etc/hosts && mount -t tmpfs none /dev/shm "
    "&& ip link set lo up && echo && exec cat"
)


def missing() -> str:
    """Why this machine cannot have two hosts; "" if it can."""
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"there is no {', '.join(lacking)} here; Debian has them in iproute2, util-linux"
    if os.geteuid():
        return "namespaces and token buckets need root"
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Hosts(pathlib.Path(directory), "1gbit"))
        except (OSError, subprocess.CalledProcessError) as error:
            return f"namespaces or a token bucket are not to be had here: {error}"
    return ""


class Hosts:
    """Two hosts and the link between them, as a context that ends them.

    Args:
        directory: gets their `/etc/hosts`.
        rate: of the link, each way, as `tc` has it: "100mbit", "1gbit".

    Raises:
        CalledProcessError: this machine cannot have them.
    """

    def __init__(self, directory: pathlib.Path, rate: str) -> None:
        self._file, self._rate = directory / "etc_hosts", rate
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        addresses = [f"10.0.0.{index}" for index in (1, 2)]
        lines = [f"{address} {name}" for address, name in zip(addresses, NAMES, strict=True)]
        self._file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            for index, name in enumerate(NAMES):
                self._hold(name, index * _AHEAD_SECS)
            peer = str(self._holders[1].pid)
            kind = ("type", "veth", "peer", "name", "link0", "netns", peer)
            self._do(0, "ip", "link", "add", "link0", *kind)
            for index, address in enumerate(addresses):
                self._do(index, "ip", "address", "add", f"{address}/24", "dev", "link0")
                self._do(index, "ip", "link", "set", "link0", "up")
            bucket = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
            for index in range(len(NAMES)):
                self._do(index, "tc", "qdisc", "replace", "dev", "link0", "root", *bucket)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for holder in self._holders:
            holder.communicate()  # closes the pipe, so it ends

    def inside(self, index: int, cwd: pathlib.Path | None = None) -> list[str]:
        """What a command of this host begins with. It keeps its process id, and ends with this one.

        Args:
            index: of the host.
            cwd: where it runs; None: here.
        """
        of = f"/proc/{self._holders[index].pid}/ns"
        kinds = ("net", "mount", "uts", "time")
        files = ("net", "mnt", "uts", "time_for_children")
        entered = [f"--{kind}={of}/{file}" for kind, file in zip(kinds, files, strict=True)]
        own = ["setpriv", "--pdeathsig=KILL", "nsenter"]
        return [*own, *entered, f"--wdns={cwd or pathlib.Path.cwd()}", "--"]

    def processes(self) -> dict[int, str]:
        """What runs on the hosts: command lines by process id."""
        holders = [holder.pid for holder in self._holders]
        own, found = {_network(pid) for pid in holders} - {""}, {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (pid := int(path.name)) not in holders and _network(pid) in own:
                    found[pid] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def bytes_sent(self) -> list[int]:
        """What each host has sent over the link so far, with all headers."""
        found = []
        for holder in self._holders:
            lines = pathlib.Path(f"/proc/{holder.pid}/net/dev").read_text().splitlines()
            (line,) = (line for line in lines if line.strip().startswith("link0:"))
            found.append(int(line.split(":")[1].split()[8]))
        return found

    def _hold(self, name: str, ahead_secs: int) -> None:
        kinds = ("--net", "--mount", "--uts", "--time", f"--monotonic={ahead_secs}")
        command = ["unshare", *kinds, "sh", "-c", _HOLD.format(name=name, file=self._file)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # A Ctrl-C at the terminal is not for them.
        holder = subprocess.Popen(command, start_new_session=True, **pipes)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            _, said = holder.communicate()
            raise subprocess.CalledProcessError(holder.wait(), f"unshare ({said.decode().strip()})")

    def _do(self, index: int, *command: str) -> None:
        subprocess.run([*self.inside(index), *command], check=True, capture_output=True)


def _network(pid: int) -> str:
    """Of a process; "" where it has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


class ByHand:
    """The processes of a run, each started with its number, as a context that ends them.

    Args:
        command: of each process, without its number.
        job: whose log gets what all print.
        hosts: that the processes are shared out to, the first half to the first; None: all run
            here.
    """

    def __init__(self, command: Sequence[str], job: jobs.Job, hosts: Hosts | None = None) -> None:
        self._job = job
        number, port = engine_gangs.NUM_WORKERS, join.find_port("127.0.0.1")
        where = NAMES[0] if hosts else "127.0.0.1"
        place = [f"--num_processes={number}", f"--coordinator={where}:{port}"]
        self.processes: list[subprocess.Popen[bytes]] = []
        """In the order of their numbers."""
        with (job.directory / "log").open("ab") as file:
            options = {"cwd": job.directory, "env": job.environment, "start_new_session": True}
            options |= {"stdout": file, "stderr": file}
            for rank in range(number):
                at = len(NAMES) * rank // number
                inside = hosts.inside(at, job.directory) if hosts else []
                own = [*inside, *command, f"--process_id={rank}", *place]
                self.processes.append(subprocess.Popen(own, **options))

    def __enter__(self) -> "ByHand":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.processes)))

    @property
    def is_over(self) -> bool:
        """Whether a process has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait_for_round(self, number: int) -> None:
        """Waits until so many rounds are done.

        Raises:
            RuntimeError: a process ended before; with the end of the log.
            TimeoutError: it does not come so far.
        """
        workdir = self._job.workdir
        engine_gangs.until(lambda: self.is_over or engine_gangs.num_rounds(workdir) > number)
        if self.is_over:
            raise RuntimeError(f"a process has ended:\n{self._job.said[-3000:]}")

    def kill(self, ranks: Sequence[int]) -> None:
        """`kill -9` of these processes, and waits for their end."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(signal.SIGKILL)
        for rank in ranks:
            self.processes[rank].wait()

    def end(self, secs: float = engine_gangs.PATIENCE_SECS) -> list[int]:
        """Waits for the end of all; their exit codes.

        Raises:
            TimeoutExpired: one does not end in time.
        """
        ends = time.monotonic() + secs
        return [process.wait(timeout=ends - time.monotonic()) for process in self.processes]
