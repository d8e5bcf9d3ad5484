"""Networks of rectified layers, as pytrees of weights and biases."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.types import PyTree


def init(sizes: tuple[int, ...], rng: np.random.Generator) -> PyTree:
    """`[(weights, bias), …]` of layers from one size to the next; biases are 0."""
    return [
        (jnp.asarray(rng.normal(0, (2 / a) ** 0.5, (a, b)), jnp.float32), jnp.zeros(b))
        for a, b in itertools.pairwise(sizes)
    ]


def apply(params: PyTree, inputs: jax.Array) -> jax.Array:
    """`f[n, outputs]`; the last layer is not rectified."""
    for weights, bias in params[:-1]:
        inputs = jax.nn.relu(inputs @ weights + bias[None])
    weights, bias = params[-1]
    return inputs @ weights + bias[None]
