"""What reducers do on the devices with the workers' sums and parameters: their `Reduction`.

A reduction is written once, for one worker and the axis of all workers: `collective`, inside
`shard_map`. On one device `jax.vmap` maps that over the workers, or the reduction brings a form
`array` of its own, for leaves with a leading worker axis.

There are two kinds. Some sum the workers' gradients, so replicas stay equal. Others gossip: each
worker updates from its own gradients and averages its parameters with its neighbours'.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import trees
from hetjax.topology import gossip as gossip_lib
from hetjax.topology.reducer import Mixing, Reduction

PyTree = Any

_LONG_ROW = 65_536  # elements; XLA may add up shorter rows in another order; that is fast enough


def all_reduce() -> Reduction:
    """The sum over all workers, by `psum`: one global gradient, replicas stay equal."""

    def collective(sums: PyTree, axis_name: str) -> PyTree:
        if len(jax.sharding.get_abstract_mesh().axis_names) > 1:  # of slices: leaves stay cut
            return jax.lax.psum(sums, axis_name)
        return _bucketed(lambda x: jax.lax.psum(x, axis_name), sums)

    return Reduction(collective, lambda sums: jax.tree.map(_sum_of_rows, sums))


def _sum_of_rows(rows: jax.Array) -> jax.Array:
    """The sum of `[W, ...]` over the workers, in each worker's row.

    Long rows are added up one after the other. XLA's own sum over the first axis does the same (to
    the bit in JAX 0.10), but on CPU it goes through memory element by element.
    """
    if rows[0].size < _LONG_ROW:
        total = jnp.sum(rows, axis=0)
    else:

        def add(row: int | jax.Array, total: jax.Array) -> jax.Array:
            return total + jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)

        total = jax.lax.fori_loop(1, rows.shape[0], add, rows[0])
    return jnp.broadcast_to(total[None], rows.shape)


def ring(num_workers: int) -> Reduction:
    """The sum over all workers, passed round a ring, to study the ring itself.

    Vectors are cut into n chunks. In n - 1 steps each worker adds its part of a chunk to what its
    left neighbour sent, and sends it on (reduce-scatter). In n - 1 more steps the sums go round
    (all-gather). A worker sends 2 (n - 1) / n of the vector. The sum equals that of `all_reduce` up
    to rounding; replicas stay equal to the bit.
    """
    to_right = [(worker, (worker + 1) % num_workers) for worker in range(num_workers)]

    def around(vector: jax.Array, axis_name: str) -> jax.Array:
        rank = jax.lax.axis_index(axis_name)
        chunks = _chunks(vector, num_workers)

        def chunk(index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(chunks, index % num_workers, keepdims=False)

        carried = chunk(rank)
        for step in range(1, num_workers):
            carried = jax.lax.ppermute(carried, axis_name, to_right) + chunk(rank - step)
        sums = jnp.zeros_like(chunks)
        for step in range(num_workers):
            index = (rank + 1 - step) % num_workers
            sums = jax.lax.dynamic_update_index_in_dim(sums, carried, index, 0)
            if step < num_workers - 1:
                carried = jax.lax.ppermute(carried, axis_name, to_right)
        return sums.reshape(-1)[: vector.size].reshape(vector.shape)

    def collective(sums: PyTree, axis_name: str) -> PyTree:
        return _bucketed(lambda x: around(x, axis_name), sums)

    def array(sums: PyTree) -> PyTree:
        return _bucketed(lambda x: _in_ring_order(x, num_workers), sums, leading_axes=1)

    return Reduction(collective, array)


def _chunks(vector: jax.Array, num_chunks: int) -> jax.Array:
    """The vector's chunks `[num_chunks, size]`, the last padded with zeros."""
    flat = vector.reshape(-1)
    size = -(-flat.size // num_chunks)
    return jnp.pad(flat, (0, num_chunks * size - flat.size)).reshape(num_chunks, size)


def _in_ring_order(vectors: jax.Array, num_workers: int) -> jax.Array:
    """The sum of `[W, ...]` over the workers, each chunk added up in the order of the ring."""
    chunks = jax.vmap(lambda v: _chunks(v, num_workers))(vectors)  # [W, chunk, size]
    workers = jnp.arange(num_workers)
    total = chunks[workers, workers]  # chunk c begins with worker c
    for step in range(1, num_workers):
        total = total + chunks[(workers + step) % num_workers, workers]
    flat = total.reshape(-1)[: vectors[0].size].reshape(vectors.shape[1:])
    return jnp.broadcast_to(flat, vectors.shape)


def gossiping(gossip: gossip_lib.Gossip, *, before_update: bool) -> Reduction:
    """Averages parameters over the exchanges of a plan; each worker keeps its own sums."""
    num_exchanges, num_workers = gossip.partners.shape
    # W = I + sum_m active_m D_m: what each exchange adds to the identity.
    alone = [gossip.matrix(one) - np.eye(num_workers) for one in np.eye(num_exchanges, dtype=bool)]
    terms = np.reshape(alone, (num_exchanges, num_workers, num_workers))

    def exchanged(vector: jax.Array, active: jax.Array, axis_name: str) -> jax.Array:
        """What the active exchanges add to a worker's vector."""
        rank = jax.lax.axis_index(axis_name)

        def exchange(index: int, change: jax.Array) -> jax.Array:
            pairs = [
                (int(partner), worker)
                for worker, partner in enumerate(gossip.partners[index])
                if partner != worker
            ]
            received = jax.lax.ppermute(vector, axis_name, pairs)
            weight = jnp.asarray(gossip.weights[index], vector.dtype)[rank]
            return change + weight * (received - vector)  # weight 0: nothing is received

        change = jnp.zeros_like(vector)
        for index in range(num_exchanges):
            exchange_now = functools.partial(exchange, index)
            if gossip.always:
                change = exchange_now(change)
            else:
                change = jax.lax.cond(active[index], exchange_now, lambda c: c, change)
        return change

    def mixed(leaf: jax.Array, added: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf  # whole numbers of a model's state, alike in all replicas
        wide = trees.wide(leaf)
        return (wide + added(wide)).astype(leaf.dtype)

    def collective(params: PyTree, active: jax.Array, axis_name: str) -> PyTree:
        added = functools.partial(exchanged, active=active, axis_name=axis_name)
        return _bucketed(lambda vector: mixed(vector, added), params)

    def array(params: PyTree, active: jax.Array) -> PyTree:
        def added(rows: jax.Array) -> jax.Array:
            exact: Any = {"precision": jax.lax.Precision.HIGHEST}  # a GPU's default is TF32
            of_terms = active.astype(rows.dtype), jnp.asarray(terms, rows.dtype)
            change = jnp.einsum("m,mij->ij", *of_terms, **exact)
            return jnp.matmul(change, rows.reshape(num_workers, -1), **exact).reshape(rows.shape)

        return jax.tree.map(lambda leaf: mixed(leaf, added), params)

    mixing = Mixing(gossip, collective, array, before_update)
    return Reduction(lambda sums, axis_name: sums, lambda sums: sums, mixing)


# Leaves up to this size share one collective, because each operand costs a rendezvous of all
# workers. Ten leaves of 620 took 1.5 ms one by one and 0.85 ms together, on four CPU devices.
_BUCKET_LEAF_SIZE = 1 << 16


def _bucketed(
    function: Callable[[jax.Array], jax.Array], tree: PyTree, *, leading_axes: int = 0
) -> PyTree:
    """`function` of all leaves; the small ones of a dtype are joined to one vector."""
    leaves, treedef = jax.tree.flatten(tree)
    lead = leaves[0].shape[:leading_axes] if leaves else ()
    sizes = [int(np.prod(leaf.shape[leading_axes:])) for leaf in leaves]
    buckets: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if sizes[index] <= _BUCKET_LEAF_SIZE:
            buckets.setdefault(leaf.dtype, []).append(index)
    small = {index for bucket in buckets.values() for index in bucket}
    out = [leaf if index in small else function(leaf) for index, leaf in enumerate(leaves)]
    for bucket in buckets.values():
        flat = jnp.concatenate([leaves[index].reshape(*lead, -1) for index in bucket], axis=-1)
        ends = list(itertools.accumulate(sizes[index] for index in bucket))
        for index, part in zip(bucket, jnp.split(function(flat), ends[:-1], axis=-1), strict=True):
            out[index] = part.reshape(leaves[index].shape)
    return jax.tree.unflatten(treedef, out)
