"""Adds up what the workers contribute in memory that the processes of one machine share.

Sums through sockets, as in a cluster, cost every process much of its processor time, and the round
waits for the process with the least. So every process copies its own contribution into a file that
all have mapped, before the gathering at the end of the local phase (`gathering.py`). Afterwards the
process whose time is the cheapest adds them up there, in the order of the workers. Rounds use two
places of the file in turn, so a process that is ahead overwrites nothing.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import memory, types
from hetjax import mesh as mesh_lib
from hetjax.processes import exchange

_MOST_BYTES = 1 << 30  # of the file: larger sums are left to the sockets
_BLOCK = 1 << 15  # numbers that are added up at a time, in the cache
_ALIGNED = 64  # bytes; JAX copies what is not aligned so
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Sums:
    """Leaves the sums to the collectives of the sync phase."""

    meet_before = False
    """Whether the sums are complete when the sync phase begins, which then waits for nobody."""

    totals: Callable | None = None
    """`(contributed, metrics) -> (sums, weight)`, traceable: what the sync phase makes of the
    result of `total`. None: the sync phase sums by itself."""

    def post(self, contributed: types.Contribution) -> None:
        """Puts up what this process's workers contributed: their rows of leaves `[W, ...]`."""

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        """What the sync phase takes of the contributions; call it when all have posted.

        Args:
            contributed: what was posted.
            host_secs: f64[W], what each worker's process needed between its last two local phases.
        """
        del host_secs
        return contributed


class SharedSums(Sums):
    """The sums by way of the file, as one process has it; see above.

    Args:
        file: open in this process, of `new_file`. It is closed here.
        mesh: the worker mesh.
        like: a pytree of the shapes of what a worker contributes; all of one type.
        sockets: to the other processes.
    """

    meet_before = True

    def __init__(
        self, file: int, mesh: Mesh, like: types.PyTree, sockets: exchange.Exchange
    ) -> None:
        self._mesh, self._like, self._sockets = mesh, like, sockets
        self._workers = mesh_lib.own_workers(mesh)
        (dtype,) = {leaf.dtype for leaf in jax.tree.leaves(like)}
        size = sum(leaf.size for leaf in jax.tree.leaves(like))
        try:
            mapped = mmap.mmap(file, _num_bytes(like, mesh.size))
        finally:
            os.close(file)
        # For each of two rounds: the workers' rows, and behind them the total.
        places = np.frombuffer(mapped, dtype).reshape(2, mesh.size + 1, -1)[:, :, :size]
        self._rounds = [(place[:-1], place[-1]) for place in places]

    def post(self, contributed: types.Contribution) -> None:
        self._rounds.reverse()
        rows = mesh_lib.worker_rows(contributed.sums)
        for worker, row in zip(self._workers, rows, strict=True):
            start = 0
            for leaf in jax.tree.leaves(row):
                part = self._rounds[0][0][worker, start : start + leaf.size]
                np.copyto(part, np.asarray(leaf).reshape(-1))
                start += leaf.size

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        """With `sums` `[W, P]`: each worker has the total, its leaves one after the other.

        JAX reads it where it lies, in the file. The process that needed the least time between its
        last two local phases adds up, since its time is the cheapest. While that is not known (all
        `host_secs` are 0), process 0 does. The others wait for it.

        Raises:
            LostProcessError: a process has ended.
        """
        rows, total = self._rounds[0]
        process = self._mesh.devices[int(np.argmin(host_secs))].process_index
        if process == jax.process_index():
            add_up(rows, total)
        self._sockets.follow(process)
        devices = [self._mesh.devices[worker] for worker in self._workers]
        parts = [jax.device_put(total[None], device) for device in devices]
        return contributed._replace(sums=mesh_lib.join_rows(parts, self._mesh))

    def totals(
        self, contributed: types.Contribution, metrics: types.SyncMetrics
    ) -> tuple[types.PyTree, jax.Array]:
        leaves, start = [], 0
        for leaf in jax.tree.leaves(self._like):
            leaves.append(contributed.sums[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves), metrics.weight_sum


def _are_to_meet(mesh: Mesh, sockets: exchange.Exchange) -> bool:
    """Whether there are no better ways: NCCL refuses collectives of processes that share a GPU."""
    devices = [mesh.devices[worker] for worker in mesh_lib.own_workers(mesh)]
    if devices[0].platform != "gpu":
        return devices[0].platform == "cpu"
    own = names_of_gpus([device.local_hardware_id for device in devices], os.environ)
    told = b",".join(sockets(",".join(own).encode())).split(b",")
    return len(set(told)) < len(told)


def names_of_gpus(ordinals: Sequence[int], environment: Mapping[str, str]) -> list[str]:
    """What GPUs are called on their machine, of their numbers among those that are visible.

    Example:
        >>> names_of_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": "3,1"})
        ['3', '1']
    """
    shown = next((environment[name] for name in _VISIBLE if environment.get(name)), "")
    names = dict(enumerate(name.strip() for name in shown.split(","))) if shown else {}
    return [names.get(ordinal, str(ordinal)) for ordinal in ordinals]


def add_up(rows: np.ndarray, total: np.ndarray) -> None:
    """Makes `total` the sum of `[W, size]` over W, one worker's row after the other."""
    for start in range(0, total.size, _BLOCK):
        part, block = total[start : start + _BLOCK], rows[:, start : start + _BLOCK]
        np.copyto(part, block[0])
        for row in block[1:]:
            part += row


def _num_bytes(like: types.PyTree, num_workers: int) -> int:
    row = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    return 2 * (num_workers + 1) * -(-row // _ALIGNED) * _ALIGNED if row else 0


def new_file(num_bytes: int) -> int | None:
    """A file in memory that has no name, so that nothing of it stays; None: there is no room.

    It does not lie in `/dev/shm`, which is small in many containers.
    """
    free = memory.free_bytes()  # more would not fail: the system would kill a process
    if not hasattr(os, "memfd_create") or (free is not None and num_bytes > free // 2):
        return None
    file = os.memfd_create("hetjax-sums")
    try:
        os.posix_fallocate(file, 0, num_bytes)  # without it, no room would be SIGBUS later
    except OSError:
        os.close(file)
        return None
    return file


def make(mesh: Mesh, like: types.PyTree, sockets: exchange.Exchange) -> Sums:
    """Shared sums in memory that the process of worker 0 hands out to the others.

    If there is no room for it, or each process has GPUs or TPUs of its own, the sums are left to
    the collectives. All processes come to the same answer.

    Args:
        mesh: the worker mesh, of several processes of one machine.
        like: a pytree of the shapes and types of what a worker contributes.
        sockets: between them.

    Raises:
        LostProcessError: a process has ended.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(like)}
    num_bytes = _num_bytes(like, mesh.size)
    if (
        not _are_to_meet(mesh, sockets)
        or len(dtypes) > 1
        or not dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}
        or not 0 < num_bytes <= _MOST_BYTES
    ):
        return Sums()
    first = mesh.devices[0].process_index
    if jax.process_index() == first:
        file = new_file(num_bytes)
        sockets.hand_out(file)
    else:
        file = sockets.take(first)
    return Sums() if file is None else SharedSums(file, mesh, like, sockets)
