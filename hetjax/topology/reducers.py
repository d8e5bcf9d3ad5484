"""What a synchronisation does with the workers' sums.

Each reducer has two forms that agree: `collective`, inside `shard_map` over the worker axis,
and `array`, on leaves with a leading worker axis on one device.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Reducer(NamedTuple):
    """How `(grad_sum, weight_sum)` of the workers become those that each one updates from."""

    collective: Callable[[PyTree, str], PyTree]
    """`(sums, axis_name) -> sums`, leaves without worker axis."""

    array: Callable[[PyTree], PyTree]
    """`sums -> sums`, leaves `[num_workers, ...]`."""

    keeps_replicas_equal: bool


def all_reduce() -> Reducer:
    """The sum over all workers, by `psum`: one global gradient, replicas stay equal."""

    def collective(sums: PyTree, axis_name: str) -> PyTree:
        return _psum_bucketed(sums, axis_name)

    def array(sums: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), sums
        )

    return Reducer(collective, array, keeps_replicas_equal=True)


# Leaves up to this size share one all-reduce: each operand of its own costs a rendezvous of all
# workers. Ten leaves of 620 took 1.5 ms one by one and 0.85 ms together, on four CPU devices.
_BUCKET_LEAF_SIZE = 1 << 16


def _psum_bucketed(tree: PyTree, axis_name: str) -> PyTree:
    """`psum` of all leaves, the small ones of a dtype as one vector."""
    leaves, treedef = jax.tree.flatten(tree)
    buckets: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size <= _BUCKET_LEAF_SIZE:
            buckets.setdefault(leaf.dtype, []).append(index)
    small = {index for bucket in buckets.values() for index in bucket}
    reduced = [
        leaf if index in small else jax.lax.psum(leaf, axis_name)
        for index, leaf in enumerate(leaves)
    ]
    for bucket in buckets.values():
        flat = jnp.concatenate([leaves[index].reshape(-1) for index in bucket])
        ends = list(itertools.accumulate(leaves[index].size for index in bucket))
        parts = jnp.split(jax.lax.psum(flat, axis_name), ends[:-1])
        for index, part in zip(bucket, parts, strict=True):
            reduced[index] = part.reshape(leaves[index].shape)
    return jax.tree.unflatten(treedef, reduced)


REDUCERS: dict[str, Callable[..., Reducer]] = {"all_reduce": all_reduce}
