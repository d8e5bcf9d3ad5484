"""How the processes of a run meet: who is there, a short message to all, sums, rows to neighbours.

There are three ways. `Collectives` are those of one runtime (Gloo, NCCL, ICI). `OneMachine` has a
Unix socket between every two processes and adds up in memory that all of them have mapped. So do
the processes of each of `SeveralMachines`, which use the runtime's collectives for the rest. No
other module asks which of them it is. In all, a worker's row of the parameters goes to its
neighbours by the runtime's collectives, inside the sync program (`topology/reducers.py`).
"""

import collections

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import debugging, types
from hetjax import mesh as mesh_lib
from hetjax.processes import board as board_lib
from hetjax.processes import exchange, join, shared_sums, waits

_PATIENCE_SECS = 600.0

NO_COLLECTIVES = "processes of this run share a GPU, and JAX has no collectives for such. "


class Meeting:
    """A process that is alone and has all workers. It tells nobody, and sums in the sync program.

    Args:
        num_workers: W.
    """

    alone = True
    """Whether this process has all workers."""

    across = False
    """Whether sums that meet before the sync program wait for other machines, too."""

    shares_gpu = False
    """Whether processes share a GPU: NCCL then has no collectives, and only one plain sum meets."""

    keeps_memory = False
    """Whether malloc keeps freed memory: `mesh.use_cpu_workers` or the launcher has told it."""

    def __init__(self, num_workers: int) -> None:
        self.process_of = np.zeros(num_workers, int)
        """i64[W]: the process of each worker."""

    def tell(self, messages: np.ndarray) -> np.ndarray:
        """Returns the messages of all workers, [W], given those of this process's workers, [w].

        Args:
            messages: an array of a structured type that is the same in all processes.

        Raises:
            LostProcessError: a process has ended.
        """
        return messages

    def sums(self, like: types.PyTree) -> shared_sums.Sums:
        """How the contributions of a round are added up; the same answer in all processes.

        Args:
            like: a pytree of the shapes and types of what a worker contributes.
        """
        del like
        return shared_sums.Sums()

    def close(self) -> None:
        """Ends the connections to other processes."""


class Collectives(Meeting):
    """Processes of one runtime, on any machines."""

    alone = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        gather = jax.jit(lambda rows: rows, out_shardings=mesh_lib.everywhere(mesh))
        self._gather = debugging.compiled(gather)
        self.process_of = np.array([device.process_index for device in mesh.devices])
        self._come_together()

    def all_have(self, has: bool) -> bool:
        """Whether all processes call this with True."""
        return bool(self.tell(np.full(len(mesh_lib.own_workers(self._mesh)), has)).all())

    def _come_together(self) -> None:
        """Makes the connections of the collectives, where Gloo does.

        It gives up (JAX 0.10.2) where a process is 30 s later than another, as it may be that
        compiles. So they wait for each other first.
        """
        if self._mesh.devices[0].platform != "cpu":
            return
        board = board_lib.Board("connections")
        board.post(f"{jax.process_index()}", True)
        for process in range(jax.process_count()):
            what = "come to the first collective"
            board.wait(f"{process}", _PATIENCE_SECS, what=what, by=process)
        Collectives.tell(self, np.zeros(len(mesh_lib.own_workers(self._mesh)), bool))

    def tell(self, messages: np.ndarray) -> np.ndarray:
        rows = messages.view(np.int8).reshape(len(messages), -1)
        workers = mesh_lib.own_workers(self._mesh)
        parts = [
            jax.device_put(row[None], self._mesh.devices[worker])
            for row, worker in zip(rows, workers, strict=True)
        ]
        with waits.Wait("end the round"):
            gathered = np.asarray(self._gather(mesh_lib.join_rows(parts, self._mesh)))
        return np.ascontiguousarray(gathered).view(messages.dtype)[:, 0]


class OneMachine(Collectives):
    """Processes of one machine, whichever engine has started them."""

    keeps_memory = True

    def __init__(self, mesh: Mesh, sockets: exchange.Exchange) -> None:
        super().__init__(mesh)
        self._sockets = sockets
        self._most_workers = max(collections.Counter(self.process_of.tolist()).values())
        self.shares_gpu = shared_sums.share_gpus(mesh, sockets)

    def tell(self, messages: np.ndarray) -> np.ndarray:
        if self._most_workers * messages.itemsize > exchange.MOST_BYTES:
            return super().tell(messages)
        return np.frombuffer(b"".join(self._sockets(messages.tobytes())), messages.dtype)

    def sums(self, like: types.PyTree) -> shared_sums.Sums:
        if self._mesh.devices[0].platform == "cpu" or self.shares_gpu:
            return shared_sums.make(self._mesh, like, self._sockets)
        return shared_sums.Sums()

    def close(self) -> None:
        self._sockets.close()


class SeveralMachines(Collectives):
    """Processes of several machines: what one contributes to the sums crosses the network once.

    Args:
        mesh: the worker mesh.
        sockets: between the processes of this machine, if there may be any.
        firsts: the first process of each machine.
    """

    across = keeps_memory = True

    def __init__(self, mesh: Mesh, sockets: exchange.Exchange | None, firsts: list[int]) -> None:
        super().__init__(mesh)
        self._sockets, self._firsts = sockets, firsts
        self._all_have_sockets = self.all_have(sockets is not None)

    def sums(self, like: types.PyTree) -> shared_sums.Sums:
        if self._sockets is None or not self._all_have_sockets:
            return shared_sums.Sums()
        across = shared_sums.Across(self._mesh, self._firsts)
        return shared_sums.make(
            self._mesh, like, self._sockets, all_have=self.all_have, across=across
        )

    def close(self) -> None:
        if self._sockets is not None:
            self._sockets.close()


def make(mesh: Mesh | None, num_workers: int) -> Meeting:
    """How the processes of this run meet; the same answer in all of them.

    Args:
        mesh: the worker mesh; None for the array form, which has one process.
        num_workers: W.
    """
    if mesh is None or len(mesh_lib.own_workers(mesh)) == mesh.size:
        return Meeting(num_workers)
    machines, own = join.machines(), jax.process_index()
    processes = next((some for some in machines if own in some), [])
    on_cpu = mesh.devices[0].platform == "cpu"
    if not processes or (len(machines) > 1 and (max(map(len, machines)) == 1 or not on_cpu)):
        return Collectives(mesh)
    sockets = exchange.connect(own, processes, board_lib.Board("sockets"))
    if len(machines) > 1:
        return SeveralMachines(mesh, sockets, [some[0] for some in machines])
    return Collectives(mesh) if sockets is None else OneMachine(mesh, sockets)
