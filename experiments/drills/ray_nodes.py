"""Clusters of Ray on this machine, whose nodes can be lost, drained, stopped or cut off.

`Nodes` are processes alone; of `NetworkNodes` each has a network namespace, joined by a bridge.
`isolated` runs a function in a new process in a namespace of its own, where the bridge is, Ray's
head and the driver. A link can be cut, and has a token bucket at both ends if it has a rate. All is
gone when the processes have ended, which read from a pipe. It needs root, and Linux.
"""

import concurrent.futures
import contextlib
import ctypes
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.drills import ray_ends

VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "RAY_worker_niceness": "0",  # as joined processes have it
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
_STORE_BYTES = 400 << 20
_DRAIN_SECS = 30.0
_NEW_NETWORK = 0x40000000  # of Linux's unshare
_HEAD = "10.77.0.1"


def missing() -> str:
    """Why this machine cannot have them; "" if it can."""
    if lacking := [name for name in ("ip", "tc", "unshare", "nsenter") if not shutil.which(name)]:
        return f"there is no {', '.join(lacking)} here; Debian has them in iproute2, util-linux"
    return "network namespaces need root" if os.geteuid() else ""


def isolated(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process in a network namespace of its own.

    Args:
        function: of a module, with the same flags as here.
        args: of it.
    """
    if why := missing():
        sys.exit(why)
    spawn = multiprocessing.get_context("spawn")
    options: dict[str, Any] = {"initializer": _enter, "initargs": (sys.argv,)}
    with concurrent.futures.ProcessPoolExecutor(1, spawn, **options) as pool:
        return pool.submit(function, *args).result()


def _enter(argv: list[str]) -> None:
    from ray import cloudpickle

    flags.FLAGS(argv)
    cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])  # no worker can import it
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace")
    for command in (
        "ip link set lo up",
        "ip link add bridge type bridge",
        f"ip address add {_HEAD}/24 dev bridge",
        "ip link set bridge up",
    ):
        _do(command)


def _do(command: str, *inside: str) -> None:
    subprocess.run([*inside, *command.split()], check=True, capture_output=True)


class Nodes:
    """A cluster of Ray on this machine: a head, and a node for each worker.

    Args:
        count: of workers.
        connects: this process to it; a process that is connected ends with the head.
        head: more of Ray's fields of it.
    """

    def __init__(self, count: int = 4, *, connects: bool = True, **head: Any) -> None:
        import ray
        from ray import cluster_utils

        head |= {"num_cpus": 1, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._nodes: dict[int, Any] = {}
        self._stopped: dict[int, list[int]] = {}
        for number in range(count):
            self.add(number)
        if connects:
            ray.init(address=self.address, log_to_driver=False)

    @property
    def head_processes(self) -> list[int]:
        """Of the head: its server, and its raylet."""
        there = self._cluster.head_node.all_processes
        return [there[name][0].process.pid for name in ("gcs_server", "raylet")]

    def own(self) -> list[int]:
        """Of all nodes: what carries arrays."""
        return [self.head_processes[1], *map(self.raylet, self._nodes)]

    @property
    def logs(self) -> pathlib.Path:
        return pathlib.Path(self._cluster.head_node.get_session_dir_path(), "logs")

    def add(self, number: int) -> None:
        self._nodes[number] = self._cluster.add_node(
            num_cpus=1, resources={f"node{number}": 1}, object_store_memory=_STORE_BYTES
        )

    def lose(self, number: int) -> None:
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def drain(self, number: int) -> None:
        """As SIGTERM to `ray start --block` does it."""
        from ray.core.generated import autoscaler_pb2

        node = self._nodes[number]
        node.get_gcs_client().drain_node(
            node.node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            "the drill drains it",
            int(1e3 * (time.time() + _DRAIN_SECS)),
        )

    def silence(self, number: int) -> None:
        """Stops all processes of a node."""
        raylet = self.raylet(number)
        self._stopped[number] = [raylet, *ray_ends.children(raylet)]
        for pid in self._stopped[number]:
            os.kill(pid, signal.SIGSTOP)

    def wake(self, number: int) -> None:
        for pid in reversed(self._stopped.pop(number)):
            if ray_ends.parent(pid):
                os.kill(pid, signal.SIGCONT)

    def of(self, pid: int) -> int:
        """The node of a worker."""
        raylet = ray_ends.parent(pid)
        return next((number for number in self._nodes if self.raylet(number) == raylet), -1)

    def raylet(self, number: int) -> int:
        return self._nodes[number].all_processes["raylet"][0].process.pid

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class NetworkNodes(Nodes):
    """As `Nodes`; call it in `isolated`.

    Args:
        count: of workers.
        rate: of each link, each way, as `tc` has it, "1gbit"; "": not limited.
    """

    def __init__(self, count: int = 4, *, rate: str = "") -> None:
        self._rate, self._holders = rate, dict[int, Any]()
        lines = ["127.0.0.1 localhost", *(f"{address(k)} node{k}" for k in range(count))]
        self._directory = tempfile.TemporaryDirectory()
        self._hosts = pathlib.Path(self._directory.name, "hosts")
        self._hosts.write_text("\n".join([*lines, ""]))
        super().__init__(count, node_ip_address=_HEAD)

    def add(self, number: int) -> None:
        if number not in self._holders:
            self._link(number)
        resources = json.dumps({f"node{number}": 1})
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.address}"]
        ray += [f"--node-ip-address={address(number)}", "--num-cpus=1", "--block"]
        ray += [f"--resources={resources}", f"--object-store-memory={_STORE_BYTES}"]
        # Several begin at once, and in one directory Ray would give two the same names.
        ray.append(f"--temp-dir={self._directory.name}/{number}")
        log = self.logs / f"node{number}.start"
        with log.open("a") as file:
            own = {"start_new_session": True, "stdout": file, "stderr": file}
            self._nodes[number] = subprocess.Popen([*self.inside(number), *ray], **own)

    def lose(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._nodes[number].pid, signal.SIGKILL)
        self._nodes.pop(number).wait()
        for pid in self._processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def raylet(self, number: int) -> int:
        pids = self._processes(number)
        names = {pid: pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
        return next(pid for pid, name in names.items() if name == "raylet")

    def silence(self, number: int) -> None:
        """Cuts the link of a node."""
        _do(f"ip link set node{number} down")

    def wake(self, number: int) -> None:
        _do(f"ip link set node{number} up")

    def of(self, pid: int) -> int:
        return next((number for number in self._nodes if pid in self._processes(number)), -1)

    def close(self) -> None:
        for number in list(self._nodes):
            self.lose(number)
        super().close()
        for holder in self._holders.values():
            holder.communicate()  # closes the pipe, so it ends
        self._directory.cleanup()

    def _link(self, number: int) -> None:
        names = f"hostname node{number} && mount --bind {self._hosts} /etc/hosts"
        hold = ["unshare", "--net", "--mount", "--uts", "sh", "-c"]
        hold += [f"{names} && ip link set lo up && echo && exec cat"]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(hold, stdin=pipe, stdout=pipe, start_new_session=True)
        holder.stdout.readline()  # type: ignore[union-attr]
        self._holders[number] = holder
        peer, inside = f"peer name wire netns {holder.pid}", self.inside(number)
        _do(f"ip link add node{number} type veth {peer}")
        _do(f"ip link set node{number} master bridge up")
        _do(f"ip address add {address(number)}/24 dev wire", *inside)
        _do("ip link set wire up", *inside)
        if self._rate:
            bucket = f"root tbf rate {self._rate} burst 256kb latency 50ms"
            _do(f"tc qdisc replace dev node{number} {bucket}")
            _do(f"tc qdisc replace dev wire {bucket}", *inside)

    def inside(self, number: int) -> list[str]:
        """What a command on this node begins with."""
        of = f"/proc/{self._holders[number].pid}/ns"
        kinds = (f"--net={of}/net", f"--mount={of}/mnt", f"--uts={of}/uts")
        return ["nsenter", *kinds, f"--wdns={pathlib.Path.cwd()}", "--"]

    def _processes(self, number: int) -> list[int]:
        """All that run in a node's namespace, but who holds it."""
        holder, found = self._holders[number].pid, []
        own = os.readlink(f"/proc/{holder}/ns/net")
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns/net") == own and int(path.name) != holder:
                    found.append(int(path.name))
        return found


def address(number: int) -> str:
    return f"10.77.0.{number + 2}"
