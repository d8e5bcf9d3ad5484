"""Convolutional models: LeNet for 28x28 and 32x32 images, a small one for 8x8 digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.models import layers


class LeNet(nnx.Module):
    """LeNet-5 with ReLU and maximum pooling; 62,006 parameters on 32x32x3 and 10 classes.

    Two convolutions of 5x5 without padding, 6 and 16 channels wide, each followed by pooling of
    2x2, then dense layers of 120, 84 and `num_classes`.

    Args:
      example_shape: `(height, width, channels)`, height and width 16 or more.
      num_classes: number of logits.
      input_max: the largest value of a pixel.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.

    Raises:
      ValueError: the images are too small.

    References:
      LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition",
      1998.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        input_max: float = 255.0,
        param_dtype: Any = jnp.float32,
    ):
        height, width, channels = layers.check_image_shape("lenet", example_shape, 16)
        rest = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        shared: Any = {"param_dtype": param_dtype, "rngs": rngs}
        self.conv1 = nnx.Conv(channels, 6, (5, 5), padding="VALID", **shared)
        self.conv2 = nnx.Conv(6, 16, (5, 5), padding="VALID", **shared)
        self.dense1 = nnx.Linear(rest[0] * rest[1] * 16, 120, **shared)
        self.dense2 = nnx.Linear(120, 84, **shared)
        self.dense3 = nnx.Linear(84, num_classes, **shared)
        self.input_max = input_max
        self.param_dtype = param_dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        features = layers.scale_images(images, self.input_max, self.param_dtype)
        convs = (self.conv1, self.conv2)
        filters = [(conv.kernel[...], conv.bias[...]) for conv in convs]  # type: ignore[index]
        features = layers.conv_relu_pool(features, filters)
        features = features.reshape(features.shape[0], -1)
        features = nnx.relu(self.dense1(features))
        features = nnx.relu(self.dense2(features))
        return self.dense3(features)


class SmallCNN(nnx.Module):
    """Two convolutions of 3x3, each with pooling of 2x2, and a dense layer, for 8x8 digits.

    With `GroupNorm` after each convolution: normalisation without state across examples.

    Args:
      example_shape: `(height, width, channels)`, height and width 4 or more.
      num_classes: number of logits.
      widths: channels of the two convolutions, multiples of 8.
      input_max: the largest value of a pixel.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.

    Raises:
      ValueError: the images are too small.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        widths: tuple[int, int] = (16, 32),
        input_max: float = 255.0,
        param_dtype: Any = jnp.float32,
    ):
        height, width, channels = layers.check_image_shape("small_cnn", example_shape, 4)
        shared: Any = {"param_dtype": param_dtype, "rngs": rngs}
        self.conv1 = nnx.Conv(channels, widths[0], (3, 3), **shared)
        self.norm1 = nnx.GroupNorm(widths[0], num_groups=None, group_size=8, **shared)
        self.conv2 = nnx.Conv(widths[0], widths[1], (3, 3), **shared)
        self.norm2 = nnx.GroupNorm(widths[1], num_groups=None, group_size=8, **shared)
        self.dense = nnx.Linear((height // 4) * (width // 4) * widths[1], num_classes, **shared)
        self.input_max = input_max
        self.param_dtype = param_dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        features = layers.scale_images(images, self.input_max, self.param_dtype)
        features = layers.max_pool_2x2(
            nnx.relu(layers.normalized(self.norm1, self.conv1(features)))
        )
        features = layers.max_pool_2x2(
            nnx.relu(layers.normalized(self.norm2, self.conv2(features)))
        )
        return self.dense(features.reshape(features.shape[0], -1))
