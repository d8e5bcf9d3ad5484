"""Balancing without any gradient of a single example.

One `jax.jvp` of the vector of losses along the running sum gives its inner products with all
gradients of a block of pairs. They give the signs. Pulled back, the signs give the change of the
running sum, and ones give the update, both from one forward pass. This is right for every loss of
which each example has a gradient of its own. Within a block all signs use the running sum from
before it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hetjax import trees, types
from hetjax.ordering import balance, pairs
from hetjax.ordering.ordering import Observer, Sizes


def two_level(sizes: Sizes, *, block_pairs: int) -> Observer:
    """Each worker balances its own pairs in blocks, then the workers' signed sums are balanced.

    Within a round each worker goes on from the common running sum r by itself; its signed sum
    of the round is u_j. Then, in the order of ranks, s_j = 1 if <r, u_j> ≤ 0, else -1, and
    r += s_j u_j. s_j = -1 flips all signs of worker j's round. So one vector a worker and round is
    coordinated, whatever the quota. With one worker there is nothing to coordinate.

    Memory a worker: 2 copies of the parameters (float32), r and r + u_j, and the change of a block
    beside the gradient sum.

    References:
        Cooper, Guo, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845, for D-GraB; blocks, the matrix-free form and the
        second level are hetjax's own.
    """
    own = alone(sizes, block_pairs=block_pairs)
    if sizes.num_workers == 1:
        return own._replace(sizes=sizes)

    def signed(running_sum: types.PyTree, private_sum: types.PyTree) -> types.PyTree:
        return jax.tree.map(jnp.subtract, private_sum, running_sum)

    def coordinate_array(running_sum: types.PyTree, private_sum: types.PyTree) -> tuple:
        signed_sum = signed(running_sum, private_sum)
        one, flips = balance.coordinate_array(trees.first_row(running_sum), signed_sum)
        replicas = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), one, running_sum)
        return replicas, flips

    return own._replace(
        coordinate=lambda before, after, axis_name: balance.coordinate(
            before, signed(before, after), axis_name
        ),
        coordinate_array=coordinate_array,
        same_memory=True,
        sizes=sizes,
        copies_sent=2 * (sizes.num_workers - 1),
    )


def alone(sizes: Sizes, *, block_pairs: int) -> Observer:
    """PairBalance in blocks by each worker alone, with a running sum of its own.

    With blocks of one pair the signs are those of PairBalance.
    """
    size, dear = sizes.microbatch_size, ""
    if size > 2 * block_pairs:
        blocks = -(-size // (2 * block_pairs))
        dear = (
            f"block_pairs={block_pairs} takes {blocks} backward passes of a microbatch of {size}; "
            f"block_pairs={size // 2} takes one"
        )
    return independent(
        trees.accumulator_zeros,
        make_observe(block_pairs),
        new_pass=lambda running_sum: jax.tree.map(jnp.zeros_like, running_sum),
    )._replace(dear=dear)


def independent(init: Callable, observe: Callable, *, new_pass: Callable) -> Observer:
    """An observer by whose sums each worker goes on alone, from round to round."""

    return Observer(
        init,
        lambda memory: memory,
        observe,
        lambda before, after, axis_name: (after, jnp.ones((), jnp.int8)),
        lambda before, after: (after, jnp.ones(jax.tree.leaves(after)[0].shape[0], jnp.int8)),
        new_pass,
    )


def make_observe(block_pairs: int) -> Callable:
    """Makes `Observer.observe`; its `evidence` is the running sum that this worker goes on from.

    An odd example at the end of a pass has no partner; its block adds nothing to the sum. The
    update is the gradient of the losses of the whole microbatch, as without any order.

    Args:
        block_pairs: pairs of a block. Each block takes a forward derivative and a backward pass of
            the whole microbatch.
    """

    def observe(losses, shared, private_sum, microbatch, position, rng):
        size, params = microbatch.example_ids.shape[0], shared.params
        values, pull, weights = jax.vjp(lambda p: losses(p, None), params, has_aux=True)
        (grads,) = pull(jnp.ones_like(values))
        changes, signs = [], []
        for start in range(0, size, 2 * block_pairs):
            block = slice(start, min(start + 2 * block_pairs, size))
            tangents = ((params,), (_direction(private_sum, params),))
            dots = jax.jvp(lambda p: losses(p, None)[0], *tangents)[1][block]
            first, second = pairs.split(dots)
            sign = jnp.where(first - second <= 0, 1, -1).astype(jnp.int8)
            mask = microbatch.example_mask[block]
            counted = jnp.sum(mask > 0) % 2 == 0
            signed = jnp.where(counted, pairs.join(sign, -sign), 0).astype(values.dtype)
            (change,) = pull(jnp.zeros_like(values).at[block].set(signed))
            change = jax.tree.map(lambda g, r: g.astype(r.dtype), change, private_sum)
            if block.stop < size:
                private_sum = jax.tree.map(jnp.add, private_sum, change)
            changes.append(change)
            signs.append(pairs.example_signs(sign, mask))
        sums = jnp.sum(values), weights.sum()
        change = jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *changes)
        return sums, (grads,), change, jnp.concatenate(signs)

    return observe


def _direction(running_sum: types.PyTree, params: types.PyTree) -> types.PyTree:
    """The running sum in the parameters' dtypes, scaled if it might overflow in them."""
    if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params)):
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(r)) for r in jax.tree.leaves(running_sum)]))
        scale = 1 / jnp.where(largest > 0, largest, 1)
        running_sum = jax.tree.map(lambda r: r * scale.astype(r.dtype), running_sum)
    return jax.tree.map(lambda r, p: r.astype(p.dtype), running_sum, params)
