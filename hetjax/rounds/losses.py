"""What a loss function is: what it may return, its weights, its keys, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees, types
from hetjax.ordering import halves
from hetjax.rounds import inputs

LossFn = Callable[[types.PyTree, types.PyTree, jax.Array], Any]
"""`(params, examples, rng) -> losses f32[B]`, or `(losses f32[B], weights f32[B])`."""


def _split_losses(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise ValueError(
                f"loss_fn returned a tuple of {len(returned)}; allowed are losses f32[B] alone, "
                "or (losses, weights), both f32[B]"
            )
        return returned
    return returned, None


def check_loss(
    loss_fn: LossFn, params: types.PyTree, examples: types.PyTree, rng: jax.Array
) -> None:
    """Traces the loss once, without computing, and refuses what a round could not use.

    Raises:
        ValueError: if a parameter is not floating point, or the loss is not one number an
            example, with what to return instead.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}; allowed "
                "are floating point parameters. Keep constants out of params (close over them)"
            )
    if not jax.tree.leaves(params):
        raise ValueError("params holds no arrays: there is nothing to train")
    batch_size = jax.tree.leaves(examples)[0].shape[0]
    try:
        returned = jax.eval_shape(loss_fn, params, examples, rng)
    except KeyError as error:
        fields = f"; an example has {sorted(examples)}" if isinstance(examples, dict) else ""
        raise ValueError(f"loss_fn asks for {error}, which is not there{fields}") from error
    except Exception as error:
        if hint := inputs.hint_of_variables(params, error):
            raise ValueError(f"loss_fn failed with {type(error).__name__}: {hint}") from error
        raise
    losses, weights = _split_losses(returned)
    for name, value in (("losses", losses), ("weights", weights)):
        if value is None and name == "weights":
            continue
        shape = getattr(value, "shape", None)
        if shape == (batch_size,) and jnp.issubdtype(value.dtype, jnp.floating):
            continue
        given = f"{value.dtype}{list(shape)}" if shape is not None else type(value).__name__
        hint = (
            "Return the loss of each example instead of their mean: leave out the last .mean()"
            if shape == ()
            else "Reduce every axis but the first, over the examples"
        )
        raise ValueError(
            f"loss_fn returned {name} {given} for a microbatch of {batch_size} examples; "
            f"allowed is floating point [{batch_size}], one an example. {hint}. (hetjax divides "
            "by the total weight once, over all workers; a mean of means would be wrong as soon "
            "as quotas differ.)"
        )


def weighted(loss_fn: LossFn) -> Callable[[types.PyTree, types.PyTree, jax.Array], jax.Array]:
    """`(params, examples, rng) -> weight * loss f[B]`."""

    def product(params: types.PyTree, examples: types.PyTree, rng: jax.Array) -> jax.Array:
        losses, weights = _split_losses(loss_fn(params, examples, rng))
        return losses if weights is None else losses * weights

    return product


def masked(
    loss_fn: LossFn,
    microbatch: types.Microbatch,
    rng: jax.Array,
    *,
    per_example_rng: bool = False,
) -> halves.Losses:
    """`(params, positions=None) -> (weight * loss f32[k], weights f32[k])` of a microbatch.

    Of the examples at positions `positions i32[k]`, all of them where None; 0 for padding.

    Args:
        loss_fn: the user's loss, one number an example.
        microbatch: the examples, with padding.
        rng: the key of the run and the pass. The loss's own keys are folded from it and example
            ids, so they depend on neither worker nor quota.
        per_example_rng: give the loss a key for each example, `key[B]`, instead of one for the
            microbatch.
    """

    def losses_and_weights(
        params: types.PyTree, positions: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        ids, mask, examples = microbatch
        if positions is not None:
            ids, mask, examples = jax.tree.map(
                lambda x: jnp.take(x, positions, axis=0), (ids, mask, examples)
            )
        if per_example_rng:
            key = jax.vmap(jax.random.fold_in, (None, 0))(rng, ids)
        else:
            key = jax.random.fold_in(rng, ids[0])
        losses, weights = _split_losses(loss_fn(params, examples, key))
        wide = trees.wider(losses.dtype, jnp.float32)  # sums are never in half
        losses = losses.astype(wide)
        weights = jnp.ones_like(losses) if weights is None else weights.astype(wide)
        weights = jnp.where(mask > 0, weights, 0)
        return jnp.where(mask > 0, losses, 0) * weights, weights

    return losses_and_weights
