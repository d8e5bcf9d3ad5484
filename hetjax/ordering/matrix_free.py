"""Balancing without any gradient of a single example.

One `jax.jvp` of the vector of losses along the running sum gives its inner products with all
gradients of a block of pairs. They give the signs. The examples of sign + and those of sign - are
two half blocks. The gradient sums of the halves (`halves`) give both the update, G₊ + G₋, and the
change of the running sum, G₊ - G₋. Within a block all signs use the running sum from before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees, types
from hetjax.ordering import balance, halves, pairs
from hetjax.ordering.ordering import Observer, Sizes


def two_level(sizes: Sizes, *, block_pairs: int) -> Observer:
    """Each worker balances its own pairs in blocks, then the workers' signed sums are balanced.

    Within a round each worker goes on from the common running sum r by itself; its signed sum
    of the round is u_j. Then, in the order of ranks, s_j = 1 if <r, u_j> ≤ 0, else -1, and
    r += s_j u_j. s_j = -1 flips all signs of worker j's round. So one vector a worker and round is
    coordinated, whatever the quota. With one worker there is nothing to coordinate.

    Memory a worker: 2 copies of the parameters (float32), r and r + u_j, and the gradient sum of a
    half block beside the ordinary one.

    References:
        Cooper, Guo, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845, for D-GraB; blocks, the matrix-free form and the
        second level are hetjax's own.
    """
    own = alone(sizes, block_pairs=block_pairs)
    if sizes.num_workers == 1:
        return own._replace(coordinated=True, sizes=sizes)

    def coordinate(
        running_sum: types.PyTree, private_sum: types.PyTree, axis_name: str
    ) -> tuple[types.PyTree, jax.Array]:
        signed_sum = jax.tree.map(jnp.subtract, private_sum, running_sum)
        return balance.coordinate(running_sum, signed_sum, axis_name)

    def coordinate_array(
        running_sum: types.PyTree, private_sum: types.PyTree
    ) -> tuple[types.PyTree, jax.Array]:
        signed_sum = jax.tree.map(jnp.subtract, private_sum, running_sum)
        one, flips = balance.coordinate_array(trees.first_row(running_sum), signed_sum)
        replicas = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), one, running_sum)
        return replicas, flips

    return own._replace(
        coordinate=coordinate,
        coordinate_array=coordinate_array,
        coordinated=True,
        same_memory=True,
        sizes=sizes,
    )


def alone(sizes: Sizes, *, block_pairs: int) -> Observer:
    """PairBalance in blocks by each worker alone, with a running sum of its own.

    With blocks of one pair the signs are those of PairBalance.
    """
    del sizes
    return independent(
        trees.accumulator_zeros,
        make_observe(block_pairs),
        new_pass=lambda running_sum: jax.tree.map(jnp.zeros_like, running_sum),
    )._replace(refusal=functools.partial(_refusal, block_pairs=block_pairs))


def independent(init: Callable, observe: Callable, *, new_pass: Callable) -> Observer:
    """An observer by whose sums each worker goes on alone, from round to round."""

    def coordinate(
        before: types.PyTree, after: types.PyTree, axis_name: str
    ) -> tuple[types.PyTree, jax.Array]:
        del before, axis_name
        return after, jnp.ones((), jnp.int8)

    def coordinate_array(
        before: types.PyTree, after: types.PyTree
    ) -> tuple[types.PyTree, jax.Array]:
        del before
        return after, jnp.ones(jax.tree.leaves(after)[0].shape[0], jnp.int8)

    return Observer(
        init,
        lambda memory: memory,
        observe,
        coordinate,
        coordinate_array,
        new_pass,
        coordinated=False,
    )


def make_observe(block_pairs: int) -> Callable:
    """Makes `Observer.observe`; its `evidence` is the running sum that this worker goes on from.

    An odd example at the end of a pass has no partner; its block adds nothing to the sum. The
    update is the gradient of the losses of the whole microbatch, as without any order.

    Args:
        block_pairs: pairs of a block. A microbatch has blocks of this size and maybe a smaller
            one, or is one block (`halves.Microbatch.blocks`).
    """

    def observe(
        losses: halves.Losses,
        shared: types.Shared,
        private_sum: types.PyTree,
        microbatch: types.Microbatch,
        position: jax.Array,
        rng: jax.Array,
    ) -> tuple[tuple[jax.Array, Any], tuple, types.PyTree, jax.Array]:
        del position, rng
        size, params = microbatch.example_ids.shape[0], shared.params
        batch = halves.Microbatch(losses, params, size, block_pairs)
        grad_parts, changes, signs = [], [], []
        for start, stop in batch.blocks:
            dots = batch.products((start, stop), _direction(private_sum, params))
            first, second = pairs.split(dots)
            sign = jnp.where(first - second <= 0, 1, -1).astype(jnp.int8)
            plus, minus = (
                jax.tree.map(lambda g, r: g.astype(r.dtype), half, private_sum)
                for half in batch.half_sums((start, stop), sign)
            )
            mask = microbatch.example_mask[start:stop]
            counted = jnp.sum(mask > 0) % 2 == 0
            change = jax.tree.map(lambda a, b, c=counted: (a - b) * c.astype(a.dtype), plus, minus)
            if stop < size:
                private_sum = jax.tree.map(jnp.add, private_sum, change)
            grad_parts.append((plus, minus))
            changes.append(change)
            signs.append(pairs.example_signs(sign, mask))
        sums = jnp.sum(batch.values), batch.weights.sum()
        return sums, _sum(grad_parts), _sum(changes), jnp.concatenate(signs)

    return observe


def _refusal(losses: halves.Losses, params: types.PyTree, size: int, *, block_pairs: int) -> str:
    return halves.Microbatch(losses, params, size, block_pairs).refusal


def _direction(running_sum: types.PyTree, params: types.PyTree) -> types.PyTree:
    """The running sum in the parameters' dtypes, scaled if it might overflow in them."""
    narrow = [leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params)]
    if any(narrow):
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(r)) for r in jax.tree.leaves(running_sum)]))
        scale = 1 / jnp.where(largest > 0, largest, 1)
        running_sum = jax.tree.map(lambda r: r * scale.astype(r.dtype), running_sum)
    return jax.tree.map(lambda r, p: r.astype(p.dtype), running_sum, params)


def _sum(terms: list[types.PyTree]) -> types.PyTree:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), terms)
