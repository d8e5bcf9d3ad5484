"""Pytrees as vectors: sums, inner products, stacks of them, and the leaves with a derivative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.types import PyTree


def like(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the types of `old`, as a loop keeps them."""
    return jax.tree.map(lambda a, b: jnp.asarray(a).astype(jnp.result_type(b)), new, old)


def zeros_like(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)


def dtype_of(tree: PyTree) -> Any:
    """The type of sums over a tree: that of its widest leaf."""
    return trees.wider(*(leaf.dtype for leaf in jax.tree.leaves(tree)))


def inner(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product of two trees of one form."""
    products = [jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    dtype = trees.wider(*(p.dtype for p in products))
    return sum((p.astype(dtype) for p in products), jnp.zeros((), dtype))


def norm(tree: PyTree) -> jax.Array:
    return jnp.sqrt(inner(tree, tree))


def add(a: PyTree, b: PyTree, scale: Any = 1.0) -> PyTree:
    """`a + scale b`, in the types of `a`."""
    return jax.tree.map(lambda x, y: x + jnp.asarray(scale, x.dtype) * y.astype(x.dtype), a, b)


def stack_of(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), tree)


def item(stack: PyTree, index: Any) -> PyTree:
    take = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf: take(leaf, index, keepdims=False), stack)


def put(stack: PyTree, index: Any, tree: PyTree) -> PyTree:
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda leaf, new: put(leaf, new, index, 0), stack, tree)


def floats(tree: PyTree) -> list[jax.Array]:
    """The leaves that have a derivative."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def split(tree: PyTree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """The leaves that have a derivative, and the way back from them to the tree."""

    def rebuilt(floats: list[jax.Array]) -> PyTree:
        given = iter(floats)
        return jax.tree.map(lambda leaf: next(given) if _is_float(leaf) else leaf, tree)

    return floats(tree), rebuilt


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def size_of(x: PyTree) -> int:
    return sum(map(jnp.size, jax.tree.leaves(x)))


def basis(x: PyTree) -> PyTree:
    """A tangent of x for each of its numbers: leaves `[n, ...]`."""
    units = jnp.eye(size_of(x), dtype=dtype_of(x))
    return jax.vmap(lambda unit: like(trees.of_vector(unit, x), x))(units)
