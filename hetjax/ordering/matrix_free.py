"""Balancing without any gradient of a single example.

The inner products of all gradients of a block of pairs with the running sum are one `jax.jvp`
of the vector of losses along it. They give the signs; the examples of sign + and those of sign
- are two half blocks, and the gradient sums of the halves, one backward pass in all, give both
the update, G₊ + G₋, and the change of the running sum, G₊ - G₋. Within a block all signs use
the running sum from before it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import trees, types
from hetjax.ordering import balance, pairs
from hetjax.ordering.ordering import Options, Signs


class _NoExampleAxisError(ValueError):
    """What a backward pass keeps of the forward pass cannot be cut by examples."""


Losses = Callable[..., tuple[jax.Array, jax.Array]]


def two_level(options: Options) -> Signs:
    """Each worker balances its own pairs in blocks, then the workers' signed sums are balanced.

    Within a round each worker goes on from the common running sum r by itself; its signed sum
    of the round is u_j. Then s_j = 1 where <r, u_j> ≤ 0, else -1, and r += s_j u_j, in the
    order of ranks; s_j = -1 turns round all signs of worker j's round. So one vector a worker
    and round is coordinated, whatever its quota is. With one worker there is nothing to
    coordinate.

    Memory: 2 copies of the parameters a worker (float32), r and r + u_j, and the gradient sum
    of a half block beside the ordinary one.

    References:
        Cooper, Guo, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845, for D-GraB; blocks, the matrix-free form and the
        second level are hetjax's own.
    """
    if options.num_workers == 1:
        return alone(options)._replace(coordinated=True, made_for=options)

    def sync(
        running_sum: types.PyTree, private_sum: types.PyTree, axis_name: str
    ) -> tuple[types.PyTree, jax.Array]:
        signed_sum = jax.tree.map(jnp.subtract, private_sum, running_sum)
        return balance.coordinate(running_sum, signed_sum, axis_name)

    def sync_array(
        running_sum: types.PyTree, private_sum: types.PyTree
    ) -> tuple[types.PyTree, jax.Array]:
        signed_sum = jax.tree.map(jnp.subtract, private_sum, running_sum)
        one, turns = balance.coordinate_array(trees.first_row(running_sum), signed_sum)
        rows = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), one, running_sum)
        return rows, turns

    return alone(options)._replace(
        sync=sync, sync_array=sync_array, coordinated=True, made_for=options
    )


def alone(options: Options) -> Signs:
    """PairBalance in blocks by each worker alone, with a running sum of its own.

    With blocks of one pair the signs are those of PairBalance.
    """
    return independent(
        trees.accumulator_zeros,
        make_local(options.block_pairs, reuse_residuals=options.reuse_residuals),
        new_pass=lambda running_sum: jax.tree.map(jnp.zeros_like, running_sum),
    )


def independent(init: Callable, local: Callable, *, new_pass: Callable) -> Signs:
    """Each worker has sums of its own, and goes on with them in the next round."""

    def sync(
        before: types.PyTree, after: types.PyTree, axis_name: str
    ) -> tuple[types.PyTree, jax.Array]:
        del before, axis_name
        return after, jnp.ones((), jnp.int8)

    def sync_array(before: types.PyTree, after: types.PyTree) -> tuple[types.PyTree, jax.Array]:
        del before
        return after, jnp.ones(jax.tree.leaves(after)[0].shape[0], jnp.int8)

    return Signs(init, lambda sums: sums, local, sync, sync_array, new_pass, coordinated=False)


def make_local(block_pairs: int, *, reuse_residuals: bool) -> Callable:
    """`Signs.local`, its `signed_sum` the running sum that this worker goes on from.

    The block of the odd unit at a pass's end, which has no partner, adds nothing to the sum.

    Args:
        block_pairs: pairs of a block; a microbatch has blocks of this size and maybe a smaller
            one.
        reuse_residuals: the backward pass takes the forward pass of the inner products, with
            its examples brought into the order of the halves, where `can_reuse_residuals`;
            else the halves have a forward pass of their own.
    """

    def local(
        losses: Losses,
        worker_state: types.WorkerState,
        private_sum: types.PyTree,
        microbatch: types.Microbatch,
        position: jax.Array,
        rng: jax.Array,
    ) -> tuple[tuple[jax.Array, jax.Array], tuple, types.PyTree, jax.Array]:
        del position, rng
        size = microbatch.example_ids.shape[0]
        params = worker_state.params
        losses_and_weights, grad_parts, changes, signs = [], [], [], []
        for start in range(0, size, 2 * block_pairs):
            stop = min(start + 2 * block_pairs, size)
            units = None if stop - start == size else jnp.arange(start, stop)
            block_losses = functools.partial(losses, units=units)
            tangent = _direction(private_sum, params)
            values, dots, weights = jax.jvp(block_losses, (params,), (tangent,), has_aux=True)
            first, second = pairs.split(dots)
            sign = jnp.where(first - second <= 0, 1, -1).astype(jnp.int8)
            evens = 2 * jnp.arange((stop - start) // 2)
            halves = evens + (sign < 0), evens + (sign > 0)  # positions within the block
            plus, minus = (
                jax.tree.map(lambda g, r: g.astype(r.dtype), half, private_sum)
                for half in _gradient_sums(losses, params, units, halves, size, reuse_residuals)
            )
            mask = microbatch.example_mask[start:stop]
            counted = jnp.sum(mask > 0) % 2 == 0
            change = jax.tree.map(lambda a, b, c=counted: (a - b) * c.astype(a.dtype), plus, minus)
            if stop < size:
                private_sum = jax.tree.map(jnp.add, private_sum, change)
            losses_and_weights.append((jnp.sum(values), jnp.sum(weights)))
            grad_parts.append((plus, minus))
            changes.append(change)
            signs.append(pairs.unit_signs(sign, mask))
        totals = [_sum(t) for t in (losses_and_weights, grad_parts, changes)]
        return *totals, jnp.concatenate(signs)

    return local


def _direction(running_sum: types.PyTree, params: types.PyTree) -> types.PyTree:
    """The running sum in the parameters' dtypes; scaled where it might overflow in them."""
    narrow = [leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params)]
    if any(narrow):
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(r)) for r in jax.tree.leaves(running_sum)]))
        scale = 1 / jnp.where(largest > 0, largest, 1)
        running_sum = jax.tree.map(lambda r: r * scale.astype(r.dtype), running_sum)
    return jax.tree.map(lambda r, p: r.astype(p.dtype), running_sum, params)


def _sum(terms: list[types.PyTree]) -> types.PyTree:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), terms)


def _gradient_sums(
    losses: Losses,
    params: types.PyTree,
    units: jax.Array | None,
    halves: tuple[jax.Array, jax.Array],
    size: int,
    reuse_residuals: bool,
) -> tuple[types.PyTree, types.PyTree]:
    """The gradient sums of the two halves of a block."""
    if reuse_residuals:
        with contextlib.suppress(_NoExampleAxisError):  # a block of one pair is built otherwise
            return residual_gradient_sums(
                lambda p, u: losses(p, u)[0], params, units, halves, size=size
            )
    chosen = halves if units is None else tuple(units[half] for half in halves)
    gradient = jax.grad(lambda p, u: jnp.sum(losses(p, u)[0]))
    return gradient(params, chosen[0]), gradient(params, chosen[1])


def residual_gradient_sums(
    losses: Callable[[types.PyTree, jax.Array | None], jax.Array],
    params: types.PyTree,
    units: jax.Array | None,
    halves: tuple[jax.Array, jax.Array],
    *,
    size: int,
) -> tuple[types.PyTree, types.PyTree]:
    """Gradient sums of the two halves of a block, from the one forward pass of the block.

    What the backward pass keeps of the forward pass is a list of arrays; those that grow with
    the block have an axis of examples, along which the half is taken. The structure of the
    backward pass of a half is had by tracing one.

    Args:
        losses: `(params, units) -> f[k]`, one number an example.
        params: the parameters.
        units: i32[k] the block's positions in the microbatch; None = all of it.
        halves: two of i32[k / 2], positions in the block.
        size: examples of the microbatch.

    Raises:
        _NoExampleAxisError: the arrays kept have no such axis.
    """
    count = size if units is None else len(units)
    positions = jnp.arange(size) if units is None else units
    _, whole = jax.vjp(lambda p: losses(p, units), params)
    traced, part = jax.vjp(lambda p: losses(p, positions[: count // 2]), params)
    kept, _ = jax.tree.flatten(whole)
    shapes, structure = jax.tree.flatten(part)
    if len(kept) != len(shapes):
        raise _NoExampleAxisError

    def half(chosen: jax.Array) -> types.PyTree:
        taken = [_take(x, like.shape, chosen, count) for x, like in zip(kept, shapes, strict=True)]
        return jax.tree.unflatten(structure, taken)(jnp.ones_like(traced))[0]

    return half(halves[0]), half(halves[1])


def _take(kept: Any, shape: tuple[int, ...], chosen: jax.Array, count: int) -> Any:
    """`chosen` of the `count` examples of an array, whose shape then is `shape`."""
    if kept.shape == shape:
        return kept
    if kept.ndim != len(shape):
        raise _NoExampleAxisError
    axes = [i for i in range(kept.ndim) if kept.shape[i] != shape[i]]
    if len(axes) != 1 or kept.shape[axes[0]] % count or kept.shape[axes[0]] != 2 * shape[axes[0]]:
        raise _NoExampleAxisError
    (axis,) = axes
    split = (*kept.shape[:axis], count, kept.shape[axis] // count, *kept.shape[axis + 1 :])
    return jnp.take(kept.reshape(split), chosen, axis=axis).reshape(shape)


def can_reuse_residuals(
    losses: Callable[[types.PyTree, types.PyTree, jax.Array], jax.Array],
    params: types.PyTree,
    examples: types.PyTree,
    keys: jax.Array,
) -> bool:
    """Whether the halves' gradients can be had from the forward pass of the whole microbatch.

    A loss whose forward pass keeps absolute positions in the batch (`x[arange(B), y]`) gives
    wrong ones, so they are compared with the right ones leaf by leaf, on real examples, at
    parameters that were moved at random (at zeros much would look right), twice. What cannot be
    compared, for its gradient is zero, is not trusted.

    Args:
        losses: `(params, examples, keys) -> f[B]`, what the backward pass begins with.
        params: the parameters.
        examples: B of them, B even.
        keys: one key, or one an example.
    """
    size = jax.tree.leaves(examples)[0].shape[0]
    evens = 2 * jnp.arange(size // 2)

    def some(params: types.PyTree, units: jax.Array | None) -> jax.Array:
        if units is None:
            return losses(params, examples, keys)
        taken = jax.tree.map(lambda x: jnp.take(x, units, axis=0), examples)
        return losses(params, taken, keys[units] if keys.ndim else keys)

    def gaps(params: types.PyTree, sign: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each leaf and half, the squared error and the squared norm."""
        halves = evens + (sign < 0), evens + (sign > 0)
        plus, minus = residual_gradient_sums(some, params, None, halves, size=size)
        values, pullback = jax.vjp(lambda p: some(p, None), params)
        (total,) = pullback(jnp.ones_like(values))
        (change,) = pullback(pairs.join(sign, -sign).astype(values.dtype))
        errors, norms = [], []
        for one, other in ((plus, 1), (minus, -1)):
            for found, g, u in zip(*map(jax.tree.leaves, (one, total, change)), strict=True):
                right = (g.astype(jnp.float32) + other * u.astype(jnp.float32)) / 2
                errors.append(jnp.sum(jnp.square(found.astype(jnp.float32) - right)))
                norms.append(jnp.sum(jnp.square(right)))
        return jnp.stack(errors), jnp.stack(norms)

    random = np.random.default_rng(0)
    try:
        compare = jax.jit(gaps)
        for seed in (1, 2):
            sign = jnp.asarray(np.where(random.random(size // 2) < 0.5, 1, -1), jnp.float32)
            moved = trees.perturbed(params, seed)
            narrow = "f16[" in str(jax.make_jaxpr(some, static_argnums=1)(moved, None))
            tolerance = 1e-3 if narrow else 1e-6  # of rounding; a wrong position is off by 1
            errors, norms = compare(moved, sign)
            if not bool(jnp.all((norms > 0) & (errors <= tolerance * norms))):
                return False
    except _NoExampleAxisError:
        return False
    return True
