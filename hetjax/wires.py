"""Fewer bytes for what a worker hands in: the device rounds numbers, and the host packs them.

Numbers of a block have one scale, a power of two. So what is rounded is packed exactly, from the
numbers alone. They are rounded at random, so that they are right in the mean, and who rounds adds
what is left to what it hands in next (`local/wired.py`).
"""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # options are checked without JAX
    import jax

FLOAT32 = "float32"
_MOST = MappingProxyType({"int8": 127, "int4": 7})  # of the whole numbers of a block
WIRES = (FLOAT32, "bfloat16", *_MOST)
BLOCK = 64  # numbers
_LEAST = -126  # exponent of a scale: below it are numbers that are not normal


def rounded(vector: "jax.Array", wire: str) -> "jax.Array":
    """What arrives of f32[n]; traceable. Equal vectors are rounded alike."""
    import jax
    import jax.numpy as jnp

    bits = jax.lax.bitcast_convert_type(vector, jnp.uint32)
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(bits, dtype=jnp.uint32))
    if wire == "bfloat16":
        noise = jax.random.bits(key, vector.shape, jnp.uint16).astype(jnp.uint32)
        return jax.lax.bitcast_convert_type((bits + noise) & np.uint32(0xFFFF0000), jnp.float32)
    most = _MOST[wire]
    blocks = jnp.pad(vector, (0, -vector.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.ldexp(jnp.float32(1), _exponents(jnp, blocks, most))[:, None]
    noise = jax.random.uniform(key, blocks.shape, jnp.float32)
    whole = jnp.clip(jnp.floor(blocks / scales + noise), -most, most)
    return (whole * scales).reshape(-1)[: vector.size]


def packed(numbers: np.ndarray, wire: str) -> np.ndarray:
    """What goes over the wire for numbers f[n] that `rounded` gave: u8[b]."""
    numbers = numbers.astype(np.float32, copy=False)
    if wire == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = np.pad(numbers, (0, -numbers.size % BLOCK)).reshape(-1, BLOCK)
    exponents = _exponents(np, blocks, _MOST[wire])
    whole = np.ldexp(blocks, -exponents[:, None]).astype(np.int8).view(np.uint8).reshape(-1)
    if wire == "int4":
        whole = whole[::2] & 15 | whole[1::2] << 4
    return np.concatenate([exponents.astype(np.int8).view(np.uint8), whole])


def unpacked(sent: np.ndarray, size: int, wire: str) -> np.ndarray:
    """The numbers f32[size] of what `packed` gave."""
    if wire == "bfloat16":
        return (sent.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    count = -(-size // BLOCK)
    exponents, whole = sent[:count].view(np.int8), sent[count:].view(np.int8)
    if wire == "int4":
        whole = np.stack([whole << 4 >> 4, whole >> 4], axis=1)
    blocks = whole.reshape(count, BLOCK).astype(np.float32)
    return np.ldexp(blocks, exponents[:, None].astype(np.int32)).reshape(-1)[:size]


def num_bytes(size: int, wire: str) -> int:
    """Of so many numbers on the wire."""
    if wire in _MOST:
        return -(-size // BLOCK) * (1 + (BLOCK if wire == "int8" else BLOCK // 2))
    return size * (4 if wire == FLOAT32 else 2)


def _exponents(of: Any, blocks: Any, most: int) -> Any:
    """Of the least powers of two in which the largest number of each block [n, BLOCK] is no more
    than `most`, by NumPy or its like in JAX."""
    fraction, exponent = of.frexp(of.abs(blocks).max(axis=1) / most)
    return of.maximum(exponent - (fraction == 0.5).astype(exponent.dtype), _LEAST)
