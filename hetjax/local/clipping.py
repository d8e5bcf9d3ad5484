"""The local rule that clips the gradient of each example before it is added up."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from hetjax import debugging, parts, trees, types
from hetjax.local import gradients, rules
from hetjax.losses import batch_loss
from hetjax.losses import loss as losses_lib
from hetjax.ordering import ordering as ordering_lib


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

    def of_examples(
        loss_fn: losses_lib.LossFn, traced: losses_lib.Traced, *, per_example_rng: bool
    ) -> rules.LocalRule:
        wrong = "the weights of loss_fn depend on the parameters; take jax.lax.stop_gradient"
        if isinstance(loss_fn, batch_loss.BatchLoss):
            wrong = "batch_loss is of all examples of a round"
        if traced.weights_vary or isinstance(loss_fn, batch_loss.BatchLoss):
            raise ValueError(f"per_example_clip takes each example by itself, and {wrong}")
        rule = gradients.gradient_sums(
            loss_fn,
            per_example_rng=per_example_rng,
            metrics=traced.metrics,
            sums_of=functools.partial(_clipped, max_norm),
        )
        made = rule._replace(**_no_gradients, of_examples=of_examples)
        return parts.remembered(made, per_example_clip, {"max_norm": max_norm})

    made = gradients.gradient_sums(_no_loss)
    return made._replace(**_no_gradients, of_examples=of_examples)


# What it adds up is no gradient of the losses, and no state is that of one example.
_no_gradients: dict[str, Any] = {"losses": None, "take": None, "state_change": None}


def _no_loss(*given: Any) -> Any:
    raise ValueError("per_example_clip: give it as rule= to fit, Run or make_train_step")


def _clipped(
    max_norm: float, losses: ordering_lib.Losses, params: types.PyTree, size: int
) -> tuple[jax.Array, Any, tuple[types.PyTree]]:
    """`(loss_sum, weight_sum, (clipped gradients, added up,))` of a microbatch of so many."""

    def of_one(params: types.PyTree, position: jax.Array) -> tuple[jax.Array, Any]:
        (value,), weights = losses(params, position[None])
        told = weights.sum()
        weight = told.weights if isinstance(told, losses_lib.Weights) else told
        return value / jnp.where(weight == 0, 1, weight), (value, weight, told)

    grad = functools.partial(jax.grad(of_one, has_aux=True), params)
    grads, (values, weights, told) = debugging.each(grad, jnp.arange(size))
    dtype = trees.wider(weights.dtype, *(g.dtype for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g.astype(dtype), grads)
    squares = (jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads))
    norms = jnp.sqrt(functools.reduce(jnp.add, squares))
    scales = weights.astype(dtype) / jnp.maximum(norms / max_norm, 1)
    scales = jnp.where(jnp.isfinite(norms), scales, jnp.nan)  # not 0, where squares overflow
    clipped = jax.tree.map(lambda g: jnp.tensordot(scales, g, axes=1), grads)
    return jnp.sum(values), jax.tree.map(lambda x: jnp.sum(x, axis=0), told), (clipped,)
