"""The local rule that adds up gradients: the default."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import executor, parts, trees, types
from hetjax.local import rules
from hetjax.losses import batch_loss, stateful
from hetjax.losses import loss as losses_lib


class GradientSums(NamedTuple):
    """What a worker adds up in a round; in float32 or wider."""

    grad_sum: types.PyTree  # like params: sum of weight * gradient
    loss_sum: jax.Array  # f32[]: sum of weight * loss
    weight_sum: jax.Array  # f32[]
    metric_sums: types.PyTree = ()  # {name: (sum of weight * value f32[], weight f32[])}
    weight_grad_sum: types.PyTree = ()  # like params: of the weights, where they vary with these
    state_change: types.PyTree = ()  # a `StateChange`, where the model keeps state


def finish(
    shared: types.Shared, worker: tuple, sums: GradientSums
) -> tuple[tuple, types.PyTree, jax.Array]:
    """Contributes the gradient: `LocalRule.finish`."""
    return worker, sums.grad_sum, sums.weight_sum


def gradient_sums(
    loss_fn: losses_lib.LossFn,
    *,
    per_example_rng: bool = False,
    metrics: Sequence[str] = (),
    weights_vary: bool = False,
    loss_divisor: int = 1,
    sums_of: Callable[..., tuple] | None = None,
) -> rules.LocalRule:
    """Adds up `sum_i w_i * loss_i`, its gradient and `sum_i w_i` over the examples of a round.

    Args:
        loss_fn: the user's loss.
        per_example_rng: give the loss a key for each example, `key[B]`, instead of one for the
            microbatch. Either is folded from the pass's key and example ids, so it depends on
            neither worker nor quota.
        metrics: names of the metrics of the loss that are added up beside it.
        weights_vary: the weights depend on the parameters: their gradient is added up too, and the
            update descends the quotient of the sums.
        loss_divisor: losses are divided by it before gradients are taken, and what is added up is
            multiplied by it, in float32 or wider. In float16 it is the size of a microbatch: a
            gradient is then as large as that of a mean, and overflows where that does.
        sums_of: `(losses, params, size) -> (loss_sum, weight_sum, gradient's parts)` of a
            microbatch of so many, as of `Observed.take`, where that is not the gradient of the
            losses; None: it is.
    """
    names = tuple(sorted(metrics))
    own = loss_fn if isinstance(loss_fn, stateful.StatefulLoss) else None
    losses_of = functools.partial(
        losses_lib.masked,
        loss_fn,
        per_example_rng=per_example_rng,
        metrics=names,
        divisor=loss_divisor,
    )

    def begin(shared: types.Shared, worker: tuple) -> tuple[tuple, GradientSums]:
        sums = zeros(shared.params, names, weights_vary=weights_vary)
        if own is not None and jax.tree.leaves(shared.model_state):
            sums = sums._replace(state_change=own.zeros(shared.model_state))
        return worker, sums

    def add(
        shared: types.Shared,
        worker: tuple,
        sums: GradientSums,
        microbatch: types.Microbatch,
        rng: jax.Array,
    ) -> tuple[tuple, GradientSums]:
        losses = losses_of(microbatch, rng, shared.model_state)
        if sums_of is not None:
            return take(worker, sums, *sums_of(losses, shared.params, len(microbatch.example_ids)))
        if weights_vary:
            found, *grads = _both(losses, shared.params, loss_divisor)
            return take(worker, sums, *found, *((each,) for each in grads))

        def objective(params: types.PyTree) -> tuple[jax.Array, Any]:
            values, weights = losses(params)
            return jnp.sum(values), weights.sum()

        value_and_grad = jax.value_and_grad(objective, has_aux=True)
        (loss_sum, weight_sum), of_losses = value_and_grad(shared.params)
        return take(worker, sums, loss_sum, weight_sum, (of_losses,))

    def take(worker: tuple, sums: GradientSums, *found: Any) -> tuple[tuple, GradientSums]:
        return worker, _added(loss_divisor, sums, *found)

    rule = rules.LocalRule(
        begin,
        add,
        finish,
        checked=lambda worker, sums: (sums.loss_sum, sums.weight_sum),
        observed=None if sums_of else rules.Observed(losses_of, take, loss_divisor),
        reads=rules.Reads(
            loss_sum=lambda sums: sums.loss_sum,
            metrics=names,
            metric_sums=(lambda sums: sums.metric_sums) if names else None,
            weight_grads=(lambda sums: sums.weight_grad_sum) if weights_vary else None,
            state_change=None if own is None or sums_of else (lambda sums: sums.state_change),
        ),
    )
    # Of the loss, and of which keys it gets, a run is told apart from its rule.
    return parts.remembered(rule, gradient_sums, {})


@executor.compiled  # it may hold a NaN of its own
def _added(
    times: int,
    sums: GradientSums,
    loss_sum: jax.Array,
    weight_sum: Any,
    grad_parts: tuple,
    weight_grad_parts: tuple = (),
) -> GradientSums:
    """With those of a microbatch; the sum of weights may hold metrics, as `losses.Weights` does.

    Of losses that were divided by `times`, as gradients are.
    """

    def added(total: jax.Array, *parts: jax.Array) -> jax.Array:
        return total + sum(part.astype(total.dtype) for part in parts)

    def added_whole(total: jax.Array, *parts: jax.Array) -> jax.Array:
        if times == 1:
            return added(total, *parts)
        return added(total, *(part.astype(total.dtype) * times for part in parts))

    # The loss speaks for the gradients: to look at the sums would read and compute them twice
    # (an MLP of 5 million parameters took half as long again).
    measured: types.PyTree = ()
    change = jax.tree.map(jnp.zeros_like, sums.state_change)  # an observer finds none
    if isinstance(weight_sum, losses_lib.Weights):
        weight_sum, measured, change = weight_sum
    finite = trees.all_finite((grad_parts, weight_grad_parts, change))
    loss_sum = jnp.where(finite, loss_sum, jnp.nan)
    return GradientSums(
        grad_sum=jax.tree.map(added_whole, sums.grad_sum, *grad_parts),
        loss_sum=added_whole(sums.loss_sum, loss_sum),
        weight_sum=added(sums.weight_sum, weight_sum),
        metric_sums=jax.tree.map(added, sums.metric_sums, measured or ()),
        weight_grad_sum=jax.tree.map(added_whole, sums.weight_grad_sum, *weight_grad_parts),
        state_change=jax.tree.map(added, sums.state_change, change),
    )


def _both(
    losses: Callable, params: types.PyTree, divisor: int
) -> tuple[tuple[jax.Array, Any], types.PyTree, types.PyTree]:
    """`((loss_sum, weight_sum), gradient of the first, of the second)`, from one forward pass.

    The gradient of the weights is divided by `divisor`, as the losses are. The sum of weights may
    hold metrics, as `losses.Weights` does.
    """

    def sums(params: types.PyTree) -> tuple[tuple[jax.Array, jax.Array], Any]:
        values, weights = losses(params)
        weights = weights.sum()
        weight_sum = weights.weights if isinstance(weights, losses_lib.Weights) else weights
        return (jnp.sum(values), weight_sum), weights

    (loss_sum, weight_sum), pull, weights = jax.vjp(sums, params, has_aux=True)
    one, none = jnp.ones_like(loss_sum), jnp.zeros_like(weight_sum)
    (of_losses,), (of_weights,) = pull((one, none)), pull((none, one / divisor))
    return (loss_sum, weights), of_losses, of_weights


def zeros(
    params: types.PyTree, metrics: Sequence[str] = (), *, weights_vary: bool = False
) -> GradientSums:
    """Sums before the first microbatch."""
    scalar = trees.wider(*map(jnp.result_type, jax.tree.leaves(params)), jnp.float32)
    zero: Any = np.zeros((), scalar)
    of_metrics = dict.fromkeys(metrics, (zero, zero))
    of_weights = trees.accumulator_zeros(params) if weights_vary else ()
    return GradientSums(trees.accumulator_zeros(params), zero, zero, of_metrics or (), of_weights)


def rule_of(
    given: rules.LocalRule | None,
    loss_fn: losses_lib.LossFn,
    traced: losses_lib.Traced,
    *,
    per_example_rng: bool,
) -> rules.LocalRule:
    """The rule that was given; None: gradients are added up, and the metrics of the loss.

    Raises:
        ValueError: it drops metrics of the loss, or the gradient of its weights.
    """
    metrics, weights_vary, changes_state, loss_divisor = traced
    alone = given is not None and given.traits.by_example
    if (given is None or alone) and isinstance(loss_fn, batch_loss.BatchLoss):
        raise ValueError(
            "batch_loss: a step has one pass, and this loss needs two; take hetjax.fit or "
            "hetjax.Run"
        )
    if given is None:
        return gradient_sums(
            loss_fn,
            per_example_rng=per_example_rng,
            metrics=metrics,
            weights_vary=weights_vary,
            loss_divisor=loss_divisor,
        )
    if given.of_loss is not None:
        given = given.of_loss(loss_fn, per_example_rng=per_example_rng, metrics=metrics)
    if missing := [name for name in metrics if name not in given.reads.metrics]:
        raise ValueError(
            f"rule: loss_fn returns the metrics {', '.join(missing)}, and the rule's metrics lack "
            "them"
        )
    if changes_state and given.reads.state_change is None:
        raise ValueError(
            "rule: loss_fn changes the model's state, and the rule's state_change is None; "
            "gradient_sums has one"
        )
    if weights_vary and (alone or given.observed is not None) and given.reads.weight_grads is None:
        raise ValueError(
            "rule: the weights of loss_fn depend on the parameters; take gradient_sums(loss_fn, "
            "weights_vary=True), or jax.lax.stop_gradient(weights)"
        )
    return given
