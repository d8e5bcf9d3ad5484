"""Models of words: a long short-term memory, a transformer, and a head on a bag of words.

A language model takes chunks `i32[B, length + 1]`, in which -1 stands for no word. For each of the
first `length` places it gives a logit for each word of the vocabulary that may come next. It begins
every chunk with a zero state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.models import layers


class BagOfWords(nnx.Module):
    """Multinomial logistic regression on which words a sentence has; convex.

    A table has a vector for each word. The logits are the bias and the mean of the vectors of the
    sentence's words, times the square root of how many these are. So all sentences have features of
    length 1. The vectors are looked up; the features, most of them 0, are never stored.

    Args:
      example_shape: `(number of different words,)`.
      num_classes: number of logits.
      param_dtype: of parameters and computation.
      rngs: keys; the initial parameters are zeros.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
    ):
        del rngs
        self.table = nnx.Param(jnp.zeros((example_shape[0], num_classes), param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_classes,), param_dtype))

    def __call__(self, words: jax.Array) -> jax.Array:
        """`i32[B, most words]`, -1 behind the last one, to logits `f[B, num_classes]`."""
        table = self.table[...]
        is_word = jnp.asarray(words >= 0, table.dtype)
        vectors = table[jnp.maximum(words, 0)] * is_word[..., None]
        count = jnp.maximum(is_word.sum(-1, keepdims=True), jnp.ones((), table.dtype))
        return vectors.sum(-2) / jnp.sqrt(count) + self.bias[...][None]


class LSTM(nnx.Module):
    """Layers of long short-term memory between an embedding and its transpose.

    The same table embeds a word and scores it as the next one ("tied"), with a bias a word.

    Args:
      example_shape: `(length + 1,)` of a chunk.
      num_classes: words of the vocabulary.
      hidden: width of each layer, all equal; the embedding has the same.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters, uniform between -1/√width and 1/√width; those of the
        embedding between -0.1 and 0.1.

    Raises:
      ValueError: the layers are not equally wide.

    References:
      Hochreiter, Schmidhuber, "Long short-term memory", 1997. Press, Wolf, "Using the output
      embedding to improve language models", 2017, arXiv 1608.05859.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        hidden: Sequence[int] = (32, 32),
        param_dtype: Any = jnp.float32,
    ):
        del example_shape
        if len(set(hidden)) != 1:
            raise ValueError(
                f"model.hidden: got {tuple(hidden)}, must be one or more equal widths with "
                "model.name='lstm', such as (32, 32)."
            )
        width = hidden[0]
        self.embedding = nnx.Param(_uniform(rngs, (num_classes, width), 0.1, param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_classes,), param_dtype))
        bound = width**-0.5
        self.layers = nnx.List(
            nnx.Dict(
                inputs=nnx.Param(_uniform(rngs, (width, 4 * width), bound, param_dtype)),
                states=nnx.Param(_uniform(rngs, (width, 4 * width), bound, param_dtype)),
                bias=nnx.Param(jnp.zeros((4 * width,), param_dtype)),
            )
            for _ in hidden
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Chunks `i32[B, length + 1]` to logits `f[B, length, vocabulary]`."""
        table = self.embedding[...]
        features = table[jnp.maximum(tokens[:, :-1].T, 0)]  # [length, B, width]
        for layer in self.layers:
            features = _recur(
                features, layer["inputs"][...], layer["states"][...], layer["bias"][...]
            )
        return features.transpose(1, 0, 2) @ table.T + self.bias[...][None, None]


def _recur(features: jax.Array, inputs: jax.Array, states: jax.Array, bias: jax.Array) -> jax.Array:
    """One layer over `f[length, B, width]`, from a zero state."""
    driven = features @ inputs + bias[None, None]  # for all steps at once

    def step(carry: Any, driven: jax.Array) -> Any:
        output, cell = carry
        gates = jnp.split(driven + output @ states, 4, axis=-1)
        take, keep, give = (jax.nn.sigmoid(gates[place]) for place in (0, 1, 3))
        cell = keep * cell + take * jnp.tanh(gates[2])
        output = give * jnp.tanh(cell)
        return (output, cell), output

    zero = jnp.zeros_like(features[0])
    return jax.lax.scan(step, (zero, zero), driven)[1]


class Transformer(nnx.Module):
    """A decoder of blocks of causal attention and two dense layers, as in GPT-2.

    Normalisation comes before each part. Positions have an embedding of their own. The embedding
    of words also scores the next word.

    Args:
      example_shape: `(length + 1,)` of a chunk.
      num_classes: words of the vocabulary.
      width: of the embedding.
      blocks: how many there are.
      heads: of the attention; their number divides the width.
      param_dtype: of parameters and computation.
      rngs: keys for the initial parameters, normal with a standard deviation of 0.02.

    Raises:
      ValueError: the heads do not divide the width.

    References:
      Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762. Radford et al., "Language
      models are unsupervised multitask learners", 2019.
    """

    def __init__(
        self,
        example_shape: Sequence[int],
        num_classes: int,
        *,
        rngs: nnx.Rngs,
        width: int = 128,
        blocks: int = 2,
        heads: int = 2,
        param_dtype: Any = jnp.float32,
    ):
        if width % heads:
            raise ValueError(
                f"model.heads: got {heads}, must divide model.width={width}. Change one of the two."
            )
        self.embedding = nnx.Param(_normal(rngs, (num_classes, width), param_dtype))
        self.positions = nnx.Param(_normal(rngs, (example_shape[0] - 1, width), param_dtype))
        self.blocks = nnx.List(
            _Block(width, heads, rngs=rngs, param_dtype=param_dtype) for _ in range(blocks)
        )
        self.norm = nnx.LayerNorm(width, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Chunks `i32[B, length + 1]` to logits `f[B, length, vocabulary]`."""
        table = self.embedding[...]
        features = table[jnp.maximum(tokens[:, :-1], 0)] + self.positions[...][None]
        for block in self.blocks:
            features = block(features)
        return layers.normalized(self.norm, features) @ table.T


class _Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, param_dtype: Any):
        shared: Any = {"param_dtype": param_dtype, "rngs": rngs}
        starts: Any = {"kernel_init": nnx.initializers.normal(0.02), **shared}
        self.norm1 = nnx.LayerNorm(width, **shared)
        self.mixed = nnx.Linear(width, 3 * width, **starts)
        self.attended = nnx.Linear(width, width, **starts)
        self.norm2 = nnx.LayerNorm(width, **shared)
        self.dense1 = nnx.Linear(width, 4 * width, **starts)
        self.dense2 = nnx.Linear(4 * width, width, **starts)
        self.heads = heads

    def __call__(self, features: jax.Array) -> jax.Array:
        features = features + self.attended(
            self._attention(layers.normalized(self.norm1, features))
        )
        inner = jax.nn.gelu(self.dense1(layers.normalized(self.norm2, features)))
        return features + self.dense2(inner)

    def _attention(self, features: jax.Array) -> jax.Array:
        batch, length, width = features.shape
        mixed = self.mixed(features).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (mixed[:, :, place] for place in range(3))
        scale = jnp.asarray((width // self.heads) ** -0.5, features.dtype)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * scale, key)
        is_past = jnp.tril(jnp.ones((length, length), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)


def _uniform(rngs: nnx.Rngs, shape: tuple[int, ...], bound: float, dtype: Any) -> jax.Array:
    return jax.random.uniform(rngs.params(), shape, dtype, -bound, bound)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return nnx.initializers.normal(0.02)(rngs.params(), shape, dtype)
