"""Small reference models, by name. The core does not know them: it knows a loss function.

Each factory takes the shape of one example (`[height, width, channels]`), the number of classes
and `rngs`, and returns a Flax NNX module from images `[B, height, width, channels]`, uint8 or
float, to logits `f32[B, num_classes]`. None of them keeps state across examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from hetjax import values
from hetjax.models import convolutional, dense

MODELS: dict[str, Callable[..., nnx.Module]] = {
    "logistic": dense.logistic,
    "mlp": dense.MLP,
    "lenet": convolutional.LeNet,
    "small_cnn": convolutional.SmallCNN,
}


def make(
    name: str, example_shape: Sequence[int], num_classes: int, *, rngs: nnx.Rngs, **options: Any
) -> Any:
    """Makes a reference model.

    Args:
      name: a key of `MODELS`.
      example_shape: `(height, width, channels)` of one image.
      num_classes: number of logits.
      rngs: keys for the initial parameters.
      **options: of the model: `hidden` (mlp), `input_max` (all: the largest value of a pixel,
        255.0 by default, 16.0 for the digits), `param_dtype` (all).

    Returns:
      a Flax NNX module from images to logits.

    Raises:
      ValueError: there is no such model, or it cannot take images of this size.

    Example:
      >>> import numpy as np
      >>> model = make("logistic", (8, 8, 1), 10, rngs=nnx.Rngs(0), input_max=16.0)
      >>> model(np.zeros((5, 8, 8, 1), np.uint8)).shape
      (5, 10)
    """
    if name not in MODELS:
        hint = values.nearest(name, list(MODELS))
        raise ValueError(f"model: got {name!r}, must be one of {', '.join(MODELS)}.{hint}")
    return MODELS[name](tuple(example_shape), num_classes, rngs=rngs, **options)
