"""Small reference models, by name. The core does not know them: it knows a loss function.

Each factory takes the shape of one example, the number of classes and `rngs`, and returns a Flax
NNX module. `TAKES` says which field of an example a model takes:

- images `[B, height, width, channels]`, uint8 or float, features `f[B, size]` and words
  `i32[B, most]` give logits `f32[B, num_classes]`;
- tokens `i32[B, length + 1]` give logits `f32[B, length, num_classes]`;
- the past of a series, `f[B, past]`, gives its next points.

Residual networks keep state with `norm="batch"`, the others never. `dense`, `convolutional` and
`residual` have those of images, `text` those of words and tokens, `forecasting` that of series;
`layers` are shared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from hetjax.parts import options as options_lib
from hetjax.zoo.models import convolutional, dense, forecasting, residual, text

MODELS: dict[str, Callable[..., nnx.Module]] = {
    "logistic": dense.logistic,
    "mlp": dense.MLP,
    "lenet": convolutional.LeNet,
    "small_cnn": convolutional.SmallCNN,
    "resnet8": residual.resnet8,
    "resnet18": residual.resnet18,
    "bag_of_words": text.BagOfWords,
    "lstm": text.LSTM,
    "transformer": text.Transformer,
    "forecaster": forecasting.Forecaster,
}
TAKES: dict[str, tuple[str, ...]] = {
    "logistic": ("image", "features"),
    "mlp": ("image", "features"),
    "lenet": ("image",),
    "small_cnn": ("image",),
    "resnet8": ("image",),
    "resnet18": ("image",),
    "bag_of_words": ("words",),
    "lstm": ("tokens",),
    "transformer": ("tokens",),
    "forecaster": ("past",),
}


def options_of(name: str) -> tuple[str, ...]:
    """The options of a model beside those of all models: keyword arguments of its factory."""
    factory = MODELS[name]
    signature = inspect.signature(factory.__init__ if inspect.isclass(factory) else factory)
    common = ("self", "example_shape", "num_classes", "rngs", "options")
    return tuple(option for option in signature.parameters if option not in common)


def make(
    name: str, example_shape: Sequence[int], num_classes: int, *, rngs: nnx.Rngs, **options: Any
) -> Any:
    """Makes a reference model.

    Args:
      name: a key of `MODELS`.
      example_shape: of the field that the model takes; `(height, width, channels)` of an image.
      num_classes: number of logits, words of the vocabulary, or points forecast at once.
      rngs: keys for the initial parameters.
      **options: of the model: `hidden` (mlp, lstm, forecaster), `width` (resnet8, resnet18,
        transformer), `norm` ('group' or 'batch': resnet8, resnet18), `blocks` and `heads`
        (transformer), `input_max` (those that take images: the largest value of a pixel, 255.0 by
        default, 16.0 for the digits), `param_dtype` (all).

    Returns:
      A Flax NNX module.

    Raises:
      ValueError: there is no such model, or it cannot take examples of this shape.

    Example:
      >>> import numpy as np
      >>> model = make("logistic", (8, 8, 1), 10, rngs=nnx.Rngs(0), input_max=16.0)
      >>> model(np.zeros((5, 8, 8, 1), np.uint8)).shape
      (5, 10)
    """
    if name not in MODELS:
        hint = options_lib.nearest(name, list(MODELS))
        raise ValueError(f"model: got {name!r}, must be one of {', '.join(MODELS)}.{hint}")
    return MODELS[name](tuple(example_shape), num_classes, rngs=rngs, **options)
