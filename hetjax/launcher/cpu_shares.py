"""How is a local process held to its share of the processor?

It is pinned to the fewest cores that have room for it. Where the system lets us make one (control
groups version 1 and 2), it also gets a CPU controller group of its own. Elsewhere it gets a duty
cycle: a thread stops each process when it has used up its share and continues it later.
A share is a number of cores: 0.25 is a quarter of one. It is the most that a process gets; that it
gets as much assumes that nothing else needs the machine.
"""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hetjax.launcher import guardian

MIN_SHARE = 0.01
_PERIOD_USECS = 20_000  # short: a worker that waits for a whole period stretches small rounds
_MIN_QUOTA_USECS = 1_000  # the kernel's least
_TICK_SECS = 0.005
_SAVED_SECS = 0.05  # what a process that was idle may catch up, times its share


def available_cores() -> list[int]:
    """The numbers of the cores that this process may use; [] if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def check_shares(shares: Sequence[float], num_cores: int, empty: Collection[int] = ()) -> None:
    """Raises ValueError unless shares are positive, but those of `empty`, and there is room."""
    for index, share in enumerate(shares):
        if index not in empty and not MIN_SHARE <= share <= num_cores:
            raise ValueError(
                f"the share of worker {index} is {share:g}; it must be from {MIN_SHARE} to "
                f"{num_cores} cores"
            )
    if sum(shares) > num_cores + 1e-9:
        raise ValueError(
            f"the shares {_text(shares)} add up to {sum(shares):g}; {num_cores} cores may be used"
        )


def pack(
    shares: Sequence[float],
    cores: Sequence[int],
    *,
    placed: Mapping[int, tuple[int, ...]] = types.MappingProxyType({}),
) -> list[tuple[int, ...]]:
    """Decides which cores each process may use: one, if its share fits on one.

    Takes the largest share first. Each goes onto the fullest core that has room for it, or else
    onto as many of the emptiest as it takes.

    Args:
        shares: in cores; `check_shares` accepts them.
        cores: their numbers.
        placed: the cores of processes that run already, by index; they stay there.

    Returns:
        The numbers of the cores of each process; none if `cores` is empty.

    Example:
        >>> pack([1, 0.5, 0.25, 0.25], [0, 1])
        [(0,), (1,), (1,), (1,)]
        >>> pack([0.5, 1.5], [4, 5])
        [(5,), (4, 5)]
    """
    room = dict.fromkeys(cores, 1.0)
    result: list[tuple[int, ...]] = [()] * len(shares)
    for index in sorted(range(len(shares)), key=lambda i: (i not in placed, -shares[i])):
        left = shares[index]
        fitting = [core for core in cores if room[core] >= left - 1e-9]
        if index in placed:
            chosen = list(placed[index])
        elif fitting:
            chosen = [min(fitting, key=lambda core: room[core])]
        else:
            chosen = []
            for core in sorted(cores, key=lambda core: -room[core]):
                if sum(room[c] for c in chosen) < left - 1e-9:
                    chosen.append(core)
        for core in chosen:
            taken = min(left, room[core])
            room[core] -= taken
            left -= taken
        result[index] = tuple(sorted(chosen))
    return result


class Confinement(NamedTuple):
    """The cores and the controller group of a process; `enter.py` takes them."""

    cores: tuple[int, ...] = ()
    group: str = ""  # the file that takes the process into its group


class NoShares:
    """Every process may use the whole machine."""

    description = "no CPU shares: every worker may use the whole machine"

    groups: Sequence[str] = ()
    """Paths of control groups, for the guardian."""

    def confinement(self, index: int) -> Confinement:
        """To which cores and which group process `index` is confined."""
        return Confinement()

    def started(self, index: int, pid: int) -> None:
        """Tells that process `index` runs, as the leader of its process group."""

    def ended(self, index: int) -> None:
        """Tells that process `index` has ended."""

    def stops(self, index: int) -> bool:
        """Whether process `index` is stopped and continued as a matter of course."""
        return False

    def give(self, index: int, share: float, taken: Collection[int]) -> None:
        """Holds process `index`, which comes beside those that are `taken`, to a share.

        Raises:
            ValueError: there are not so many cores, or no process is held to a share.
        """
        raise ValueError(f"--cpus={share:g}: this run was started without --cpus")

    def close(self) -> None:
        """Puts everything away; the processes have ended."""


class Shares(NoShares):
    """Each process has some cores.

    Args:
        shares: of each process, in cores.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares, self._cores = list(shares), pack(shares, available_cores())

    def confinement(self, index: int) -> Confinement:
        return Confinement(self._cores[index])

    def give(self, index: int, share: float, taken: Collection[int]) -> None:
        """As of the base, also for the next index; an index that is not taken has no share then."""
        new = [each if i in taken else 0.0 for i, each in enumerate(self._shares)]
        new[index : index + 1] = [share]
        empty = set(range(len(new))) - {*taken, index}
        check_shares(new, len(available_cores()) or os.cpu_count() or 1, empty)
        others = {i: own for i, own in enumerate(self._cores) if i in taken and i != index}
        self._shares, self._cores = new, pack(new, available_cores(), placed=others)


class ControllerGroups(Shares):
    """Each process in a CPU controller group of its own."""

    def __init__(self, shares: Sequence[float], directory: pathlib.Path, version: int):
        super().__init__(shares)
        self._name = directory / f"hetjax-{os.getpid()}-{secrets.token_hex(4)}"
        self._version = version
        self.groups: list[str] = []
        how = f"CPU controller groups (version {version}) on cores {_text(self._cores)}"
        self.description = f"CPU shares {_text(shares)} by {how}"
        try:
            for index in range(len(shares)):
                self._limit(index)
            _try_to_join(self.groups[0])
        except OSError:
            self.close()
            raise

    def _limit(self, index: int) -> None:
        share = self._shares[index]
        period = round(max(_PERIOD_USECS, _MIN_QUOTA_USECS / share))
        path = self._name.with_name(f"{self._name.name}-{index}")
        if index == len(self.groups):
            path.mkdir()
            self.groups.append(str(path))
        if self._version == 1:
            (path / "cpu.cfs_period_us").write_text(str(period))
            (path / "cpu.cfs_quota_us").write_text(str(round(share * period)))
        else:
            (path / "cpu.max").write_text(f"{round(share * period)} {period}")

    def give(self, index: int, share: float, taken: Collection[int]) -> None:
        super().give(index, share, taken)
        self._limit(index)

    def confinement(self, index: int) -> Confinement:
        return Confinement(self._cores[index], f"{self.groups[index]}/cgroup.procs")

    def ended(self, index: int) -> None:
        # Processes that left their process group are still in this one.
        guardian.end_control_group(self.groups[index])

    def close(self) -> None:
        for path in self.groups:
            guardian.remove_control_group(path)


class DutyCycle(Shares):
    """Stops each process when it has used more than its share; continues it when it may go on.

    What counts is the processor time that all threads of the process really used. Processes that it
    starts are stopped with it, but their time is not counted.
    """

    def __init__(self, shares: Sequence[float], why: str = ""):
        super().__init__(shares)
        self._lock = threading.Lock()
        self._running: dict[int, _Spent] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._cycle, name="duty cycle", daemon=True)
        self._thread.start()
        reason = f" (no CPU controller group: {why})" if why else ""
        how = f"affinity to cores {_text(self._cores)} and duty cycle{reason}"
        self.description = f"CPU shares {_text(shares)} by {how}"

    def started(self, index: int, pid: int) -> None:
        if self.stops(index):
            with self._lock:
                self._running[index] = _Spent(pid, self._shares[index])

    def ended(self, index: int) -> None:
        with self._lock:
            self._running.pop(index, None)

    def stops(self, index: int) -> bool:
        # Affinity alone holds a process to whole cores.
        return self._shares[index] < (len(self._cores[index]) or float("inf"))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _cycle(self) -> None:
        while not self._closed.wait(_TICK_SECS):
            with self._lock:  # no signal to a process that has been reported as ended
                for spent in self._running.values():
                    spent.tick()
        with self._lock:
            for spent in self._running.values():
                spent.go_on()


class _Spent:
    """The account of one process: seconds that it may still use."""

    def __init__(self, pid: int, share: float):
        self._pid, self._share = pid, share
        self._saved = 0.0
        self._stopped = False
        self._time, self._used = time.monotonic(), 0.0
        self._used = self._cpu_secs()

    def tick(self) -> None:
        now, used = time.monotonic(), self._cpu_secs()
        self._saved += self._share * (now - self._time) - (used - self._used)
        self._saved = min(self._saved, self._share * _SAVED_SECS)
        self._time, self._used = now, used
        if self._saved <= 0 and not self._stopped:
            self._stopped = True
            self._send(signal.SIGSTOP)
        elif self._saved > 0:
            # This also continues what others stopped: SIGSTOP from elsewhere is not for long.
            self.go_on()

    def go_on(self) -> None:
        self._stopped = False
        self._send(signal.SIGCONT)

    def _send(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signum)

    def _cpu_secs(self) -> float:
        try:
            # Linux: the clock of another process's processor time (clock_getcpuclockid(3)).
            return time.clock_gettime((~self._pid << 3) | 2)
        except OSError:
            if sys.platform == "linux":  # the process has ended
                return 0.0
            # Elsewhere: as if it used one core whenever it may.
            return self._used + (0.0 if self._stopped else time.monotonic() - self._time)


def hold(shares: Sequence[float]) -> NoShares:
    """Prepares to hold processes to their shares, by the best method that works here.

    Args:
        shares: of each process, in cores; `check_shares` accepts them. Empty: no process is held.

    Returns:
        An object that gives each process's `confinement`. Tell it when a process has started and
        ended, and close it at the end. Its `description` says which method it is.
    """
    if not shares:
        return NoShares()
    try:
        own = pathlib.Path("/proc/self")
        files = (own / "mountinfo").read_text(), (own / "cgroup").read_text()
        return ControllerGroups(shares, *find_controller(*files))
    except OSError as error:
        return DutyCycle(shares, why=error.strerror or str(error))


def find_controller(mountinfo: str, own_groups: str) -> tuple[pathlib.Path, int]:
    """Where groups with a CPU limit can be made.

    Args:
        mountinfo: content of /proc/self/mountinfo.
        own_groups: content of /proc/self/cgroup.

    Returns:
        A directory, and the version of the control groups there, 1 or 2.

    Raises:
        OSError: nowhere.

    Example:
        >>> mounts = "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
        >>> print(*find_controller(mounts, "4:cpu,cpuacct:/user"))
        /sys/fs/cgroup/cpu/user 1
    """
    own = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    unified = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            return _below(mount, root, own["cpu"]), 1
        if kind == "cgroup2" and "" in own:
            unified = mount, _below(mount, root, own[""])
    if unified is not None:
        mount, group = unified
        # Version 2 has processes in its leaves alone, so groups go beside the own one, not below.
        for directory in (group, group.parent) if str(group) != mount else (group,):
            with contextlib.suppress(OSError):
                if "cpu" in (directory / "cgroup.subtree_control").read_text().split():
                    return directory, 2
    raise OSError("no CPU controller is mounted where this process may have groups")


def _below(mount: str, root: str, group: str) -> pathlib.Path:
    """The directory of a group, also in a container, which sees its part of the tree as all."""
    if root != "/":
        group = group.removeprefix(root) if group.startswith(root) else "/"
    return pathlib.Path(mount) / group.lstrip("/")


def _try_to_join(group: str) -> None:
    """Raises OSError if a group that could be made lets no process in."""
    code = "import sys; open(sys.argv[1], 'w').write('0')"
    command = [sys.executable, "-I", "-S", "-c", code, f"{group}/cgroup.procs"]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        raise PermissionError(1, "a process may not join the group that was made for it")


def _text(values: Sequence) -> str:
    return ", ".join(
        "+".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" for value in values
    )
