"""From a Flax model to the core's `loss_fn(params, batch, rng) -> losses f32[B]`, and back.

    def loss(model, batch):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    loss_fn, params = nnx_loss(model, loss)              # Flax NNX
    loss_fn, params = linen_loss(module, variables, loss)  # Flax Linen
    trained = nnx_model(model, params)

`loss` gets something that is called like the model, and returns one loss for each example (or
losses and weights). Parameters are nested dicts of arrays, as optax and a checkpoint want them.
Random streams (dropout) are seeded afresh in each call from its `rng`, one key for the batch or
one for each example, so the model passed in is never changed. Other variables that are no
parameters are constants.

State across examples is refused: each worker would keep statistics of its own, which quotas of
different size make differ more, and no sum at the end of the round reconciles them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta

PerExampleFn = Callable[[Any, Any], Any]
LossFn = Callable[[Any, Any, jax.Array], Any]
MetricsFn = Callable[[Any, Any], Any]

_REFUSAL = (
    "The model keeps state across examples ({where}), as BatchNorm does. Workers with "
    "different quotas would gather different statistics, and parameters alone are reduced. Use "
    "GroupNorm or LayerNorm in its place, or fold fixed statistics into constants."
)


def nnx_loss(model: nnx.Module, per_example_loss: PerExampleFn) -> tuple[LossFn, Any]:
    """Makes the core's loss of a Flax NNX model, in training mode.

    Args:
      model: the model; it is copied, not changed.
      per_example_loss: `(model, batch) -> losses f[B]`, or `(losses f[B], weights f[B])`.

    Returns:
      `(loss_fn, params)`: the pure loss, and the initial parameters as nested dicts.

    Raises:
      ValueError: the model has an `nnx.BatchStat`.
    """
    copy = nnx.clone(model)
    copy.train()
    build = _nnx_builder(copy)
    streams = sorted({str(key.tag) for _, key in nnx.to_flat_state(nnx.state(copy, nnx.RngKey))})

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        def losses(batch: Any, key: jax.Array) -> Any:
            built = build(params)
            if streams:
                keys: Any = {name: _fold(key, index) for index, name in enumerate(streams)}
                nnx.reseed(built, policy="match_shape", **keys)
            return per_example_loss(built, batch)

        return _by_key(losses, batch, rng) if streams else losses(batch, rng)

    return loss_fn, _pure(nnx.state(copy, nnx.Param))


def nnx_metrics(model: nnx.Module, per_example_metrics: PerExampleFn) -> MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax NNX model, in evaluation mode (no dropout).

    Args:
      model: the model; it is copied, not changed.
      per_example_metrics: `(model, batch) -> {name: f[B]}`.

    Raises:
      ValueError: the model has an `nnx.BatchStat`.
    """
    copy = nnx.clone(model)
    copy.eval()
    build = _nnx_builder(copy)
    return lambda params, batch: per_example_metrics(build(params), batch)


def nnx_model(model: nnx.Module, params: Any) -> Any:
    """Returns a copy of `model` with `params`, for instance those that training returned.

    Raises:
      ValueError: `params` has not the structure or the shapes of the model's parameters.
    """
    expected = jax.tree.map(jnp.shape, _pure(nnx.state(model, nnx.Param)))
    given = jax.tree.map(jnp.shape, params)
    if expected != given:
        raise ValueError(
            f"params do not fit the model: got shapes {given}, must be {expected}. Pass the "
            "params of one worker (without the worker axis) of this same model."
        )
    return _nnx_builder(model)(params)


def linen_loss(
    module: Any,
    variables: Mapping[str, Any],
    per_example_loss: PerExampleFn,
    *,
    streams: Sequence[str] = ("dropout",),
) -> tuple[LossFn, Any]:
    """Makes the core's loss of a Flax Linen module.

    Args:
      module: the module.
      variables: what `module.init` returned.
      per_example_loss: `(model, batch) -> losses f[B]`, or `(losses f[B], weights f[B])`;
        `model(...)` is `module.apply(variables, ...)`. Pass what the module wants in training,
        such as `model(batch["image"], train=True)`.
      streams: names of the random streams that the module uses.

    Returns:
      `(loss_fn, params)`: the pure loss, and the initial parameters.

    Raises:
      ValueError: there is a collection `batch_stats`.
    """
    params, constants = _linen_variables(variables)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        def losses(batch: Any, key: jax.Array) -> Any:
            rngs = {name: _fold(key, index) for index, name in enumerate(streams)}

            def model(*args: Any, **kwargs: Any) -> Any:
                return module.apply({"params": params, **constants}, *args, rngs=rngs, **kwargs)

            return per_example_loss(model, batch)

        return _by_key(losses, batch, rng) if streams else losses(batch, rng)

    return loss_fn, params


def linen_metrics(
    module: Any, variables: Mapping[str, Any], per_example_metrics: PerExampleFn
) -> MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax Linen module, without random streams.

    Args:
      module: the module.
      variables: what `module.init` returned.
      per_example_metrics: `(model, batch) -> {name: f[B]}`, as in `linen_loss`.

    Raises:
      ValueError: there is a collection `batch_stats`.
    """
    _, constants = _linen_variables(variables)

    def metrics(params: Any, batch: Any) -> Any:
        def model(*args: Any, **kwargs: Any) -> Any:
            return module.apply({"params": params, **constants}, *args, **kwargs)

        return per_example_metrics(model, batch)

    return metrics


def _by_key(losses: Callable[[Any, jax.Array], Any], batch: Any, rng: jax.Array) -> Any:
    """Calls `losses` with the batch and its key, or example by example with a key for each."""
    if jnp.ndim(rng) == (0 if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else 1):
        return losses(batch, rng)

    def one(example: Any, key: jax.Array) -> Any:
        of_one = jax.tree.map(lambda leaf: leaf[None], example)
        return jax.tree.map(lambda leaf: leaf[0], losses(of_one, key))

    return jax.vmap(one)(batch, rng)


def _fold(key: jax.Array, index: int) -> jax.Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.random.fold_in(key, index)


def _pure(state: Any) -> Any:
    return nnx.to_pure_dict(state)


def _nnx_builder(model: nnx.Module) -> Callable[[Any], Any]:
    """Returns the function from parameters to a new model, everything else as in `model`."""
    stateful = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))]
    if stateful:
        where = ", ".join(".".join(map(str, path)) for path in stateful[:4])
        raise ValueError(_REFUSAL.format(where=where))
    graphdef, template, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def build(params: Any) -> Any:
        # New variables in each call: a merged model changes those that it is given (the counts
        # of its random streams), and those of another trace may not be changed at all.
        state, constants = jax.tree.map(lambda leaf: leaf, (template, rest))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state, constants)

    return build


def _linen_variables(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    if not isinstance(variables, Mapping) or "params" not in variables:
        what = f"has {sorted(variables)}" if isinstance(variables, Mapping) else "is no dict"
        raise ValueError(
            f"variables {what} and must have 'params': give all that module.init returned. Of bare "
            "parameters: {'params': params}"
        )
    if variables.get("batch_stats"):
        where = ", ".join(sorted(variables["batch_stats"]))
        raise ValueError(_REFUSAL.format(where=f"batch_stats: {where}"))
    plain = dict(meta.unbox(variables))
    return plain.pop("params"), plain
