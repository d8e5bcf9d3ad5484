"""Where the workers live: the worker axis, its mesh, and moving leaves onto and off it.

Every array of the training state has a leading axis `num_workers`, sharded over `WORKER_AXIS`. A
worker's row is its part along that axis. The mesh is made here and nowhere else.
"""

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax import types

WORKER_AXIS = "worker"

_SPARE_COPIES = 8  # copies of the parameters that rounds may need beyond those of the warm-up
_LEAST_SPARE_BYTES, _MOST_SPARE_BYTES = 1 << 25, 1 << 29

_MORE_DEVICES = (
    "Take no more workers than devices (cluster.num_workers). For a CPU device each, call "
    "hetjax.use_cpu_workers({n}) before JAX is used for the first time (where JAX finds a GPU, set "
    "JAX_PLATFORMS=cpu, too); or take local='virtual', which plays all workers on one device"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the workers of a run are."""

    mesh: Mesh | None  # None: what they share lies on the first device
    devices: list[jax.Device]  # of each worker
    own: list[int]  # the workers of this process
    leading: Callable[[], bool] | None = None  # where that changes: whether this process leads now

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.own[0] == 0 if self.leading is None else self.leading()

    @property
    def may_lead(self) -> bool:
        """Whether it leads, or may later."""
        return self.leads or self.leading is not None

    @property
    def num_rows(self) -> int:
        """Of the arrays of the training state: a row a worker, in a run apart one's own alone."""
        return len(self.devices) if self.mesh is None else self.mesh.size

    def rows(self, tree: types.PyTree) -> list[types.PyTree]:
        """The rows `[1, ...]` of this process's workers, each on its worker's device."""
        if self.mesh is not None:
            return worker_rows(tree)
        rows = _sliced(tree, len(self.devices))
        return [jax.device_put(row, device) for row, device in zip(rows, self.devices, strict=True)]

    @property
    def own_device(self) -> jax.Device:
        """Of this process's first worker."""
        return self.devices[self.own[0]]


def use_cpu_workers(num_workers: int) -> None:
    """Makes XLA's CPU backend show `num_workers` devices.

    Call it before anything uses a JAX device. It is harmless if an accelerator is the default
    backend: it sets the number of CPU devices alone. From then on the process keeps the memory that
    a program frees (glibc). Else each round of a large model would ask for its pages anew: with
    balanced orders a step of 5 million parameters took 59 ms, and takes 44.

    Args:
        num_workers: n, at least 1.

    Raises:
        ValueError: JAX has already started with fewer CPU devices.
    """
    _keep_freed_memory()
    try:
        if jax.config.jax_num_cpu_devices < num_workers:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", num_workers)
    except RuntimeError:
        if len(jax.devices("cpu")) < num_workers:
            raise ValueError(
                f"use_cpu_workers({num_workers}): JAX already runs with {len(jax.devices('cpu'))} "
                "CPU device(s); call it first (notebook: restart), or take local='virtual'"
            ) from None


def _keep_freed_memory() -> None:
    """Tells glibc's malloc to give no large block back to the system.

    Does nothing without glibc, or if the environment tells malloc what to do.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or "glibc.malloc" in tunables:
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)  # the most before 2.35


def touch_memory(copy_bytes: int) -> None:
    """Allocates a large block and frees it at once.

    The launcher has told malloc to keep freed memory, so the first rounds find it ready.

    Args:
        copy_bytes: of the parameters of this process's workers.
    """
    np.ones(min(max(_SPARE_COPIES * copy_bytes, _LEAST_SPARE_BYTES), _MOST_SPARE_BYTES), np.uint8)


def make_worker_mesh(num_workers: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """One device a worker, in rank order, on the mesh axis `WORKER_AXIS`.

    Args:
        num_workers: n, at least 1.
        devices: to take them from; by default all of the default backend.

    Returns:
        A mesh with one axis, `WORKER_AXIS`, of n devices.

    Raises:
        ValueError: there are fewer devices than workers.
    """
    if devices is None:  # the workers of a process follow each other
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    if num_workers < 1:
        raise ValueError(f"num_workers = {num_workers}: at least one worker is needed")
    if num_workers > len(devices):
        raise ValueError(
            f"num_workers = {num_workers}, but JAX has {len(devices)} "
            f"{devices[0].platform} device(s). {_MORE_DEVICES.format(n=num_workers)}"
        )
    if jax.process_count() > 1 and num_workers != len(devices):
        raise ValueError(
            f"num_workers = {num_workers}, but the {jax.process_count()} processes of this run "
            f"have {len(devices)} devices together; set cluster.num_workers={len(devices)}"
        )
    return mesh_of(devices[:num_workers])


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """These devices, in this order, on the mesh axis `WORKER_AXIS`."""
    return Mesh(np.asarray(devices), (WORKER_AXIS,), axis_types=(AxisType.Auto,))


def devices_of(platforms: Sequence[str], num_workers: int) -> list[jax.Device]:
    """The devices of several platforms as workers: all of the first ones, of the last the rest.

    What the workers share lies on the first device. No program spans two platforms.

    Raises:
        ValueError: a platform is not there, JAX has another default, the devices are not as many
            as the workers, or there are several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"cluster.platforms: got {tuple(platforms)} in one of {jax.process_count()} processes; "
            "start one"
        )
    of_each = [_devices_on(platform) for platform in platforms]
    devices = [device for some in of_each for device in some]
    if devices[0] != jax.devices()[0]:
        raise ValueError(
            f"cluster.platforms: got {tuple(platforms)}; name JAX's default, "
            f"{jax.default_backend()!r}, first"
        )
    least, most = len(devices) - len(of_each[-1]) + 1, len(devices)
    if not least <= num_workers <= most:
        raise ValueError(
            f"cluster.platforms: {tuple(platforms)} have {'+'.join(str(len(s)) for s in of_each)} "
            f"devices; cluster.num_workers={num_workers} must be from {least} to {most}"
        )
    return devices[:num_workers]


def num_devices(platforms: Sequence[str]) -> int:
    """How many workers there are, where nothing says it; () is the default platform."""
    return sum(len(_devices_on(name)) for name in platforms) if platforms else jax.device_count()


def _devices_on(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"cluster.platforms: got {platform!r}, which JAX has not here: "
            f"{str(error).splitlines()[0]}"
        ) from error


@functools.cache
def worker_sharding(mesh: Mesh | None) -> jax.sharding.Sharding:
    """Leading axis over the workers; without a mesh all rows on the first device."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, P(WORKER_AXIS))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, P())


def put_everywhere(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """On every device, as wide as JAX's numbers are; without a mesh on the first one."""
    array = array.astype(jnp.result_type(float))
    if mesh is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, everywhere(mesh), lambda index: array[index])


def add_worker_axis(tree: types.PyTree, num_workers: int) -> types.PyTree:
    """The same values for every worker: leaves `[...]` become `[num_workers, ...]`, on the host."""

    def broadcast(leaf: Any) -> Any:
        shape = (num_workers, *np.shape(leaf))
        if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jnp.broadcast_to(leaf, shape)  # random keys are no NumPy arrays
        return np.broadcast_to(np.asarray(leaf), shape)

    return jax.tree.map(broadcast, tree)


def own_workers(mesh: Mesh) -> list[int]:
    """The workers of this process, in order: all of them if there is one process."""
    own = jax.process_index()
    return [w for w, device in enumerate(mesh.devices) if device.process_index == own]


def place(tree: types.PyTree, mesh: Mesh | None) -> types.PyTree:
    """Puts leaves `[num_workers, ...]` on the mesh, a row a worker; each process puts its own.

    Without a mesh all rows go to the first device, and stay there. Else JAX would compile a
    program twice: for arrays that may be moved, and for those made of examples, which may not.
    """
    if mesh is None or len(own_workers(mesh)) == mesh.size:
        return jax.device_put(tree, worker_sharding(mesh))
    rows = [
        jax.device_put(jax.tree.map(lambda leaf, w=w: leaf[w : w + 1], tree), mesh.devices[w])
        for w in own_workers(mesh)
    ]
    return join_rows(rows, mesh)


def place_once(tree: types.PyTree, mesh: Mesh | None) -> types.PyTree:
    """Puts arrays that nothing changes on each of this process's devices; on CPUs, which have one
    memory, once. Without a mesh on the first device."""
    devices = jax.devices()[:1] if mesh is None else mesh.local_devices

    def on_all(leaf: Any) -> jax.Array:
        leaf = jax.device_put(leaf, devices[0])
        if mesh is None:
            return leaf
        is_plain = devices[0].platform == "cpu" and isinstance(leaf.dtype, np.dtype)
        given = np.asarray(leaf) if is_plain else leaf  # no copy, nor is one made of it
        rest = [jax.device_put(given, device, may_alias=True) for device in devices[1:]]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere(mesh), [leaf, *rest])

    return jax.tree.map(on_all, tree)


def copies(tree: types.PyTree, devices: Sequence[jax.Device]) -> list[types.PyTree]:
    """What `place_once` put on each device, where it lies; else a copy there."""

    def on(device: jax.Device, leaf: jax.Array) -> jax.Array:
        there = {shard.device: shard.data for shard in leaf.addressable_shards}
        return there[device] if device in there else jax.device_put(leaf, device)

    return [jax.tree.map(functools.partial(on, device), tree) for device in devices]


def worker_rows(tree: types.PyTree) -> list[types.PyTree]:
    """The rows `[1, ...]` of this process's workers, where they lie: no copy, no computation."""
    count = len(jax.tree.leaves(tree)[0].sharding.addressable_devices)
    return [jax.tree.map(lambda leaf, i=i: leaf.addressable_data(i), tree) for i in range(count)]


@functools.partial(jax.jit, static_argnums=1)
def _sliced(tree: types.PyTree, num_workers: int) -> list[types.PyTree]:
    """The rows `[1, ...]` of workers that share a device: copies."""
    return [jax.tree.map(lambda leaf, w=w: leaf[w : w + 1], tree) for w in range(num_workers)]


def join_rows(rows: Sequence[types.PyTree], mesh: Mesh | None) -> types.PyTree:
    """Joins rows `[1, ...]`, one for each of this process's workers, to a tree of global arrays.

    No copy: a row stays on its worker's device. Without a mesh the workers share one.
    """
    if mesh is None:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    sharding = worker_sharding(mesh)

    def joined(*parts: jax.Array) -> jax.Array:
        shape = mesh.size, *parts[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(joined, *rows)


def own_row(tree: types.PyTree) -> types.PyTree:
    """The row of this process's first worker, leaves without worker axis, where they lie."""
    return _first_row(jax.tree.map(lambda leaf: leaf.addressable_data(0), tree))


_first_row = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf[0]))
