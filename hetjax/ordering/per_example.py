"""Balancing by the gradient of every example, as in the papers: exact, but costly.

Gradients and running sums are flat vectors of all d parameters here. A worker computes the
gradients of a microbatch by `vmap`, B·d numbers at once. Their sum is the update, so it is compared
with the gradient of the microbatch: where examples see each other it is another one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import executor, trees, types
from hetjax.ordering import balance, pairs
from hetjax.ordering.matrix_free import independent
from hetjax.ordering.ordering import COUPLED, Observer, Sizes

_SIGN_STREAM = 0x51674
_ROUNDING = {8: 0.3, 16: 3e-2, 24: 1e-2, 32: 1e-3, 64: 1e-6}
"""By the bits of a number: what two sums may differ by, over the sum of the gradients' norms."""
_OF_KEYS = {"random_fold_in", "random_seed", "random_split", "random_wrap"}  # these draw nothing


def _dtype(params: types.PyTree) -> jnp.dtype:
    return trees.wider(jnp.float32, *map(jnp.result_type, jax.tree.leaves(params)))


def _zeros(params: types.PyTree, num_workers: int = 1) -> jax.Array:
    """As many as the parameters have numbers, or one worker's share of them."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return jnp.zeros(balance.shard_size(size, num_workers), _dtype(params))


def each(losses: Callable, params: types.PyTree, size: int) -> tuple[jax.Array, Any, types.PyTree]:
    """`(losses f[B], weights [B, ...], gradients [B, ...])` of a microbatch's examples, each alone.

    The second is what `losses` gives of one as `weights.sum()`.
    """

    def of_one(params: types.PyTree, position: jax.Array) -> tuple[jax.Array, Any]:
        values, weights = losses(params, position[None])
        return values[0], weights.sum()

    value_and_grad = functools.partial(jax.value_and_grad(of_one, has_aux=True), params)
    (values, weights), grads = executor.each(value_and_grad, jnp.arange(size))
    return values, weights, grads


def _gradients(
    losses: Callable, params: types.PyTree, size: int
) -> tuple[tuple[jax.Array, Any], types.PyTree, jax.Array, jax.Array]:
    """`((loss_sum, weight_sum), grad_sum, gradients f[B, d], is_apart bool[])` of a microbatch."""
    values, weights, grads = each(losses, params, size)
    grad_sum = jax.tree.map(lambda g: jnp.sum(g, axis=0), grads)
    gradients = jax.vmap(functools.partial(trees.to_vector, dtype=_dtype(params)))(grads)
    is_apart = _is_apart(losses, params, gradients)
    of_all = jnp.sum(values), jax.tree.map(functools.partial(jnp.sum, axis=0), weights)
    return of_all, grad_sum, gradients, is_apart


def _is_apart(losses: Callable, params: types.PyTree, gradients: jax.Array) -> jax.Array:
    """Whether these are the gradients of the microbatch's examples in it, beyond rounding: bool[].

    They add up to that of the microbatch. A loss that draws random numbers draws others for one
    example. Then half of the examples have one gradient beside the others, and the same beside
    copies of the first, whose key is the microbatch's.
    """
    program, _ = executor.program(lambda p: losses(p, None)[0], params)
    names, dtypes = executor.contents(program)
    draws = program is None or any(name.startswith("random_") for name in names - _OF_KEYS)
    kept = np.random.default_rng(0).permutation(len(gradients)) < len(gradients) / 2
    kept[-1], kept[0] = False, True
    kept |= not draws

    def gradient(positions: np.ndarray | None) -> jax.Array:
        grads = jax.grad(lambda p: jnp.sum(jnp.where(kept, losses(p, positions)[0], 0)))(params)
        return trees.to_vector(grads, gradients.dtype)

    copied = np.where(kept, np.arange(len(kept)), 0)
    apart = gradient(copied) if draws else jnp.sum(gradients, axis=0)
    own, scale = gradient(None), jnp.sum(jnp.linalg.norm(gradients, axis=1))
    dtypes |= set(map(jnp.result_type, jax.tree.leaves(params)))
    floats = [each for each in dtypes - {None} if jnp.issubdtype(each, jnp.floating)]
    narrowest = min(jnp.finfo(each).bits for each in floats)
    if narrowest == 32 and jax.default_backend() != "cpu":
        narrowest = 24  # in matrix products, by default
    is_like = jnp.linalg.norm(own - apart) <= _ROUNDING[narrowest] * scale
    return is_like | ~trees.all_finite(own)  # which is told by its loss


def _of_pairs(find: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable:
    """Makes `Observer.observe` of a function that finds pairs' signs from gradient differences.

    Args:
        find: `(differences, evidence, position) -> (change, pair_signs i8[B / 2])`. A difference
            f[d] is the first gradient of a pair less the second, zero if the pair is not whole.
    """

    def observe(losses, shared, evidence, microbatch, position, rng):
        mask = microbatch.example_mask
        sums, grad_sum, gradients, is_apart = _gradients(losses, shared.params, mask.shape[0])
        first, second = pairs.split(gradients)
        differences = jnp.where(pairs.whole(mask)[:, None], first - second, 0)
        change, signs = find(differences, evidence, position)
        signs = jnp.where(is_apart, pairs.example_signs(signs, mask), COUPLED)
        return sums, (grad_sum,), change, signs.astype(jnp.int8)

    return observe


def d_grab(sizes: Sizes) -> Observer:
    """D-GraB: one running sum for all pairs of all workers, in the order (timestep, rank).

    The differences of a round are kept until its end. Then each worker gets its d/W coordinates of
    all of them; it holds these coordinates of the running sum.

    Memory: the differences of `max_microbatches` microbatches, B/2 · d numbers each, a worker.

    References:
        Cooper, Guo, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845.
    """
    num_workers, num_pairs = sizes.num_workers, sizes.microbatch_size // 2
    max_pairs = sizes.max_microbatches * num_pairs

    def begin_round(running_sum: jax.Array) -> jax.Array:
        return jnp.zeros((max_pairs, num_workers * running_sum.shape[0]), running_sum.dtype)

    def keep(differences, kept, position):
        nothing, start = jnp.zeros_like(kept), position * num_pairs
        change = jax.lax.dynamic_update_slice_in_dim(nothing, differences, start, axis=0)
        return change, jnp.ones(num_pairs, jnp.int8)  # `coordinate` flips them

    def coordinate(running_sum, kept, axis_name):
        signs, running_sum = balance.balance_sharded(kept, running_sum, axis_name)
        return running_sum, jnp.repeat(signs, 2)

    def coordinate_array(running_sum, kept):
        in_sequence = jnp.swapaxes(kept, 0, 1).reshape(-1, kept.shape[-1])
        signs, whole = balance.balance_signs(in_sequence, running_sum.reshape(-1))
        flips = jnp.repeat(signs.reshape(max_pairs, num_workers).T, 2, axis=1)
        return whole.reshape(running_sum.shape), flips

    return Observer(
        functools.partial(_zeros, num_workers=num_workers),
        begin_round,
        _of_pairs(keep),
        coordinate,
        coordinate_array,
        new_pass=jnp.zeros_like,
        compares=True,
        sizes=sizes,
        copies_sent=max_pairs * (num_workers - 1),  # by an `all_to_all`, without the way back
    )


def pair_balance(sizes: Sizes) -> Observer:
    """PairBalance by each worker alone: the signs of its pairs one after the other."""

    def balanced(differences, running_sum, position):
        signs, after = balance.balance_signs(differences, running_sum)
        return after - running_sum, signs

    return independent(_zeros, _of_pairs(balanced), new_pass=jnp.zeros_like)._replace(compares=True)


class GrabSums(NamedTuple):
    """What GraB keeps: both `memory` and `evidence` of the observer have this form."""

    running_sum: jax.Array  # f[d]: of signed, centred gradients
    stale_mean: jax.Array  # f[d]: of the gradients of the pass before; 0 in the first
    gradient_sum: jax.Array  # f[d]: of this pass
    num_summed: jax.Array  # f[]: gradients in that sum
    max_norm: jax.Array  # f[]: the largest of a centred gradient so far


def grab(sizes: Sizes, *, random_scale: float | None = None) -> Observer:
    """GraB by each worker alone: gradients less the mean of the pass before, one by one.

    Args:
        sizes: not used.
        random_scale: c of the random signs: P(1) = 1/2 - <r, v> / 2c, with gradients divided by
            the largest norm so far. None: the sign of the inner product.

    References:
        Lu, Guo, De Sa, "GraB: finding provably better data permutations than random
        reshuffling", 2022, arXiv 2205.10733. Alweiss, Liu, Sawhney, "Discrepancy minimization
        via a self-balancing walk", 2020, arXiv 2006.14009, for the random signs.
    """

    def init(params: types.PyTree) -> GrabSums:
        zeros = _zeros(params)
        return GrabSums(zeros, zeros, zeros, zeros[0], zeros[0])

    def observe(losses, shared, sums: GrabSums, microbatch, position, rng):
        size = microbatch.example_ids.shape[0]
        totals, grad_sum, gradients, is_apart = _gradients(losses, shared.params, size)
        key = jax.random.fold_in(rng, _SIGN_STREAM)  # not the loss's own key
        key = jax.random.fold_in(key, microbatch.example_ids[0])
        uniform = jax.random.uniform(key, (size,))

        def step(carry, one):
            running_sum, max_norm = carry
            gradient, is_example, uniform = one
            centred = jnp.where(is_example, gradient - sums.stale_mean, 0)
            dot = jnp.dot(running_sum, centred, precision=jax.lax.Precision.HIGHEST)
            if random_scale is None:
                sign = jnp.where(dot <= 0, 1, -1)
            else:
                max_norm = jnp.maximum(max_norm, jnp.linalg.norm(centred))
                scaled = dot / jnp.where(max_norm > 0, max_norm, 1) ** 2
                sign = jnp.where(uniform < 0.5 - scaled / (2 * random_scale), 1, -1)
            return (running_sum + sign * centred, max_norm), sign.astype(jnp.int8)

        is_example = microbatch.example_mask > 0
        (running_sum, max_norm), signs = jax.lax.scan(
            step, (sums.running_sum, sums.max_norm), (gradients, is_example, uniform)
        )
        change = GrabSums(
            running_sum - sums.running_sum,
            jnp.zeros_like(sums.stale_mean),
            jnp.sum(gradients, axis=0),
            jnp.sum(is_example),
            max_norm - sums.max_norm,
        )
        signs = jnp.where(is_apart, signs, COUPLED).astype(jnp.int8)
        return totals, (grad_sum,), change, signs

    def new_pass(sums: GrabSums) -> GrabSums:
        mean = sums.gradient_sum / jnp.maximum(sums.num_summed, 1)
        mean = jnp.where(sums.num_summed > 0, mean, sums.stale_mean)  # 0: the worker was away
        zeros = jnp.zeros_like(mean)
        return GrabSums(zeros, mean, zeros, jnp.zeros_like(sums.num_summed), sums.max_norm)

    return independent(init, observe, new_pass=new_pass)._replace(compares=True)
