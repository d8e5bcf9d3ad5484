"""Making the training state, and taking one worker's part out of it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import executor, trees, types
from hetjax import mesh as mesh_lib
from hetjax.liveness import blocking_waits
from hetjax.local import jitted, rules
from hetjax.losses import stateful
from hetjax.ordering import ordering


@jax.transfer_guard("allow")
def make_train_state(
    params: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    *,
    num_workers: int,
    mesh: Mesh | None = None,
    observer: ordering.Observer | None = None,
    rule: rules.LocalRule | None = None,
    model_state: types.PyTree = (),
    values: types.PyTree = (),
    averages: bool = False,
    memory_rows: int = 0,
    layout: mesh_lib.Layout | None = None,
) -> types.TrainState:
    """The state before the first round: the same parameters on every worker.

    Args:
        params: a pytree of arrays without worker axis.
        optimizer: any optax optimiser; None where no round updates.
        num_workers: W, the length of the leading axis of every leaf.
        mesh: where to put the rows; None puts all of them on the first device.
        observer: the ordering's device part, if it needs evidence.
        rule: the local rule, if it keeps something from round to round.
        model_state: of the model, without worker axis; () where it keeps none.
        values: what losses are given as `values`, without worker axis.
        averages: whether an average of both is kept.
        memory_rows: of the observer's memory; 1 where all workers share it, 0: W.
        layout: of the arrays on each worker's slice, if it has one.
    """
    keeps = rule is not None and rule.traits.keeps_worker

    def begun(params: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
        """The states of the optimiser and of the rule."""
        of_optimizer = () if optimizer is None else optimizer.init(params)
        return of_optimizer, rule.init(params) if rule is not None and keeps else ()

    opt_state, worker = begun(params) if layout is None else ((), ())
    row = types.TrainState(
        params=params,
        opt_state=opt_state,
        memory=(),
        worker=worker,
        progress_rounds=np.zeros((), np.float32),
        model_state=model_state,
        average=begun_average(params, model_state) if averages else (),
        progress_rest=np.zeros((), np.float32),
        values=values,
    )
    memory = () if observer is None else observer.init(params)
    rows = mesh_lib.add_worker_axis(row, num_workers)
    memory = mesh_lib.add_worker_axis(memory, memory_rows or num_workers)
    state = mesh_lib.place(rows._replace(memory=memory), mesh, layout)
    if layout is None:
        return state
    # No device holds a whole array of the optimiser's state, not even now.
    program = jitted.InPlace(jax.vmap(begun), None, layout.of_rows)
    opt_state, worker = program.call(state.params)
    return state._replace(opt_state=opt_state, worker=worker)


def begun_average(params: types.PyTree, model_state: types.PyTree) -> types.Model:
    """The average before the first round: what it is of, floating point in float32 or wider."""
    return jax.tree.map(wide, types.Model(params, model_state))


def wide(leaf: Any) -> np.ndarray:
    """As an average keeps it, on the host: integers as they are."""
    return np.asarray(leaf, stateful.wide_type(leaf))


def narrowed(average: types.PyTree, like: types.PyTree) -> types.PyTree:
    """An average in the types of what it is of."""
    return jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), average, like)


def worker_row(tree: types.PyTree, worker: int) -> types.PyTree:
    """The row of any worker, on this process's first device; called by all processes together."""
    leaf = jax.tree.leaves(tree)[0]
    if leaf.is_fully_addressable:
        if len(leaf.addressable_shards) == leaf.shape[0]:
            return jax.tree.map(lambda x: x.addressable_data(worker)[0], tree)
        return jax.tree.map(lambda x: x[worker], tree)
    return _together(_take_row, tree, np.int32(worker))


def all_rows(tree: types.PyTree) -> types.PyTree:
    """All rows on the host, leaves `[num_workers, ...]`; called by all processes together."""
    leaves = jax.tree.leaves(tree)
    if not leaves or leaves[0].is_fully_addressable:
        return jax.device_get(tree)
    rows = [jax.device_get(worker_row(tree, worker)) for worker in range(leaves[0].shape[0])]
    return jax.tree.map(lambda *parts: np.stack(parts), *rows)


def _take_row(tree: types.PyTree, worker: jax.Array) -> types.PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, worker, keepdims=False), tree)


def _together(function: Callable, rows: types.PyTree, *others: Any) -> types.PyTree:
    """What a function makes of the rows of all processes, here; all processes call it."""
    leaf = jax.tree.leaves(rows)[0]
    if leaf.is_fully_addressable:
        return _everywhere(function)(rows, *others)
    mesh = leaf.sharding.mesh
    # The others may have come to their exits.
    with blocking_waits.Wait("read the rows of all workers", is_vain=False):
        found = jax.block_until_ready(_everywhere(function, mesh)(rows, *others))
    return jax.tree.map(lambda x: x.addressable_data(0), found)


@functools.cache
def _everywhere(function: Callable, mesh: Mesh | None = None) -> Callable:
    """`function`, jitted; its results are whole on every device of the mesh, if there is one."""
    whole = None if mesh is None else mesh_lib.everywhere(mesh)
    return executor.compiled(jax.jit(function, out_shardings=whole))


def _mean_and_distance(params: types.PyTree) -> tuple[types.PyTree, jax.Array, jax.Array]:
    def of_leaf(x: jax.Array) -> jax.Array:  # whole numbers are the same in all rows
        return jnp.mean(trees.wide(x), axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    def squares(tree: types.PyTree) -> jax.Array:  # of numbers of several types
        each = [jnp.sum(jnp.square(trees.wide(x))) for x in jax.tree.leaves(tree)]
        return sum((x.astype(jnp.result_type(float)) for x in each), jnp.zeros(()))

    mean = jax.tree.map(of_leaf, params)
    off = jax.tree.map(lambda x, m: trees.wide(x) - trees.wide(m)[None], params, mean)
    num_workers = jax.tree.leaves(params)[0].shape[0]
    distance, norm = jnp.sqrt(squares(off) / num_workers), jnp.sqrt(squares(mean))
    return jax.tree.map(lambda m, x: m.astype(x.dtype), mean, params), distance, norm


def _other_rows(tree: types.PyTree) -> types.PyTree:
    """bool[W] of each leaf: the worker's row is another than worker 0's; NaN is equal to NaN."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        is_other = (leaf != leaf[:1]) & ~((leaf != leaf) & (leaf[:1] != leaf[:1]))
        return jnp.any(is_other, axis=tuple(range(1, leaf.ndim)))

    return jax.tree.map(of_leaf, tree)


def check_equal(tree: types.PyTree, reducer: str) -> None:
    """Refuses a reducer that says it keeps replicas equal and does not; all processes call it.

    Args:
        tree: leaves `[W, ...]`, after a round.
        reducer: what messages call it.

    Raises:
        ValueError: the rows differ, with the first array and the workers where they do.
    """
    tree = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.number) else (), tree)
    for path, is_other in jax.tree.leaves_with_path(_together(_other_rows, tree)):
        workers = np.flatnonzero(is_other)
        if workers.size:
            raise ValueError(
                f"{reducer}: keeps_replicas_equal=True, and {jax.tree_util.keystr(path)} of worker "
                f"{', '.join(map(str, workers.tolist()))} differs from worker 0's"
            )


def own_mean(params: types.PyTree) -> types.PyTree:
    """The mean of this process's replicas, on the host; no other process takes part.

    Of whole numbers and random keys, which have no mean, those of its first worker.
    """

    def of_leaf(leaf: jax.Array) -> Any:
        if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
            return jax.device_get(mesh_lib.own_row(leaf))
        return mean_of_rows(np.concatenate(list(map(np.asarray, mesh_lib.worker_rows(leaf)))))

    return jax.tree.map(of_leaf, params)


def mean_of_rows(rows: types.PyTree) -> types.PyTree:
    """The mean of leaves `[W, ...]` on the host, taken in float32 or wider."""

    def of_leaf(leaf: np.ndarray) -> np.ndarray:
        return leaf.mean(0, dtype=np.promote_types(leaf.dtype, np.float32)).astype(leaf.dtype)

    return jax.tree.map(of_leaf, rows)


def mean_on(rows: types.PyTree, device: jax.Device) -> types.PyTree:
    """The mean of leaves `[W, ...]`, on `device`, of integers one; all processes call it."""
    return jax.device_put(_together(_mean_and_distance, rows)[0], device)


def consensus(rows: types.PyTree, device: jax.Device) -> tuple[types.PyTree, dict[str, float]]:
    """The mean of the replicas, on `device`, and how far they are from it; all processes call it.

    Args:
        rows: parameters, leaves `[W, ...]`.
        device: where the mean is to be.

    Returns:
        parameters without worker axis; and `distance`, the root mean square over the workers of
        the Euclidean distance from the mean, and `relative`, that over the mean's norm.
    """
    mean, distance, norm = _together(_mean_and_distance, rows)
    relative = float(distance) / max(float(norm), 1e-30)
    return jax.device_put(mean, device), {"distance": float(distance), "relative": relative}
