"""A residual network for 32x32 images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.models import layers


class ResNet8(nnx.Module):
    """ResNet-8: a convolution, three blocks of two, the mean over the image, a dense layer.

    All convolutions are 3x3. The second and the third block halve height and width and double the
    channels; there a convolution of 1x1 carries the input past the block. With `GroupNorm` in
    groups of 8 channels: normalisation without state across examples. Pixels are scaled to
    [-2, 2]. 77,850 parameters on 32x32x3 and 10 classes.

    Args:
      example_shape: `(height, width, channels)`, height and width 8 or more.
      num_classes: number of logits.
      width: channels of the first block, a multiple of 8.
      input_max: the largest value of a pixel.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.

    Raises:
      ValueError: the images are too small, or the width is no multiple of 8.

    References:
      He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2016, arXiv 1512.03385.
      Wu, He, "Group normalization", 2018, arXiv 1803.08494.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        width: int = 16,
        input_max: float = 255.0,
        param_dtype: Any = jnp.float32,
    ):
        layers.check_image_shape("resnet8", example_shape, 8)
        if width % 8:
            raise ValueError(
                f"model.width: got {width}, must be a multiple of 8 with model.name='resnet8', "
                "whose channels are normalised in groups of 8."
            )
        shared: Any = {"param_dtype": param_dtype, "rngs": rngs}
        self.conv = nnx.Conv(example_shape[-1], width, (3, 3), use_bias=False, **shared)
        self.norm = layers.group_norm(width, **shared)
        self.blocks = nnx.List(
            _Block(width_in, width_out, stride, **shared)
            for width_in, width_out, stride in (
                (width, width, 1),
                (width, 2 * width, 2),
                (2 * width, 4 * width, 2),
            )
        )
        self.dense = nnx.Linear(4 * width, num_classes, **shared)
        self.input_max = input_max
        self.param_dtype = param_dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        features = layers.scale_images(images, self.input_max, self.param_dtype)
        features = 4 * features - 2  # of mean about 0 and spread about 1
        features = nnx.relu(layers.normalized(self.norm, self.conv(features)))
        for block in self.blocks:
            features = block(features)
        return self.dense(features.mean(axis=(1, 2)))


class _Block(nnx.Module):
    def __init__(self, width_in: int, width_out: int, stride: int, **shared: Any):
        strides = (stride, stride)
        plain: Any = {"use_bias": False, **shared}
        self.conv1 = nnx.Conv(width_in, width_out, (3, 3), strides=strides, **plain)
        self.norm1 = layers.group_norm(width_out, **shared)
        self.conv2 = nnx.Conv(width_out, width_out, (3, 3), **plain)
        self.norm2 = layers.group_norm(width_out, **shared)
        same = width_in == width_out and stride == 1
        self.past = None if same else nnx.Conv(width_in, width_out, (1, 1), strides, **plain)

    def __call__(self, features: jax.Array) -> jax.Array:
        inner = nnx.relu(layers.normalized(self.norm1, self.conv1(features)))
        inner = layers.normalized(self.norm2, self.conv2(inner))
        past = features if self.past is None else self.past(features)
        return nnx.relu(inner + past)
