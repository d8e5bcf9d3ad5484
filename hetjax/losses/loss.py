"""What a loss function is: what it may return, its weights, its keys, and what is refused."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import executor, trees, types
from hetjax.losses import forwarding, stateful
from hetjax.losses import named as named_lib
from hetjax.losses import weights as weights_lib
from hetjax.ordering import ordering

LossFn = Callable[[types.PyTree, types.PyTree, jax.Array], Any]
"""`(params, examples, rng) -> losses f32[B]`, or `(losses, weights)`, both f32[B] or, with more
axes such as tokens, of one shape f32[B, ...], or a `hetjax.Losses`, which may have metrics too, and
weights that depend on the parameters."""

_TAKEN_NAMES = ("loss", "secs")  # `train_loss` and `train_secs` of the summary are others


class Traced(NamedTuple):
    """What one trace of a loss tells."""

    metrics: tuple[str, ...] = ()  # names of those that it returns, in order
    weights_vary: bool = False  # whether the weights depend on the parameters
    changes_state: bool = False  # whether a call changes the model's state
    divisor: int = 1  # of the losses before gradients are taken: a microbatch's size in float16


class Weights(NamedTuple):
    """The weights of some examples, and the metrics of the same."""

    weights: jax.Array  # f[k]
    metrics: dict[str, tuple[jax.Array, jax.Array]]  # (weight * value f[k], weight f[k]) of each
    state_change: types.PyTree = ()  # a `StateChange` of all of them together

    def sum(self) -> "Weights":
        """Of all examples: as `weights.sum()` where there are no metrics."""
        weights, metrics = jax.tree.map(jnp.sum, (self.weights, self.metrics))
        return Weights(weights, metrics, self.state_change)


def split(returned: Any) -> types.Losses:
    """What a loss function returned, in one form.

    Raises:
        ValueError: it is a tuple that is neither `(losses, weights)` nor a `Losses`.
    """
    if isinstance(returned, types.Losses):
        return returned
    if not isinstance(returned, tuple):
        return types.Losses(returned)
    if len(returned) != 2:
        raise ValueError(
            f"loss_fn returned a tuple of {len(returned)}; allowed are losses, (losses, weights), "
            "or a hetjax.Losses"
        )
    return types.Losses(*returned)


def metrics_of(found: types.Losses) -> dict[str, tuple[Any, Any]]:
    """`{name: (values, weights)}`; weights are None where each value counts 1.

    In the type of the losses or wider, so that truths are weighed as exactly as these.
    """
    metrics = {}
    for name, value in (found.metrics or {}).items():
        if isinstance(value, tuple):
            value, weights = value
        elif found.weights is None or value.shape == found.weights.shape:
            weights = found.weights
        else:  # of an example whose losses are several: it counts as much as all of these
            weights = _sum_rest(found.weights)
        wide = trees.wider(value.dtype, found.losses.dtype, jnp.float32)
        metrics[name] = value.astype(wide), weights
    return metrics


def means(metric_sums: types.PyTree) -> dict[str, float]:
    """The mean of each metric, from its weighted sum and its weight; NaN where that is 0."""
    sums = {name: [float(x) for x in pair] for name, pair in dict(metric_sums).items()}
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def _sum_rest(values: jax.Array) -> jax.Array:
    """The sum over all axes but that of the examples: f[B, ...] as f[B]."""
    return values.sum(tuple(range(1, values.ndim))) if values.ndim > 1 else values


def weigh(values: jax.Array, weights: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
    """`(sum of weight * value f[B], sum of weights f[B])` of each example; 0 for padding.

    In float32 or wider.

    Args:
        values: [B, ...].
        weights: of the same shape; None: 1 each.
        mask: f[B], 0 for padding.
    """
    wide = trees.wider(values.dtype, jnp.float32)  # sums are never in half
    values = values.astype(wide)
    weights = jnp.ones_like(values) if weights is None else weights.astype(wide)
    if values.ndim > 1:
        mask = mask.reshape(-1, *[1] * (values.ndim - 1))
    weights = jnp.where(mask > 0, weights, 0)
    return _sum_rest(jnp.where(mask > 0, values, 0) * weights), _sum_rest(weights)


def check_loss(
    loss_fn: LossFn, params: types.PyTree, examples: types.PyTree, rng: jax.Array
) -> Traced:
    """Traces the loss, or calls it, and refuses what a round could not use.

    Raises:
        ValueError: if a parameter is not floating point, or the loss is not one number an
            example, or not one weight for each of several, with what to return instead.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name, kind = jax.tree_util.keystr(path), jnp.result_type(leaf)
            raise ValueError(f"params{name} has dtype {kind}; allowed is floating point")
    if not jax.tree.leaves(params):
        raise ValueError("params holds no arrays")
    batch_size = jax.tree.leaves(examples)[0].shape[0]

    def called(params: types.PyTree, named: types.Named, *others: Any) -> Any:
        with named_lib.scope(named):
            return loss_fn(params, *others)

    given = named_lib.current(), examples, rng
    try:
        program, returned = executor.program(called, params, *given)
        found = split(returned)
    except KeyError as error:
        fields = f"; an example has {sorted(examples)}" if isinstance(examples, dict) else ""
        raise ValueError(f"loss_fn asks for {error}, which is not there{fields}") from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        said = str(error).partition(". ")[0]
        raise ValueError(f"loss_fn: {said}. A microbatch has none: leave axis_name out") from error
    except (TypeError, ValueError) as error:
        if not (hint := _if_batches(examples)):
            raise
        raise ValueError(f"loss_fn raised {type(error).__name__}: {error}. {hint}") from error
    named_lib.tell_of_constants("loss_fn", program, "def loss_fn(params, batch, rng, *, frozen)")
    _check_losses(found, batch_size, _if_batches(examples))
    metrics = _check_metrics(found, batch_size)
    changes_state = isinstance(loss_fn, stateful.StatefulLoss) and any(
        forwarding.changed(
            lambda state: loss_fn.apply(params, state, examples, rng)[1], loss_fn.model_state
        )
    )
    narrow = any(jnp.result_type(leaf) == jnp.float16 for leaf in jax.tree.leaves(params))
    narrow |= jnp.dtype(jnp.float16) in executor.contents(program)[1]
    divisor = batch_size if narrow else 1

    def pair(*arguments: Any) -> tuple[Any, Any]:
        return split(called(*arguments))[:2]

    is_named, is_weighed = isinstance(returned, types.Losses), found.weights is not None
    if is_weighed and not is_named and weights_lib.reached(pair, params, *given):
        raise ValueError(
            "loss_fn returned a tuple whose second value depends on the parameters. To report it, "
            "return hetjax.Losses(losses, metrics={'name': value}); to weigh the losses by it, "
            "hetjax.Losses(losses, weights=value)"
        )
    varies = is_weighed and is_named and weights_lib.depend(pair, params, *given)
    return Traced(metrics, varies, changes_state, divisor)


def _if_batches(examples: types.PyTree) -> str:
    """What to give if each example is a batch: its fields have a further axis in common."""
    axes = [leaf.shape[1:2] for leaf in jax.tree.leaves(examples)]
    if len(axes) < 2 or len(set(axes)) > 1 or () in axes:
        return ""
    return (
        "If the data are a list of batches, join them by np.concatenate, or give "
        "hetjax.stream(batches, examples_per_epoch=N, batched=True)"
    )


def _check_losses(found: types.Losses, batch_size: int, more: str) -> None:
    losses, weights = found.losses, found.weights
    shape, kind = getattr(losses, "shape", None), getattr(losses, "dtype", None)
    several = shape is not None and len(shape) > 1 and shape[0] == batch_size
    is_float = kind is not None and jnp.issubdtype(kind, jnp.floating)
    if is_float and (shape == (batch_size,) or (several and weights is not None)):
        if weights is None or _is_like(weights, shape):
            return
        raise ValueError(
            f"loss_fn returned losses {_shown(losses)} with weights {_shown(weights)}: "
            "allowed is one weight for each loss; with model_state= a state; or to report numbers, "
            "hetjax.Losses(losses, metrics={'name': value})"
        )
    hint = ""
    if shape == ():
        hint = ": leave out the last .mean()"
    elif several and is_float:
        hint = ": reduce every other axis, or return (losses, weights), both of this shape"
        if shape == (batch_size, batch_size):
            hint = f": arrays [{batch_size}, 1] and [{batch_size}] together are of this shape"
        hint += more and f". {more}"
    raise ValueError(
        f"loss_fn returned losses {_shown(losses)} for a microbatch of {batch_size} examples; "
        f"allowed is floating point [{batch_size}], one an example{hint}"
    )


def _check_metrics(found: types.Losses, batch_size: int) -> tuple[str, ...]:
    if found.metrics is None:
        return ()
    if not isinstance(found.metrics, Mapping):
        raise ValueError(f"loss_fn returned metrics {_shown(found.metrics)}; allowed is a dict")
    for name, value in found.metrics.items():
        if not isinstance(name, str) or name in _TAKEN_NAMES:
            taken = ", ".join(_TAKEN_NAMES)
            raise ValueError(
                f"loss_fn returned a metric named {name!r}; allowed: texts but {taken}"
            )
        check_metric("loss_fn", name, value, (batch_size,), found.losses.shape)
    return tuple(sorted(found.metrics))


def check_metric(caller: str, name: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """Refuses a metric of which no mean can be taken.

    Args:
        caller: what returned it.
        name: of the metric.
        value: an array, or `(values, weights)`.
        shapes: those of an array; the first is of one number an example.

    Raises:
        ValueError: it is none, or has other shapes.
    """
    values, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    own = getattr(weights, "shape", ())
    if weights is None:
        fits = any(_is_like(values, shape) for shape in shapes)
    else:
        fits = own[:1] == shapes[0] and _is_like(values, own) and _is_like(weights, own)
    if not fits:
        more = "" if weights is None else f" with weights {_shown(weights)}"
        allowed = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{caller} returned the metric {name!r} as {_shown(values)}{more}; allowed are "
            f"real numbers {allowed}, or (values, weights) of one shape [{shapes[0][0]}, …]"
        )


def _is_like(value: Any, shape: tuple[int, ...] | None) -> bool:
    """Whether it is an array of real numbers or truths of this shape."""
    kind = getattr(value, "dtype", None)
    if kind is None or shape is None or value.shape != shape:
        return False
    return any(jnp.issubdtype(kind, each) for each in (jnp.bool_, jnp.integer, jnp.floating))


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype}{list(shape)}"


def is_apart(loss_fn: LossFn) -> bool:
    """Whether no example can see another, by construction: of `per_example`."""
    return getattr(loss_fn, "examples_are_apart", False)


def key_of(rng: jax.Array, ids: Any, *, per_example_rng: bool) -> jax.Array:
    """The key of a microbatch of these ids, or one for each, `key[B]`; `rng` is the pass's."""
    if per_example_rng:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, ids)
    return jax.random.fold_in(rng, ids[0])


def masked(
    loss_fn: LossFn,
    microbatch: types.Microbatch,
    rng: jax.Array,
    model_state: types.PyTree = (),
    *,
    per_example_rng: bool = False,
    metrics: Sequence[str] = (),
    divisor: int = 1,
) -> ordering.Losses:
    """`(params, positions=None) -> (weight * loss f32[k], weights f32[k])` of a microbatch.

    Of the examples at positions `positions i32[k]`, all of them where None; 0 for padding. Of an
    example that has several losses, such as one a token, they are the sums. With metrics, or a
    model's state, the second is a `Weights`.

    Args:
        loss_fn: the user's loss.
        microbatch: the examples, with padding.
        rng: the key of the run and the pass. The loss's own keys are folded from it and example
            ids, so they depend on neither worker nor quota.
        model_state: as the round begins; () of a loss without, and where changes are not asked for.
        per_example_rng: give the loss a key for each example, `key[B]`, instead of one for the
            microbatch.
        metrics: names of those that are wanted.
        divisor: what the losses are divided by; the weights are not.

    Raises:
        ValueError: (of the function returned) the loss returned a tuple that is neither
            `(losses, weights)` nor a `Losses`.
    """

    loss_fn = named_lib.giving(loss_fn, 3)

    def losses_and_weights(
        params: types.PyTree, positions: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        ids, mask, examples = microbatch
        if positions is not None:
            ids, mask, examples = jax.tree.map(lambda x: jnp.take(x, positions, axis=0), microbatch)
        key = key_of(rng, ids, per_example_rng=per_example_rng)
        change: types.PyTree = ()
        if isinstance(loss_fn, stateful.StatefulLoss) and jax.tree.leaves(model_state):
            returned, after = loss_fn.apply(params, model_state, examples, key, mask)
            change = loss_fn.change(model_state, after, jnp.sum(mask > 0))
        else:
            with named_lib.scope(mask=mask):
                returned = loss_fn(params, examples, key)
        found = split(returned)
        values, weights = weigh(found.losses, found.weights, mask)
        if divisor != 1:
            values = values / divisor
        if not metrics and not change:
            return values, weights
        measured = metrics_of(found)
        of_metrics = {name: weigh(*measured[name], mask) for name in metrics}
        return values, Weights(weights, of_metrics, change)

    return losses_and_weights
