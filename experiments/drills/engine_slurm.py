"""A Slurm of several nodes on this machine, in a directory of its own, for as long as it is needed.

It needs no munge, no database, and no change of the machine: its ports are free when it starts,
and its nodes have names that resolve everywhere, numbers in hexadecimal, which all are this one.
JAX makes the coordinator's port of a job's id, so two of them on one machine begin at other ids.
"""

import getpass
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

from hetjax.comm import join

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
CPUS = 4  # of a node, whatever the machine has
_PATIENCE_SECS = 60.0
_KEPT = """\
ClusterName=hetjax
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A controller and its nodes, as a context that ends them with all their jobs.

    Args:
        directory: gets the configuration, the state and the logs.
        num_nodes: each with four cores, whatever the machine has.

    Raises:
        RuntimeError: the nodes were not ready in time; with what the daemons said.
    """

    def __init__(self, directory: pathlib.Path, num_nodes: int = 2) -> None:
        self._directory, self._daemons = directory, list[subprocess.Popen[bytes]]()
        self._names = [f"0x7f00{number:04x}" for number in range(1, num_nodes + 1)]
        self._configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._configuration)}
        """Of commands such as `srun`."""

    def __enter__(self) -> "Slurm":
        directory, host = self._directory, socket.gethostname().partition(".")[0]
        (directory / "state").mkdir(parents=True)
        user, names = getpass.getuser(), ",".join(self._names)
        text = _KEPT.format(host=host, port=_port(), user=user, directory=directory, names=names)
        for name in self._names:
            (directory / f"spool-{name}").mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 "
            text += f"Port={_port()} CPUs={CPUS} RealMemory=1000\n"
        self._configuration.write_text(text)
        try:
            self._start("slurmctld")
            for name in self._names:
                self._start("slurmd", "-N", name)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._daemons and self._daemons[0].poll() is None:
            self._cancel_all()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self._left():  # what watched over a step
            os.kill(pid, signal.SIGKILL)

    def submit(
        self, script: pathlib.Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> str:
        """Gives a batch script to Slurm; it runs beside itself, with its log `slurm-ID.out`.

        Args:
            script: to run, in its directory.
            *options: of `sbatch`.
            environment: of the job, with that of Slurm's commands; None: that alone.

        Returns:
            The job's id.
        """
        options = ("--parsable", f"--chdir={script.parent}", *options, str(script))
        return self.ask("sbatch", *options, environment=environment).strip()

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What one of Slurm's commands prints."""
        return subprocess.run(
            command,
            env=environment or self.environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_PATIENCE_SECS,
        ).stdout

    def field(self, job: str, name: str) -> str:
        """Of what Slurm tells about a job: `JobState`, `ExitCode`, `Restarts`."""
        found = re.search(rf"\b{name}=(\S+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def end_of(self, job: str, secs: float = 1800.0) -> str:
        """Waits for the end of a job; how it ended: `COMPLETED`, `FAILED`, `CANCELLED`.

        Raises:
            TimeoutError: it does not end.
        """
        ends = time.monotonic() + secs
        while (state := self.field(job, "JobState")) in (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
            "REQUEUED",
        ):
            if time.monotonic() > ends:
                raise TimeoutError(f"job {job} is {state} after {secs:g} s")
            time.sleep(0.2)
        return state

    def _start(self, program: str, *options: str) -> None:
        with (self._directory / f"{''.join((program, *options))}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, "-D", "-f", str(self._configuration), *options],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C at the terminal is not for them
                )
            )

    def _wait_for_nodes(self) -> None:
        ends, idle = time.monotonic() + _PATIENCE_SECS, 0
        while idle < len(self._names):
            asked = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"],
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            idle = asked.stdout.split().count("idle")
            if time.monotonic() > ends or any(d.poll() is not None for d in self._daemons):
                logs = "".join(path.read_text() for path in self._directory.glob("*.log"))
                raise RuntimeError(f"Slurm's nodes are not ready: {asked.stdout}\n{logs[-3000:]}")
            time.sleep(0.2)

    def _cancel_all(self) -> None:
        """Kills all jobs, and waits until their processes are gone."""
        ends = time.monotonic() + _PATIENCE_SECS
        while (jobs := self.ask("squeue", "--noheader", "--format=%A").split()) and (
            time.monotonic() < ends
        ):
            for how in (("--signal=KILL", "--full"), ()):  # what runs, and what waits
                subprocess.run(
                    ["scancel", *how, *jobs],
                    env=self.environment,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
            time.sleep(0.5)

    def _left(self) -> Iterator[int]:
        """Processes of Slurm's that know this configuration."""
        mark = f"SLURM_CONF={self._configuration}".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                is_own = mark in (path / "environ").read_bytes().split(b"\0")
                name = (path / "comm").read_text().strip()
            except OSError:
                continue
            if is_own and name.startswith("slurm"):
                yield int(path.name)


def _port() -> int:
    return join.find_port("127.0.0.1")
