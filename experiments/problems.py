"""The classifiers and the random images that several programs measure with."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hetjax
from hetjax.zoo import models


def cross_entropy(model: nnx.Module, batch: Any) -> jax.Array:
    """f[B]"""
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def classifier(name: str, example_shape: tuple, *, input_max: float, **options: Any) -> tuple:
    """`(loss_fn, params)` of a reference model with 10 classes."""
    model = models.make(name, example_shape, 10, rngs=nnx.Rngs(0), input_max=input_max, **options)
    return hetjax.nnx_loss(model, cross_entropy)


def images(num_examples: int, shape: tuple) -> dict[str, np.ndarray]:
    """Random images: what a round takes does not depend on what is on them."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(256, size=(num_examples, *shape), dtype=np.uint8),
        "label": rng.integers(10, size=num_examples).astype(np.int32),
    }
