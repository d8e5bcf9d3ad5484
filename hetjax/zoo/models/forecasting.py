"""A model of time series: a multilayer perceptron that goes on from its own forecasts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_LEAST_SPREAD = 1e-3  # of a window, over its points' mean size: a constant window has spread 0


class Forecaster(nnx.Module):
    """Dense layers with ReLU from the last points of a series to the next ones.

    The layers get the past less its last point, divided by its spread; what they give is scaled
    back. So series of any size look alike to them, and zeros are the naive forecast.

    Args:
      example_shape: `(past,)`, how many points are seen.
      num_classes: how many points are forecast at once.
      hidden: width of each hidden layer.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        hidden: Sequence[int] = (64, 64, 64),
        param_dtype: Any = jnp.float32,
    ):
        widths = [*example_shape, *hidden, num_classes]
        self.layers = nnx.List(
            nnx.Linear(width_in, width_out, param_dtype=param_dtype, rngs=rngs)
            for width_in, width_out in itertools.pairwise(widths)
        )

    def __call__(self, past: jax.Array) -> jax.Array:
        """Points `f[B, past]` to the next `f[B, num_classes]`."""
        features = (past - past[:, -1:]) / spread(past)
        for layer in self.layers[:-1]:
            features = nnx.relu(layer(features))
        return past[:, -1:] + spread(past) * self.layers[-1](features)


def spread(past: jax.Array) -> jax.Array:
    """The unit in which errors count, `f[B, 1]`: the standard deviation of each past.

    It is never less than a thousandth of the mean size of its points.
    """
    least = jnp.asarray(_LEAST_SPREAD, past.dtype)
    size = jnp.abs(past).mean(axis=1, keepdims=True)
    deviation = jnp.sqrt(jnp.maximum(past.var(axis=1, keepdims=True), (least * size) ** 2))
    return jnp.maximum(deviation, jnp.finfo(past.dtype).tiny)


def forecast(model: nnx.Module, past: jax.Array, horizon: int) -> jax.Array:
    """The next points; each forecast goes on from the forecasts before it.

    Args:
      model: from `f[B, past]` to `f[B, step]`.
      past: `f[B, past]`.
      horizon: how many points are wanted.

    Returns:
      `f[B, horizon]`.
    """
    told: list[jax.Array] = []
    count = 0
    while count < horizon:
        told.append(model(past))  # type: ignore[operator]
        count += told[-1].shape[1]
        past = jnp.concatenate([past, told[-1]], axis=1)[:, -past.shape[1] :]
    return jnp.concatenate(told, axis=1)[:, :horizon]
