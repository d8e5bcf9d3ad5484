"""The pieces that the reference models share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def check_image_shape(
    name: str, example_shape: Sequence[int], least_size: int
) -> tuple[int, int, int]:
    """The shape of an image, `(height, width, channels)`.

    Raises:
      ValueError: it is no such shape, or too small for the model of this name.
    """
    if len(example_shape) != 3 or min(example_shape[:2]) < least_size:
        raise ValueError(
            f"model {name!r}: got examples of shape {tuple(example_shape)}, must be (height, "
            f"width, channels) of at least {least_size} by {least_size}."
        )
    height, width, channels = example_shape
    return height, width, channels


def group_norm(width: int, **shared: Any) -> nnx.GroupNorm:
    """Normalisation of each example in groups of 8 channels."""
    return nnx.GroupNorm(width, num_groups=None, group_size=8, **shared)


def batch_norm(width: int, **shared: Any) -> nnx.BatchNorm:
    """Normalisation by a microbatch's statistics; a tenth of them enters the running averages."""
    return nnx.BatchNorm(width, momentum=0.9, **shared)


NORMS = {"group": group_norm, "batch": batch_norm}


def normalized(norm: Any, features: jax.Array) -> jax.Array:
    """`norm(features)`. Inside, Flax takes the wider of two types, even if JAX is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return norm(features)


def scale_images(images: jax.Array, input_max: float, dtype: Any) -> jax.Array:
    """Returns `images / input_max` as floating point: with 255, uint8 pixels lie in [0, 1]."""
    return jnp.asarray(images, dtype) / jnp.asarray(input_max, dtype)


# Output rows that `conv_relu_pool` computes by one matrix product. Its banded matrix has
# `rows * (rows + kernel - 1) / kernel` times as many numbers as the kernel; 4 to 7 rows took the
# same time.
_ROWS = 5


def max_pool_2x2(features: jax.Array, *, height_axis: int = 1) -> jax.Array:
    """Takes the maximum of each block of 2x2; an odd last row or column is left out.

    Equal to `nnx.max_pool(features, (2, 2), strides=(2, 2))`. A reshape and a maximum have a
    cheaper gradient on CPU than the window reduction: LeNet, loss and gradient of 32 CIFAR-10
    images on 2 shared cores took 8.3 ms against 9.1 ms (medians of 1,000 interleaved calls).

    Args:
      features: `f[B, height, width, channels]`, or any other array whose axis 2 is the width.
      height_axis: 0 or 1.

    Returns:
      `features` with half the height and width.
    """
    shape: list[int] = []
    for axis, size in enumerate(features.shape):
        if axis in (height_axis, 2):
            features = jax.lax.slice_in_dim(features, 0, size // 2 * 2, axis=axis)
            shape += [size // 2, 2]
        else:
            shape.append(size)
    return features.reshape(shape).max(axis=(height_axis + 1, 4))


def conv_relu_pool(images: jax.Array, filters: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Applies convolutions without padding, each with ReLU and pooling of 2x2.

    Args:
      images: `f[B, height, width, channels]`.
      filters: kernels `f[kernel_height, kernel_width, channels_in, channels_out]` and biases
        `f[channels_out]`.

    Returns:
      `f[B, height', width', channels']`. On CPU XLA's convolution of so few channels is slow, so
      it is computed by matrix products: LeNet, loss and gradient of 32 CIFAR-10 images on one core
      took 1.8 ms against 4.7 ms (lower quartiles of interleaved calls).
    """
    return jax.lax.platform_dependent(
        images, tuple(filters), cpu=_conv_relu_pool_by_rows, default=conv_relu_pool_by_xla
    )


def conv_relu_pool_by_xla(
    images: jax.Array, filters: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """`conv_relu_pool` by XLA's own convolution."""
    features = images
    for kernel, bias in filters:
        axes = ("NHWC", "HWIO", "NHWC")
        features = jax.lax.conv_general_dilated(
            features, kernel, (1, 1), "VALID", dimension_numbers=axes
        )
        features = max_pool_2x2(jax.nn.relu(features + bias[None, None, None, :]))
    return features


def _conv_relu_pool_by_rows(
    images: jax.Array, filters: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
    features = images.transpose(1, 3, 2, 0)  # batch last: all but the products is vectorised
    for kernel, bias in filters:
        features = _conv_by_rows(features, kernel) + bias[None, :, None, None]
        features = max_pool_2x2(jax.nn.relu(features), height_axis=0)
    return features.transpose(3, 0, 2, 1)


@functools.partial(jax.checkpoint, prevent_cse=False)  # keeps `features`, whose axis B is whole
def _conv_by_rows(features: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution without padding, from `f[height, channels, width, B]` to the like.

    It copies out the windows of each row alone. A few output rows at a time are one product of a
    banded matrix with them. So the copy is `kernel_width` times as large as the input, not
    `kernel_height * kernel_width` times; about half of each product is with zeros.
    """
    kernel_height, kernel_width, channels_in, channels_out = kernel.shape
    height, _, width, batch = features.shape
    height, width = height - kernel_height + 1, width - kernel_width + 1
    windows = jnp.stack([features[:, :, j : j + width] for j in range(kernel_width)], axis=1)
    windows = windows.reshape(-1, kernel_width * channels_in, width * batch)
    blocks = []
    for start in range(0, height, _ROWS):
        rows = min(_ROWS, height - start)
        band = jnp.stack(
            [
                jnp.pad(kernel, ((row, rows - 1 - row), (0, 0), (0, 0), (0, 0)))
                for row in range(rows)
            ]
        )  # [rows, rows + kernel_height - 1, kernel_width, channels_in, channels_out]
        band = band.transpose(0, 4, 1, 2, 3).reshape(rows * channels_out, -1)
        block = windows[start : start + rows + kernel_height - 1].reshape(-1, width * batch)
        blocks.append((band @ block).reshape(rows, channels_out, width, batch))
    return jnp.concatenate(blocks)
