"""The ways in which the processes of a run communicate, and which of them it is.

`Collectives` are those of one runtime (Gloo, NCCL, ICI). The processes of `Machines` have a Unix
socket between every two of a machine and add up in memory that all of them have mapped. Several
machines use the runtime's collectives for the rest. In a run apart a referee decides (`elastic`).
"""

import collections
import functools
import json
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import executor, types, wires
from hetjax import mesh as mesh_lib
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import elastic, gpus, join, runtime, shared_sums, socket_allgather
from hetjax.comm import key_value_store as store_lib
from hetjax.liveness import blocking_waits


class Collectives(communicator_lib.Communicator):
    """Processes of one runtime, on any machines."""

    alone = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        gather = jax.jit(lambda rows: rows, out_shardings=mesh_lib.everywhere(mesh))
        self._gather = executor.compiled(gather)
        self.process_of = np.array([d.process_index for d in mesh_lib.worker_devices(mesh)])
        self._come_together()

    def _come_together(self) -> None:
        """Makes the connections of the collectives, where Gloo does.

        It gives up (JAX 0.10.2) where a process is 30 s later than another, as it may be that
        compiles. So they wait for each other first.
        """
        if self._mesh.devices.flat[0].platform != "cpu":
            return
        board, processes = store_lib.KeyValueStore("connections"), range(jax.process_count())
        board.gather(jax.process_index(), True, processes, what="come to the first collective")
        Collectives.allgather(self, np.zeros(len(mesh_lib.own_workers(self._mesh)), bool))

    def close(self) -> None:
        """Waits until process 0 has written all that the run leaves, however long that takes."""
        board = store_lib.KeyValueStore("written")
        if runtime.current().is_first:
            board.post("all", True)
        board.wait("all", float("inf"), what="write what the run leaves")

    def allgather(self, messages: np.ndarray) -> np.ndarray:
        rows = messages.view(np.int8).reshape(len(messages), -1)
        pairs = zip(rows, mesh_lib.own_workers(self._mesh), strict=True)
        parts = [jax.device_put(row[None], mesh_lib.row_place(self._mesh, w)) for row, w in pairs]
        with blocking_waits.Wait("end the round"):
            gathered = np.asarray(self._gather(mesh_lib.join_rows(parts, self._mesh)))
        return np.ascontiguousarray(gathered).view(messages.dtype)[:, 0]


class Machines(Collectives):
    """Processes of machines that have several; what a machine contributes crosses the network once.

    Args:
        mesh: the worker mesh.
        sockets: between the processes of this machine, if there may be any.
        firsts: the first process of each machine.
    """

    keeps_memory = True

    def __init__(
        self, mesh: Mesh, sockets: socket_allgather.SocketAllGather | None, firsts: list[int]
    ) -> None:
        super().__init__(mesh)
        self._sockets, self._firsts = sockets, firsts
        self._most_workers = max(collections.Counter(self.process_of.tolist()).values())
        self.across = len(firsts) > 1
        self._shares = self._all_machines_have(sockets is not None)
        self.has_collectives = sockets is None or not share_gpus(mesh, sockets)

    def _all_machines_have(self, has: bool) -> bool:
        """Whether all processes call this with True; those of one machine call it alike."""
        if not self.across:
            return has
        own = np.full(len(mesh_lib.own_workers(self._mesh)), has)
        return bool(super().allgather(own).all())

    def allgather(self, messages: np.ndarray) -> np.ndarray:
        is_long = self._most_workers * messages.itemsize > socket_allgather.MOST_BYTES
        if self.across or is_long or self._sockets is None:
            return super().allgather(messages)
        return np.frombuffer(b"".join(self._sockets(messages.tobytes())), messages.dtype)

    def sums(
        self, like: types.PyTree, wire: str = wires.FLOAT32, layout: mesh_lib.Layout | None = None
    ) -> communicator_lib.Sums:
        on_host = self._mesh.devices.flat[0].platform == "cpu" or not self.has_collectives
        if not (self._shares and self._sockets and on_host):
            return communicator_lib.Sums()
        file = shared_sums.file_of_machine(self._mesh, like, self._sockets)
        if self._all_machines_have(file is not None) and file is not None:
            across = across_machines(self._mesh, self._firsts) if self.across else None
            sockets = self._sockets
            return shared_sums.SharedSums(file, self._mesh, like, layout, sockets, across)
        if file is not None:
            os.close(file)
        return communicator_lib.Sums()

    def close(self) -> None:
        super().close()
        if self._sockets is not None:
            self._sockets.close()


def across_machines(mesh: Mesh, processes: Sequence[int]) -> Callable[[np.ndarray], None]:
    """Makes a vector the sum of those of all machines, in place, over the network.

    Args:
        mesh: the worker mesh.
        processes: one of each machine; they alone call it.
    """
    of_process = {device.process_index: device for device in mesh.devices.flat[::-1]}
    of_machines = mesh_lib.mesh_of([of_process[process] for process in processes])
    rows = P(mesh_lib.WORKER_AXIS)
    add = functools.partial(jax.lax.psum, axis_name=mesh_lib.WORKER_AXIS)
    program = jax.jit(jax.shard_map(add, mesh=of_machines, in_specs=rows, out_specs=rows))
    add_rows = executor.compiled(program)

    def add_up(total: np.ndarray) -> None:
        (own,) = mesh_lib.own_workers(of_machines)
        part = jax.device_put(total[None], of_machines.devices[own])
        with blocking_waits.Wait("add up the sums of all machines"):
            found = add_rows(mesh_lib.join_rows([part], of_machines))
            np.copyto(total, np.asarray(found.addressable_data(0))[0])

    return add_up


def share_gpus(mesh: Mesh, sockets: socket_allgather.SocketAllGather) -> bool:
    """Whether processes of this machine share a GPU; the same answer in all of them."""
    devices = mesh.local_devices
    if devices[0].platform != "gpu":
        return False
    own = gpus.used([device.local_hardware_id for device in devices])
    return gpus.shared([gpus.Used(*json.loads(told)) for told in sockets(json.dumps(own).encode())])


def make(mesh: Mesh | None, num_workers: int) -> communicator_lib.Communicator:
    """How the processes of this run meet; the same answer in all of them.

    Args:
        mesh: the worker mesh; None for the array form, which has one process.
        num_workers: W.
    """
    if mesh is not None and (membership := runtime.current().membership) is not None:
        return elastic.Elastic(membership, mesh)
    if mesh is None or len(mesh_lib.own_workers(mesh)) == num_workers:
        return communicator_lib.Communicator(num_workers)
    machines, processes, own = join.machines(), join.own_machine(), jax.process_index()
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not processes or (len(machines) > 1 and (max(map(len, machines)) == 1 or not on_cpu)):
        return Collectives(mesh)
    sockets = socket_allgather.connect(own, processes, store_lib.KeyValueStore("sockets"))
    if len(machines) == 1 and sockets is None:
        return Collectives(mesh)
    return Machines(mesh, sockets, [some[0] for some in machines])
