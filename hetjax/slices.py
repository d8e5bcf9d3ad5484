"""A worker of several devices: how its arrays lie on them.

The worker mesh has further axes then, those within a worker: its *slice*. No program of the local
phase spans two workers, so within one there may be any collective. What lies where is said once,
by `mesh.Layout`: a parameter as `shard` says, and every other array as the parameter whose path its
own ends with and whose shape it has. So gradients, sums, averages and the optimiser's state follow.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from hetjax import executor, messages, parts, placement, types
from hetjax import mesh as mesh_lib
from hetjax.config import groups, kinds
from hetjax.losses import stateful

__all__ = ["fsdp"]

_LEAST = 1 << 16  # numbers of an array that is worth to be cut

Shard = Callable[..., P]
"""`(path, shape) -> spec` of an array; one that names `sizes` is given those of the axes."""


def fsdp(*, min_size: int = _LEAST, axis: str = mesh_lib.DATA_AXIS) -> Shard:
    """Fully sharded: each large array is cut along its longest axis, over the devices of a slice.

    Args:
        min_size: numbers of the smallest array that is cut; of others each device has a copy.
        axis: of the slice, over which arrays are cut.

    Returns:
        what `fit(shard=…)` takes. An axis that does not divide is left for the next longest.

    Raises:
        ValueError: when a run begins: its slices have no such axis.

    References:
        Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion
        parameter models", 2020, arXiv 1910.02054.
    """

    def spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
        if axis not in sizes:
            raise ValueError(f"fsdp cuts over {axis!r}, and slices has {', '.join(sizes)}")
        able = [k for k, size in enumerate(shape) if size and size % sizes[axis] == 0]
        if math.prod(shape) < min_size or not able:
            return P()
        longest = max(able, key=lambda k: shape[k])
        return P(*[None] * longest, axis)

    is_default = (min_size, axis) == (_LEAST, mesh_lib.DATA_AXIS)
    vars(spec)["told"] = "fsdp" if is_default else f"{kinds.GIVEN}fsdp of {min_size}, {axis!r}"
    return spec


def sizes(config: groups.ExperimentConfig, num_workers: int) -> dict[str, int]:
    """Of the axes of a slice, with what is left of JAX's devices where one is 0.

    Raises:
        ValueError: a microbatch cannot lie over them.
    """
    axes = config.slices.axes
    rest = math.prod(size for size in axes.values() if size)
    left = max(jax.device_count() // (num_workers * rest), 1)
    found = {name: size or left for name, size in axes.items()}
    size, ways = config.microbatch_size, found.get(mesh_lib.DATA_AXIS, 1)
    if size % ways:
        raise ValueError(f"microbatch_size: got {size}, must be a multiple of slices.data, {ways}")
    return found


def num_devices(given: Any) -> int:
    """Of a worker, where the fields of `slices` say it; 1 where they do not, or are wrong.

    Raises:
        ValueError: they are no fields.
    """
    if not isinstance(given, Mapping | None):
        raise ValueError(f"slices: got {given!r}; give axes and their sizes, {{'data': 4}}")
    counts = [size for name, size in (given or {}).items() if name != "shard"]
    if not all(isinstance(size, int) for size in counts):
        return 1
    of_process = jax.device_count() // jax.process_count()
    return of_process if 0 in counts else math.prod(counts)


def described(shard: Any) -> str:
    """How a configuration records what `fit(shard=…)` was given."""
    if isinstance(shard, str):
        return shard
    other = parts.path_of(shard) if callable(shard) else "specs"
    return getattr(shard, "told", kinds.GIVEN + other)


def layout(
    fields: groups.SlicesConfig,
    where: placement.Placement,
    shard: Any,
    loss_fn: Any,
    params: types.PyTree,
    *others: types.PyTree,
) -> mesh_lib.Layout | None:
    """Where the arrays of each worker lie; None where it has one device.

    Args:
        fields: of the configuration.
        where: the workers, without it.
        shard: as for `fit`; None: as `fields`, the arrays or the model say.
        loss_fn: of a model, whose variables may have specs.
        params: of the model.
        *others: what else a worker is given: frozen arrays, the model's state.

    Raises:
        ValueError: a spec does not fit its array or the mesh, or there is none such; or JAX is told
            to use another mesh, or to trace nothing.
    """
    if not fields.axes or where.mesh is None:
        return None
    if executor.is_eager() or jax.sharding.get_abstract_mesh().axis_names:
        raise ValueError("slices: call fit outside of jax.set_mesh and jax.disable_jit")
    within = dict(where.mesh.shape)
    del within[mesh_lib.WORKER_AXIS]
    shard = _named(fields.shard) if shard is None or isinstance(shard, str) else shard
    spec_of = _spec_of(shard, getattr(loss_fn, "specs", {}), params, within)
    specs: dict[tuple[int, ...], dict[mesh_lib.Path, P]] = {}
    of_device, idle = 0, [name for name, size in within.items() if size > 1]
    for tree in (*others, params):
        for path, leaf in jax.tree.leaves_with_path(tree):
            spec, axes = _checked(spec_of(path, leaf), path, leaf, within)
            specs.setdefault(np.shape(leaf), {})[path] = spec
            of_device += np.size(leaf) // math.prod(within[x] for x in axes) * (tree is params)
            idle = [name for name in idle if name not in axes]
    if where.leads:
        whole = sum(map(np.size, jax.tree.leaves(params)))
        more = f"; nothing is cut over {' and '.join(idle)}" if idle else ""
        messages.logger.info(f"slices: a device has {of_device:,} of {whole:,} parameters{more}")
    return mesh_lib.Layout(where.mesh, specs)


def _spec_of(
    shard: Any, of_model: Mapping[mesh_lib.Path, P], params: types.PyTree, within: dict[str, int]
) -> Callable[[mesh_lib.Path, Any], Any]:
    """From a path and an array to its spec."""
    if shard is None:
        return lambda path, leaf: (
            mesh_lib.ending(of_model, path)
            or getattr(getattr(leaf, "sharding", None), "spec", None)
        )
    if callable(shard):
        sizes = {"sizes": within} if parts.asked_for(shard, ("sizes",), 2) else {}
        if not parts.takes(shard, 2, *sizes):
            raise ValueError(f"shard: {parts.shown(shard)} takes no (path, shape); call it first?")
        return lambda path, leaf: shard(stateful.path_of(path), np.shape(leaf), **sizes)
    with messages.as_mistake("shard: it is not like the parameters: "):
        leaves = jax.tree.broadcast(shard, params, is_leaf=_is_spec)
    of_params = [(path, np.shape(leaf)) for path, leaf in jax.tree.leaves_with_path(params)]
    found = dict(zip(of_params, jax.tree.leaves(leaves, is_leaf=_is_spec), strict=True))
    return lambda path, leaf: found.get((path, np.shape(leaf)))


def _is_spec(each: Any) -> bool:
    return each is None or isinstance(each, P)


def _named(name: str) -> Shard | None:
    """What a configuration names."""
    if name in ("", "fsdp"):
        return fsdp() if name else None
    with messages.as_mistake("slices.shard: ", after=". Or give 'fsdp', or shard=…"):
        return parts.imported(name)


def _checked(
    spec: Any, path: mesh_lib.Path, leaf: Any, within: dict[str, int]
) -> tuple[P, list[str]]:
    """A spec that fits an array, and its axes; None is one that cuts nothing.

    Raises:
        ValueError: it does not, or is none.
    """
    if not _is_spec(spec):
        raise ValueError(f"shard: {parts.shown(spec)} is no jax.sharding.PartitionSpec")
    spec, shape = P() if spec is None else spec, np.shape(leaf)
    told = f"shard: {stateful.path_of(path) or 'the array'} {list(shape)} has the spec {spec}, "
    axes = [names if isinstance(names, tuple) else (names,) if names else () for names in spec]
    each = [name for names in axes for name in names]
    if len(spec) > len(shape) or len(set(each)) < len(each):
        raise ValueError(f"{told}which has more axes than the array, or an axis twice")
    if unknown := [name for name in each if name not in within]:
        raise ValueError(
            f"{told}but slices has no axis {unknown[0]!r}; it has {', '.join(within)}. Name it "
            "there, or give shard="
        )
    for size, names in zip(shape, axes, strict=False):
        if size % (ways := math.prod(within[name] for name in names)):
            raise ValueError(f"{told}but {size} is not a multiple of {ways} ({', '.join(names)})")
    return spec, each


def seen(
    layout: mesh_lib.Layout | None, *, alike: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Inside, what is traced sees the mesh of a worker, whichever it is, where it has one.

    `alike`: with axes of size 1, so that slices of any shape have the same program.
    """
    if layout is None:
        return contextlib.nullcontext()
    own = mesh_lib.worker_meshes(layout.mesh)[0].abstract_mesh
    if alike:
        own = AbstractMesh((1,) * len(own.axis_names), own.axis_names, own.axis_types)
    return jax.sharding.use_abstract_mesh(own)


def spread(microbatch: types.PyTree) -> types.PyTree:
    """A microbatch, over `DATA_AXIS` where the mesh that is seen has one; traceable."""
    ways = jax.sharding.get_abstract_mesh().shape.get(mesh_lib.DATA_AXIS, 1)

    def of_leaf(leaf: jax.Array) -> jax.Array:
        if ways == 1 or leaf.shape[0] % ways:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, P(mesh_lib.DATA_AXIS))

    return jax.tree.map(of_leaf, microbatch)
