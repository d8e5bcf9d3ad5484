"""Models that take an image as a vector: logistic regression and the multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.models import layers


class MLP(nnx.Module):
    """Dense layers with ReLU between them.

    Args:
      example_shape: of one image; its pixels become a vector.
      num_classes: number of logits.
      hidden: width of each hidden layer.
      input_max: the largest value of a pixel.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        hidden: Sequence[int] = (128,),
        input_max: float = 255.0,
        param_dtype: Any = jnp.float32,
    ):
        widths = [math.prod(example_shape), *hidden, num_classes]
        self.layers = nnx.List(
            nnx.Linear(width_in, width_out, param_dtype=param_dtype, rngs=rngs)
            for width_in, width_out in itertools.pairwise(widths)
        )
        self.input_max = input_max
        self.param_dtype = param_dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        features = layers.scale_images(images, self.input_max, self.param_dtype)
        features = features.reshape(features.shape[0], -1)
        for layer in self.layers[:-1]:
            features = nnx.relu(layer(features))
        return self.layers[-1](features)


def logistic(
    example_shape: Sequence[int], num_classes: int, *, rngs: nnx.Rngs, **options: Any
) -> MLP:
    """Multinomial logistic regression: an `MLP` without hidden layers, convex."""
    return MLP(example_shape, num_classes, rngs=rngs, hidden=(), **options)
