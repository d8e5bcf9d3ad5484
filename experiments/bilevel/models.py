"""The two models of a cleaning run, their losses, and how one is trained for good."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bilevel import data as data_lib
from experiments.bilevel import settings
from hetjax.types import PyTree


def init(config: settings.Model, input_size: int, num_classes: int, seed: int) -> PyTree:
    """Zeros for softmax regression; random numbers for the hidden layer of an MLP."""
    if config.name == "softmax":
        return {"out": _layer(np.zeros((input_size, num_classes), np.float32))}
    rng = np.random.default_rng(seed)
    sizes = {"hidden": (input_size, config.hidden), "out": (config.hidden, num_classes)}
    return {
        name: _layer(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))
        for name, shape in sizes.items()
    }


def _layer(weights: np.ndarray) -> PyTree:
    return {"weights": jnp.asarray(weights), "bias": jnp.zeros(weights.shape[1])}


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """`f[n, classes]`; a sigmoid between the layers where there are two."""
    if "hidden" in params:
        images = jax.nn.sigmoid(_affine(params["hidden"], images))
    return _affine(params["out"], images)


def _affine(layer: PyTree, inputs: jax.Array) -> jax.Array:
    return inputs @ layer["weights"] + layer["bias"][None]


def losses(params: PyTree, batch: data_lib.Images) -> jax.Array:
    """Cross-entropy of each example, f[n]."""
    scores = logits(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels)


def squares(params: PyTree) -> jax.Array:
    """`|weights|^2`, without the biases."""
    return sum((jnp.sum(layer["weights"] ** 2) for layer in params.values()), jnp.zeros(()))


@jax.jit
def accuracy(params: PyTree, batch: data_lib.Images) -> jax.Array:
    """The share of right answers."""
    return jnp.mean(logits(params, batch.images).argmax(-1) == batch.labels)


def both(first: data_lib.Images, second: data_lib.Images) -> data_lib.Images:
    """One set behind the other."""
    return data_lib.Images(*map(np.concatenate, zip(first, second, strict=True)))


@functools.partial(jax.jit, static_argnames="num_steps")
def train(
    params: PyTree, batch: data_lib.Images, weights: jax.Array, ridge: Any, *, num_steps: int
) -> PyTree:
    """The minimum of `sum(weights * losses) / sum(weights) + ridge / 2 |w|^2`, by L-BFGS."""

    def value(params: PyTree) -> jax.Array:
        mean = jnp.sum(weights * losses(params, batch)) / jnp.sum(weights)
        return mean + ridge / 2 * squares(params)

    tx = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(value)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        loss, grads = value_and_grad(params, state=state)
        updates, state = tx.update(grads, state, params, value=loss, grad=grads, value_fn=value)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, length=num_steps)[0][0]
