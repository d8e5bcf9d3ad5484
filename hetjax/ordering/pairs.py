"""Examples in pairs: positions 2k and 2k + 1 of a microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def split(x: Any) -> tuple[Any, Any]:
    """The first and the second of each pair: two arrays `[K, ...]` from `[2K, ...]`."""
    return x[0::2], x[1::2]


def join(first: jax.Array, second: jax.Array) -> jax.Array:
    """`[2K]` from the first and the second of each pair."""
    return jnp.stack([first, second], axis=1).reshape(-1)


def whole(mask: Array) -> jax.Array:
    """bool[K]: whether both of a pair are examples and neither is padding."""
    first, second = split(mask > 0)
    return first & second


def example_signs(pair_signs: jax.Array, mask: Array) -> jax.Array:
    """i8[2K]: s and -s for each pair of sign s; 0 if the pair is not whole."""
    signs = join(pair_signs, -pair_signs)
    return jnp.where(jnp.repeat(whole(mask), 2), signs, 0).astype(jnp.int8)
