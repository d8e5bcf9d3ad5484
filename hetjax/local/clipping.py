"""The local rule that clips the gradient of each example before it is added up."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from hetjax import parts, trees, types
from hetjax.local import gradients, rules
from hetjax.losses import loss as losses_lib
from hetjax.ordering import ordering as ordering_lib
from hetjax.ordering import per_example


@parts.factory
def per_example_clip(
    max_norm: Annotated[
        float, parts.number(above=0.0, says="the largest L2 norm of an example's gradient")
    ],
) -> rules.LocalRule:
    """Gradients whose norm over all parameters is at most `max_norm`, clipped example by example.

    An update descends `sum_i w_i c_i g_i / sum_i w_i`, where g_i is the gradient of the loss of
    example i, and `c_i = min(1, max_norm / |g_i|)`. Of an example with several losses, such as one
    a token, it is the gradient of their weighted mean, and w_i the sum of their weights. The mean
    is the run's, as `data.weighting` says. Without weights and noise that is what
    `optax.contrib.differentially_private_aggregate` makes of the examples of a round.

    Noise is the optimiser's, such as `optax.add_noise`, which draws once a round. No privacy is
    claimed: nothing here samples examples, counts a budget or proves a bound.

    A microbatch of B examples holds B gradients in memory. The loss sees one example at a time, so
    one whose examples see each other is refused.

    Args:
        max_norm: of an example's gradient, above 0.

    Raises:
        ValueError: `max_norm` is not above 0; or (when the run begins) the examples of the loss
            see each other, or its weights depend on the parameters.

    Example:
        >>> import hetjax, numpy as np, optax
        >>> def loss_fn(params, batch, rng):
        ...     return params * batch["x"]  # the gradient of an example is its x
        >>> data = {"x": np.array([0.5, -3, 1, 2], np.float32)}
        >>> fields = {"microbatch_size": 2, "budget": 2, "epochs": 1, "workers": 1}
        >>> rule = hetjax.per_example_clip(1.0)
        >>> start = np.float32(0)
        >>> result = hetjax.fit(
        ...     loss_fn, start, optax.sgd(1.0), data, rule=rule, progress=False, **fields
        ... )
        >>> -float(result.params) == (0.5 - 1 + 1 + 1) / 4
        True

    References:
        Abadi et al., "Deep learning with differential privacy", 2016, arXiv 1607.00133, for the
        clipping of each example. There the sum is divided by the expected size of a batch, here by
        the sum of weights.
    """
    clipped = functools.partial(_clipped, max_norm)
    of_loss = functools.partial(gradients.gradient_sums, sums_of=clipped)
    return rules.for_a_loss("per_example_clip", of_loss, rules.Traits(by_example=True))


def _clipped(
    max_norm: float, losses: ordering_lib.Losses, params: types.PyTree, size: int
) -> tuple[jax.Array, Any, tuple[types.PyTree]]:
    """`(loss_sum, weight_sum, (clipped gradients, added up,))` of a microbatch of so many."""
    values, told, grads = per_example.each(losses, params, size)
    weights = told.weights if isinstance(told, losses_lib.Weights) else told
    dtype = trees.wider(weights.dtype, *map(jnp.result_type, jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g.astype(dtype), grads)  # of weight * loss
    squares = (jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads))
    norms = jnp.sqrt(functools.reduce(jnp.add, squares))
    limits = max_norm * jnp.abs(weights).astype(dtype)
    scales = jnp.where(norms > limits, limits / norms, 1)
    scales = jnp.where(jnp.isinf(norms), jnp.nan, scales)  # not 0, where squares overflow
    add_up = functools.partial(jnp.tensordot, scales, axes=1, precision=jax.lax.Precision.HIGHEST)
    clipped = jax.tree.map(add_up, grads)
    return jnp.sum(values), jax.tree.map(lambda x: jnp.sum(x, axis=0), told), (clipped,)
