"""Residual networks for 32x32 images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.models import layers


def resnet8(
    example_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 16,
    norm: str = "group",
    **options: Any,
) -> ResNet:
    """ResNet-8: three stages of one block. 77,850 parameters on 32x32x3 and 10 classes."""
    more = {"width": width, "norm": norm, **options}
    return ResNet("resnet8", example_shape, num_classes, (1, 1, 1), **more)


def resnet18(
    example_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    norm: str = "group",
    **options: Any,
) -> ResNet:
    """ResNet-18 for small images: four stages of two blocks, and no pooling at first.

    11,173,962 parameters on 32x32x3 and 10 classes, 64 channels wide.
    """
    more = {"width": width, "norm": norm, **options}
    return ResNet("resnet18", example_shape, num_classes, (2, 2, 2, 2), **more)


class ResNet(nnx.Module):
    """A convolution, stages of blocks of two, the mean over the image, a dense layer.

    All convolutions are 3x3. Each stage but the first halves height and width and doubles the
    channels; there a convolution of 1x1, and a BatchNorm, carry the input past the block. Pixels
    are scaled to [-2, 2].

    Args:
      name: what messages call it.
      example_shape: `(height, width, channels)`, height and width 8 or more.
      num_classes: number of logits.
      stages: the number of blocks of each.
      width: channels of the first stage.
      norm: 'group': GroupNorm in groups of 8 channels, without state across examples, the width a
        multiple of 8; or 'batch': BatchNorm, whose running averages are the model's state.
      input_max: the largest value of a pixel.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters.

    Raises:
      ValueError: the images are too small, or the width is no multiple of 8.

    References:
      He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2016, arXiv 1512.03385.
      Wu, He, "Group normalization", 2018, arXiv 1803.08494.
      Ioffe, Szegedy, "Batch normalization", 2015, arXiv 1502.03167.
    """

    def __init__(
        self,
        name: str,
        example_shape: Sequence[int],
        num_classes: int,
        stages: Sequence[int],
        *,
        rngs: nnx.Rngs,
        width: int,
        norm: str = "group",
        input_max: float = 255.0,
        param_dtype: Any = jnp.float32,
    ):
        layers.check_image_shape(name, example_shape, 8)
        if width % 8 and norm == "group":
            raise ValueError(
                f"model.width: got {width}, must be a multiple of 8 with model.name={name!r}, "
                "whose channels are normalised in groups of 8."
            )
        shared: Any = {"param_dtype": param_dtype, "rngs": rngs}
        self.conv = nnx.Conv(example_shape[-1], width, (3, 3), use_bias=False, **shared)
        self.norm = layers.NORMS[norm](width, **shared)
        blocks, width_in = [], width
        for stage, count in enumerate(stages):
            for index in range(count):
                width_out = width * 2**stage
                stride = 2 if stage and not index else 1
                blocks.append(_Block(width_in, width_out, stride, norm, **shared))
                width_in = width_out
        self.blocks = nnx.List(blocks)
        self.dense = nnx.Linear(width_in, num_classes, **shared)
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
    def __init__(self, width_in: int, width_out: int, stride: int, norm: str, **shared: Any):
        strides = (stride, stride)
        plain: Any = {"use_bias": False, **shared}
        self.conv1 = nnx.Conv(width_in, width_out, (3, 3), strides=strides, **plain)
        self.norm1 = layers.NORMS[norm](width_out, **shared)
        self.conv2 = nnx.Conv(width_out, width_out, (3, 3), **plain)
        self.norm2 = layers.NORMS[norm](width_out, **shared)
        same = width_in == width_out and stride == 1
        self.past = None if same else nnx.Conv(width_in, width_out, (1, 1), strides, **plain)
        is_normed = norm == "batch" and not same
        self.past_norm = layers.batch_norm(width_out, **shared) if is_normed else None

    def __call__(self, features: jax.Array) -> jax.Array:
        inner = nnx.relu(layers.normalized(self.norm1, self.conv1(features)))
        inner = layers.normalized(self.norm2, self.conv2(inner))
        past = features if self.past is None else self.past(features)
        if self.past_norm is not None:
            past = layers.normalized(self.past_norm, past)
        return nnx.relu(inner + past)
