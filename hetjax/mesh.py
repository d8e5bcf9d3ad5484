"""Where the workers live: the worker axis, its mesh, and moving leaves onto and off it.

Every array of the training state has a leading axis `num_workers`, sharded over `WORKER_AXIS`. A
worker's row is its part along that axis. Where a worker has several devices, the mesh has further
axes, and a row lies on the worker's own mesh, as its `Layout` says. Meshes are made here alone.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax import types

WORKER_AXIS = "worker"
DATA_AXIS = "data"  # within a worker, over which a microbatch lies, if there is one

Path = tuple[Any, ...]  # of keys, in a pytree
Place = Any  # a device, or a sharding of a worker's slice
"""Where `jax.device_put` puts what all devices of a worker are to have."""

_MORE_DEVICES = (
    "Take no more workers than devices (cluster.num_workers). For a CPU device each, call "
    "hetjax.use_cpu_workers({n}) before JAX is used for the first time (where JAX finds a GPU, set "
    "JAX_PLATFORMS=cpu, too); or take local='virtual', which plays all workers on one device"
)


def make_worker_mesh(
    num_workers: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    slices: Mapping[str, int] = MappingProxyType({}),
) -> Mesh:
    """One device a worker, in rank order, on the mesh axis `WORKER_AXIS`; or a slice of several.

    Args:
        num_workers: n, at least 1.
        devices: to take them from; by default all of the default backend.
        slices: the axes within a worker, and their sizes.

    Returns:
        A mesh with the axis `WORKER_AXIS` of n workers, and those of `slices`.

    Raises:
        ValueError: there are fewer devices than workers, or a slice is of several processes.
    """
    if devices is None:  # the workers of a process follow each other
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    if num_workers < 1:
        raise ValueError(f"num_workers = {num_workers}: at least one worker is needed")
    if WORKER_AXIS in slices or min(slices.values(), default=1) < 1:
        raise ValueError(f"slices: got {dict(slices)}; axes have other names, of sizes from 1 on")
    of_each = math.prod(slices.values())
    count, told = num_workers * of_each, f" of {of_each} devices each" if slices else ""
    of_slices = f"Take smaller slices, or fewer; on CPUs call hetjax.use_cpu_workers({count}) first"
    hint = of_slices if slices else _MORE_DEVICES.format(n=count)
    if count > len(devices):
        raise ValueError(
            f"num_workers = {num_workers}{told}, but JAX has {len(devices)} "
            f"{devices[0].platform} device(s). {hint}"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"num_workers = {num_workers}{told}, but the {jax.process_count()} processes of this "
            f"run have {len(devices)} devices together; set cluster.num_workers="
            f"{len(devices) // of_each}"
        )
    mesh = mesh_of(devices[:count], slices)
    for worker, own in enumerate(mesh.devices.reshape(num_workers, -1)):
        if len({device.process_index for device in own}) > 1:
            raise ValueError(
                f"slices: {dict(slices)} has worker {worker} on devices of several processes; "
                "each process has to have whole slices"
            )
    return mesh


def mesh_of(
    devices: Sequence[jax.Device], slices: Mapping[str, int] = MappingProxyType({})
) -> Mesh:
    """These devices, in this order, on the mesh axis `WORKER_AXIS` and on those within a worker."""
    axes = (WORKER_AXIS, *slices)
    grid = np.asarray(devices).reshape(-1, *slices.values())
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


@functools.cache
def worker_meshes(mesh: Mesh) -> list[Mesh]:
    """Of each worker its own, with the same axes."""
    grids = (mesh.devices[w : w + 1] for w in range(mesh.shape[WORKER_AXIS]))
    return [Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types) for grid in grids]


def worker_devices(mesh: Mesh) -> list[jax.Device]:
    """The first of each worker."""
    return mesh.devices.reshape(mesh.shape[WORKER_AXIS], -1)[:, 0].tolist()


def spread(place: Place, shape: tuple[int, ...]) -> Place:
    """Where a microbatch of ids of this shape is put: over `DATA_AXIS` where that divides it."""
    ways = place.mesh.shape.get(DATA_AXIS, 0) if isinstance(place, NamedSharding) else 0
    is_cut = ways and len(shape) == 1 and shape[0] % ways == 0
    return NamedSharding(place.mesh, P(DATA_AXIS)) if is_cut else place


def is_here(place: Place) -> bool:
    """Whether it is of this process."""
    return devices_at(place)[0].process_index == jax.process_index()


def devices_at(place: Place) -> list[jax.Device]:
    """All of a worker."""
    return place.mesh.devices.reshape(-1).tolist() if isinstance(place, NamedSharding) else [place]


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


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of each worker lie on its slice.

    Args:
        mesh: of all workers, with the axes within one.
        specs: of the arrays that were given, by shape and path.
    """

    mesh: Mesh
    specs: Mapping[tuple[int, ...], Mapping[Path, P]]

    def __hash__(self) -> int:
        return hash(self.mesh)

    def _of(self, tree: types.PyTree, mesh: Mesh, row: tuple[Any, ...]) -> types.PyTree:
        def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            of_shape = self.specs.get(np.shape(leaf)[len(row) :], {})
            return NamedSharding(mesh, P(*row, *(ending(of_shape, path) or ())))

        return jax.tree.map_with_path(place, tree)

    def of_rows(self, tree: types.PyTree, mesh: Mesh | None = None) -> types.PyTree:
        """Shardings of leaves `[n, ...]`, a row a worker of this mesh; None: of all."""
        return self._of(tree, mesh or self.mesh, (WORKER_AXIS,))

    def of_one(self, tree: types.PyTree, mesh: Mesh) -> types.PyTree:
        """Shardings of leaves without worker axis, the same on each worker of this mesh."""
        return self._of(tree, mesh, ())


def ending(specs: Mapping[Path, P], path: Path) -> P | None:
    """Of the longest of these paths with which this one ends."""
    return next((specs[path[k:]] for k in range(len(path) + 1) if path[k:] in specs), None)


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
    return [w for w, device in enumerate(worker_devices(mesh)) if device.process_index == own]


def place(tree: types.PyTree, mesh: Mesh | None, layout: Layout | None = None) -> types.PyTree:
    """Puts leaves `[num_workers, ...]` on the mesh, a row a worker; each process puts its own.

    Without a mesh all rows go to the first device, and stay there. Else JAX would compile a
    program twice: for arrays that may be moved, and for those made of examples, which may not.
    Without a layout each device of a worker has the whole row.
    """
    if mesh is None or len(own_workers(mesh)) == mesh.shape[WORKER_AXIS]:
        return jax.device_put(tree, layout.of_rows(tree) if layout else worker_sharding(mesh))
    rows = []
    for worker in own_workers(mesh):
        row = jax.tree.map(lambda leaf, w=worker: leaf[w : w + 1], tree)
        laid = layout.of_rows(row, worker_meshes(mesh)[worker]) if layout else None
        rows.append(jax.device_put(row, laid or row_place(mesh, worker)))
    return join_rows(rows, mesh)


def auto(tree: types.PyTree) -> types.PyTree:
    """Arrays as they lie, on meshes whose axes are `Auto`, or as they are where a mesh is set: by
    `Explicit` axes a trace would go."""
    is_set = bool(jax.sharding.get_abstract_mesh().axis_names)

    def of_leaf(leaf: Any) -> Any:
        if is_set or not isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)  # type: ignore[attr-defined]
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(of_leaf, tree)


def put(tree: types.PyTree, place: Place, layout: Layout | None = None) -> types.PyTree:
    """Leaves without worker axis, on a worker; without a layout each of its devices has them."""
    if layout is not None and isinstance(place, NamedSharding):
        return jax.device_put(tree, layout.of_one(tree, place.mesh))  # type: ignore[arg-type]
    return jax.device_put(tree, place)


def row_place(mesh: Mesh, worker: int) -> Place:
    """Where a row `[1, ...]` goes that all devices of its worker are to have."""
    is_sliced = len(mesh.axis_names) > 1
    return worker_sharding(worker_meshes(mesh)[worker]) if is_sliced else mesh.devices[worker]


def place_once(tree: types.PyTree, mesh: Mesh | None, layout: Layout | None = None) -> types.PyTree:
    """Puts arrays that nothing changes on each of this process's devices; on CPUs, which have one
    memory, once. Without a mesh on the first device, with a layout as that says."""
    if layout is not None:
        host, laid = jax.device_get(tree), layout.of_one(tree, layout.mesh)
        make = jax.make_array_from_callback
        return jax.tree.map(lambda x, at: make(x.shape, at, x.__getitem__), host, laid)
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


def copies(tree: types.PyTree, places: Sequence[Place]) -> list[types.PyTree]:
    """What `place_once` put on each worker, where it lies; else a copy there."""

    def on(place: Place, leaf: Any) -> jax.Array:
        there = {shard.device: shard.data for shard in leaf.addressable_shards}
        if isinstance(place, NamedSharding):
            parts = [there[device] for device in devices_at(place)]
            at = NamedSharding(place.mesh, leaf.sharding.spec)
            return jax.make_array_from_single_device_arrays(leaf.shape, at, parts)
        return there[place] if place in there else jax.device_put(leaf, place)

    return [jax.tree.map(functools.partial(on, place), tree) for place in places]


def worker_rows(tree: types.PyTree) -> list[types.PyTree]:
    """The rows `[1, ...]` of this process's workers, where they lie: no copy, no computation."""
    sharding = jax.tree.leaves(tree)[0].sharding
    count = len(sharding.addressable_devices)
    if not _is_sliced(sharding):
        return [jax.tree.map(lambda x, i=i: x.addressable_data(i), tree) for i in range(count)]
    if sharding.mesh.shape[WORKER_AXIS] == 1:
        return [tree]
    meshes = [worker_meshes(sharding.mesh)[worker] for worker in own_workers(sharding.mesh)]
    size = count // len(meshes)

    def row(own: Mesh, first: int, leaf: Any) -> jax.Array:
        parts = [leaf.addressable_data(k) for k in range(first, first + size)]
        at = _sharding(own, leaf.sharding.spec)
        return jax.make_array_from_single_device_arrays((1, *leaf.shape[1:]), at, parts)

    pairs = zip(meshes, range(0, count, size), strict=True)
    return [jax.tree.map(functools.partial(row, *pair), tree) for pair in pairs]


_sharding = functools.cache(NamedSharding)


def _is_sliced(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and len(sharding.mesh.axis_names) > 1


def join_rows(rows: Sequence[types.PyTree], mesh: Mesh | None) -> types.PyTree:
    """Joins rows `[1, ...]`, one for each of this process's workers, to a tree of global arrays.

    No copy: a row stays on its worker's device. Without a mesh the workers share one.
    """
    if mesh is None:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    num_rows = mesh.shape[WORKER_AXIS]
    if num_rows == 1 and len(mesh.axis_names) > 1:
        return rows[0]

    def joined(*parts: Any) -> jax.Array:
        sharding, pieces = worker_sharding(mesh), list(parts)
        if _is_sliced(parts[0].sharding):
            sharding = _sharding(mesh, parts[0].sharding.spec)
            pieces = [shard.data for part in parts for shard in part.addressable_shards]
        shape = num_rows, *parts[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    return jax.tree.map(joined, *rows)


def own_row(tree: types.PyTree) -> types.PyTree:
    """The row of this process's first worker, leaves without worker axis, where they lie."""
    return _first_row(worker_rows(tree)[0]) if jax.tree.leaves(tree) else tree


_first_row = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf[0]))
