"""Which signs keep the signed prefix sums of a sequence of differences small?

The greedy rule of PairBalance and D-GraB: with `r` the running sum, difference `D_k` gets the
sign +1 if `<r, D_k> <= 0`, else -1, and then `r += s_k D_k`. All forms here give the same signs
if the arithmetic is exact. They differ in what they read: `balance_scan` reads `r` once for each
difference, `balance_gram` takes the inner products of a block at once, `balance_sharded` divides
the coordinates among the workers. `coordinate` applies the rule to one vector a worker.

Assumes finite differences that are already in sequence. Pairs, places and passes are left to the
ordering. Inner products are summed in float32 or wider.

References:
    Lu, Guo and De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
    2022, arXiv:2205.10733. Guo, Cooper et al., Coordinating Distributed Example Orders for
    Provably Accelerated Training, 2023, arXiv:2302.00845. The Gram form, the sharded form
    without a server, and one vector a worker and round in `coordinate` are not in the papers.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees

PyTree = Any

# TF32 products would change signs on GPU.
_dot = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)

# Inner products of `_balance_chunked` are summed over so many parts of d first. On two shared
# cores at d = 10**6, K = 64: 16 chunks 54 ms, 8 chunks 65 ms, the plain scan 85 ms.
_NUM_CHUNKS = 16


def shard_size(num_params: int, num_workers: int) -> int:
    """Coordinates that each worker holds in the sharded form, the last ones padding.

    Example:
        >>> shard_size(10, 4)
        3
    """
    return -(-num_params // num_workers)


@jax.jit
def balance_signs(diffs: jax.Array, running_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Signs of `K` differences in sequence, in the form that is fastest on this backend.

    `s_k = +1 if <r, D_k> <= 0 else -1; r += s_k D_k`.

    Args:
        diffs: f[K, d], in sequence.
        running_sum: f[d].

    Returns:
        signs i8[K], and running_sum f[d] with `sum_k s_k D_k` added.

    Raises:
        ValueError: the two shapes do not fit.

    Example:
        >>> signs, _ = balance_signs(jnp.array([[1.0, 0.0], [2.0, 1.0]]), jnp.zeros(2))
        >>> signs.tolist()
        [1, -1]
    """
    if diffs.ndim != 2 or running_sum.shape != diffs.shape[1:]:
        shapes = list(diffs.shape), list(running_sum.shape)
        raise ValueError(f"diffs {shapes[0]} and running_sum {shapes[1]} must be [K, d] and [d]")
    if diffs.shape[0] == 0:
        return jnp.zeros(0, jnp.int8), running_sum
    if jax.default_backend() != "cpu":  # latency limits K dependent steps there
        return balance_gram(diffs, running_sum)
    return _balance_chunked(diffs, running_sum)


@jax.jit
def balance_scan(diffs: jax.Array, running_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`balance_signs`, one difference after the other."""
    dtype = _sum_dtype(diffs, running_sum)

    def step(r: jax.Array, diff: jax.Array) -> tuple[jax.Array, jax.Array]:
        diff = diff.astype(dtype)
        sign = _sign(_dot(r, diff))
        return r + sign * diff, sign.astype(jnp.int8)

    r, signs = jax.lax.scan(step, running_sum.astype(dtype), diffs)
    return signs, r.astype(running_sum.dtype)


def _balance_chunked(diffs: jax.Array, running_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`balance_scan` for XLA on CPU: product and update read a difference where it lies.

    The inner product is first summed over `_NUM_CHUNKS` parts of d, in one fused loop that is
    vectorised and divided among the cores. A plain product makes XLA copy the difference out
    of `diffs` for its own library, which takes as long as the product.
    """
    dtype = _sum_dtype(diffs, running_sum)
    num_diffs, size = diffs.shape
    if size < _NUM_CHUNKS:
        return balance_scan(diffs, running_sum)
    chunk = size // _NUM_CHUNKS
    infinity = jnp.array(jnp.inf, dtype)

    def part(k: jax.Array, start: int, length: int) -> jax.Array:
        return jax.lax.dynamic_slice(diffs, (k, start), (1, length))[0].astype(dtype)

    def step(r: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        starts = range(0, chunk * _NUM_CHUNKS, chunk)
        products = (r[at : at + chunk] * part(k, at, chunk) for at in starts)
        # Changes no number, but keeps XLA from fusing the products into the sum below.
        partial = jax.lax.clamp(-infinity, functools.reduce(operator.add, products), infinity)
        rest = size - chunk * _NUM_CHUNKS
        sign = _sign(jnp.sum(partial) + _dot(r[size - rest :], part(k, size - rest, rest)))
        return r + sign * part(k, 0, size), sign.astype(jnp.int8)

    r, signs = jax.lax.scan(step, running_sum.astype(dtype), jnp.arange(num_diffs))
    return signs, r.astype(running_sum.dtype)


@functools.partial(jax.jit, static_argnames="block")
def balance_gram(
    diffs: jax.Array, running_sum: jax.Array, block: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """`balance_signs` by the Gram matrix of `block` differences at a time; exact.

    With X the block: `c = X r`, `G = X X^T`, `s_k = -sgn(c_k + sum_{i<k} s_i G_ik)` where
    `sgn(0) = -1`, and `r += X^T s`. A block is read three times and costs `2 block**2 d`
    operations. Only one scan over scalars depends on the signs before.

    Args:
        diffs: f[K, d], in sequence.
        running_sum: f[d].
        block: differences a block; None for 64 at most, or 4 on CPU.

    Returns:
        signs i8[K] and running_sum f[d].
    """
    if block is None:
        block = 4 if jax.default_backend() == "cpu" else 64
    dtype = _sum_dtype(diffs, running_sum)

    def step(r: jax.Array, vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        vectors = vectors.astype(dtype)
        signs = _signs_from_products(_dot(vectors, r), _dot(vectors, vectors.T))
        return r + _dot(signs, vectors), signs.astype(jnp.int8)

    num_diffs, size = diffs.shape
    num_blocks, rest = divmod(num_diffs, block)
    r, signs = running_sum.astype(dtype), jnp.zeros((0, block), jnp.int8)
    if num_blocks:
        r, signs = jax.lax.scan(step, r, diffs[: num_diffs - rest].reshape(num_blocks, block, size))
    signs = signs.reshape(-1)
    if rest:
        r, last = step(r, diffs[num_diffs - rest :])
        signs = jnp.concatenate([signs, last])
    return signs, r.astype(running_sum.dtype)


def balance_sharded(
    diffs: jax.Array, running_sum: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """D-GraB without a server: one running sum for all workers, of which each holds a shard.

    The sequence is difference 0 of workers 0 .. W-1, then difference 1, and so on. One
    `all_to_all` gives each worker its coordinates of all `K W` differences. One `psum` adds up
    `K**2 W**2 + K W` inner products. Then every worker computes the same signs.

    Args:
        diffs: f[K, d] of this worker, padded with zeros if it has fewer.
        running_sum: f[shard_size(d, W)], this worker's coordinates, in rank order.
        axis_name: the axis of `shard_map` or `jax.vmap` over the W workers.

    Returns:
        signs i8[K] of this worker (+1 for a vector of zeros), and its shard of the running sum.
    """
    num_workers = jax.lax.axis_size(axis_name)
    dtype = _sum_dtype(diffs, running_sum)
    num_diffs = diffs.shape[0]
    vectors = _exchange(diffs, axis_name).reshape(num_diffs * num_workers, -1).astype(dtype)
    r = running_sum.astype(dtype)
    signs = _signs_of_shards(vectors, r, axis_name)
    r = r + _dot(signs, vectors)
    mine = signs.reshape(num_diffs, num_workers)[:, jax.lax.axis_index(axis_name)]
    return mine.astype(jnp.int8), r.astype(running_sum.dtype)


def coordinate(running_sum: PyTree, signed_sum: PyTree, axis_name: str) -> tuple[PyTree, jax.Array]:
    """One sign a worker: `s_j` from `<r, u_j>` in rank order, `r` with the signed sums before it.

    Sends as much as one all-reduce of the tree, by an `all_to_all` and an `all_gather`, and one
    `psum` of `W**2 + W` scalars.

    Args:
        running_sum: tree r, leaves f[...], the same on all workers.
        signed_sum: tree u_j of this worker, leaves f[...].
        axis_name: the axis of `shard_map` or `jax.vmap` over the W workers.

    Returns:
        running_sum with `sum_j s_j u_j` added, the same on all workers, and the sign i8[] of
        this one; a signed sum of zeros gets +1.
    """
    num_workers = jax.lax.axis_size(axis_name)
    dtype = _sum_dtype(*jax.tree.leaves((running_sum, signed_sum)))
    u = _exchange(trees.to_vector(signed_sum, dtype)[None], axis_name)[0]  # [W, d / W]
    rank, chunk = jax.lax.axis_index(axis_name), u.shape[1]
    r = trees.to_vector(running_sum, dtype)
    r = jnp.pad(r, (0, chunk * num_workers - r.size)).reshape(num_workers, chunk)[rank]
    signs = _signs_of_shards(u, r, axis_name)
    change = jax.lax.all_gather(_dot(signs, u), axis_name, tiled=True)
    changes = trees.of_vector(change, running_sum)
    summed = jax.tree.map(lambda r, by: (r + by).astype(r.dtype), running_sum, changes)
    return summed, signs[rank].astype(jnp.int8)


def coordinate_array(running_sum: PyTree, signed_sum: PyTree) -> tuple[PyTree, jax.Array]:
    """`coordinate` on one device, leaf by leaf; `jax.vmap` of `coordinate` takes 7 times as long.

    Args:
        running_sum: tree r, leaves f[...], without worker axis.
        signed_sum: tree of u_0 .. u_{W-1}, leaves f[W, ...].

    Returns:
        running_sum with `sum_j s_j u_j` added, and the signs i8[W].
    """
    leaves, treedef = jax.tree.flatten(running_sum)
    u_leaves = jax.tree.leaves(signed_sum)
    dtype = _sum_dtype(*leaves, *u_leaves)
    flat = [u.reshape(u.shape[0], -1).astype(dtype) for u in u_leaves]
    products = sum(_dot(u, r.reshape(-1).astype(dtype)) for u, r in zip(flat, leaves, strict=True))
    gram = sum(_dot(u, u.T) for u in flat)
    signs = _signs_from_products(jnp.asarray(products), jnp.asarray(gram))
    summed = [
        (r + _dot(signs, u).reshape(r.shape)).astype(r.dtype)
        for u, r in zip(flat, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, summed), signs.astype(jnp.int8)


def _signs_from_products(products: jax.Array, gram: jax.Array) -> jax.Array:
    """f[K] signs from `<r, D_k>` f[K] and `<D_i, D_k>` f[K, K], of which only i < k is used."""

    def step(k: jax.Array, signs: jax.Array) -> jax.Array:
        # Signs from k on are still 0, so row k of the Gram matrix needs no mask.
        return signs.at[k].set(_sign(products[k] + jnp.sum(gram[k] * signs)))

    # On a GPU an iteration costs as much as ten of its sums: 1.2 ms for 64 signs, .2 by eights.
    unroll = 1 if jax.default_backend() == "cpu" else 8
    return jax.lax.fori_loop(0, products.shape[0], step, jnp.zeros_like(products), unroll=unroll)


def _sign(product: jax.Array) -> jax.Array:
    """+1 if `product <= 0`, else -1, in its dtype."""
    return jnp.where(product <= 0, 1, -1).astype(product.dtype)


def _sum_dtype(*arrays: jax.Array) -> Any:
    return trees.wider(jnp.float32, *(x.dtype for x in arrays))


def _exchange(vectors: jax.Array, axis_name: str) -> jax.Array:
    """Vectors f[K, d] of each worker as f[K, W, ceil(d / W)]: this worker's coordinates of all."""
    num_workers = jax.lax.axis_size(axis_name)
    chunk = shard_size(vectors.shape[1], num_workers)
    vectors = jnp.pad(vectors, ((0, 0), (0, chunk * num_workers - vectors.shape[1])))
    vectors = vectors.reshape(vectors.shape[0], num_workers, chunk)
    return jax.lax.all_to_all(vectors, axis_name, split_axis=1, concat_axis=1)


def _signs_of_shards(vectors: jax.Array, running_sum: jax.Array, axis_name: str) -> jax.Array:
    """f[K] signs, from this worker's coordinates of K vectors and of the running sum."""
    products, gram = _dot(vectors, running_sum), _dot(vectors, vectors.T)
    total = jax.lax.psum(jnp.concatenate([products, gram.reshape(-1)]), axis_name)
    return _signs_from_products(total[: products.size], total[products.size :].reshape(gram.shape))
