"""From the loss of one example to the core's `loss_fn(params, batch, rng)`, by `jax.vmap`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import executor
from hetjax.adapters import fits
from hetjax.losses import named as named_lib


def per_example(one_example_loss: fits.LossFn) -> fits.LossFn:
    """The loss of a microbatch from that of one example: `jax.vmap` over the examples.

    In it no example can depend on another. So `fit` does not check that (`loss_over`), not
    even with orders that balance gradients.

    Args:
        one_example_loss: `(params, example, rng) -> loss f[]`, `(loss f[], weight f[])` or a
            `hetjax.Losses` of such. The leaves of `example` have no axis of the batch. For an
            example with several losses, such as one a token: `(losses f[T], weights f[T])`. It
            takes what it names besides: `frozen`, `values`.

    Returns:
        `loss_fn(params, batch, rng)`. With `per_example_rng=True` the key of an example is
        folded from its id, so neither its microbatch nor its place in it changes the key.
        Otherwise `rng` is the microbatch's key, and the example at place i of B has
        `jax.random.split(rng, B)[i]`.

    Raises:
        ValueError: (when called) the loss asks for `frozen` or `values`, and there is none.

    Example:
        >>> loss_fn = per_example(lambda w, example, rng: (example["x"] @ w - example["y"]) ** 2)
        >>> batch = {"x": jnp.eye(2), "y": jnp.array([0.0, 3.0])}
        >>> loss_fn(jnp.array([1.0, 1.0]), batch, jax.random.key(0)).tolist()
        [1.0, 4.0]
    """

    one_example_loss = named_lib.giving(one_example_loss, 3, ("frozen", "values"))

    @functools.wraps(one_example_loss)
    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        keys = rng
        if fits.is_one_key(rng):
            keys = jax.random.split(rng, jnp.shape(jax.tree.leaves(batch)[0])[0])
        return executor.each(functools.partial(one_example_loss, params), batch, keys)

    loss_fn.examples_are_apart = True  # type: ignore[attr-defined]
    return loss_fn
