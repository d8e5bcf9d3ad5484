"""The few operations on pytrees that optax and jax lack."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types


def first_row(tree: types.PyTree) -> types.PyTree:
    """Leaves `[1, ...]` without their leading axis."""
    return jax.tree.map(lambda x: x[0], tree)


def is_shared_row(tree: types.PyTree, rows: types.PyTree) -> bool:
    """Whether leaves `[1, ...]` stand for all workers, beside leaves `[W, ...]` of several."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and len(leaves[0]) == 1 < len(jax.tree.leaves(rows)[0])


def add_row_axis(tree: types.PyTree) -> types.PyTree:
    """Leaves `[...]` as `[1, ...]`."""
    return jax.tree.map(lambda x: x[None], tree)


def select(condition: jax.Array, on_true: types.PyTree, on_false: types.PyTree) -> types.PyTree:
    """`where`, leaf by leaf, with one scalar condition; keeps the dtypes of `on_false`."""
    return jax.tree.map(
        lambda a, b: jnp.where(condition, a, b).astype(jnp.asarray(b).dtype), on_true, on_false
    )


def unlike(before: types.PyTree, after: types.PyTree) -> list[tuple[Any, str, str]]:
    """The leaves that differ in type or shape: `(path, what it was, what it is)`."""
    was, now = (
        {path: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in leaves}
        for leaves in map(jax.tree.leaves_with_path, (before, after))
    )
    pairs = [(path, was.get(path, "nothing"), now.get(path, "nothing")) for path in was | now]
    return [each for each in pairs if each[1] != each[2]]


def all_finite(tree: types.PyTree) -> jax.Array:
    """Whether no leaf of numbers holds a NaN or an infinity: bool[].

    It looks at the sum of each leaf, which either of them spoils. On CPU that takes a third of the
    time of looking at each number. So numbers whose sum overflows count as infinite.
    """
    arrays = map(jnp.asarray, jax.tree.leaves(tree))
    leaves = [wide(x) for x in arrays if jax.dtypes.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(jnp.sum(x)) for x in leaves] or [jnp.bool_(True)]))


def to_vector(tree: types.PyTree, dtype: Any) -> jax.Array:
    """All leaves, one after the other, in one type; traceable."""
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in jax.tree.leaves(tree)])


def of_vector(vector: Any, like: types.PyTree) -> types.PyTree:
    """The leaves that lie in a vector one after the other, in its own type; traceable."""
    leaves, treedef = jax.tree.flatten(like)
    ends = [0, *itertools.accumulate(leaf.size for leaf in leaves)]
    parts = (vector[start:stop] for start, stop in itertools.pairwise(ends))
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(treedef, shaped)


def size(tree: types.PyTree) -> int:
    """Numbers of all leaves, which may be shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_bytes(tree: types.PyTree) -> int:
    """Of all leaves, which may be shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def wider(*dtypes: Any) -> Any:
    """The dtype that holds all of these, so no sum or product is left to JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):  # asks for a type alone, even if JAX is strict
        return functools.reduce(jnp.promote_types, dtypes)


def wide(leaf: jax.Array) -> jax.Array:
    """In float32 or wider."""
    return leaf.astype(wider(leaf.dtype, jnp.float32))


def over(total: jax.Array, weight: jax.Array) -> jax.Array:
    """A sum over its weight; as it is where that is 0."""
    return total / jnp.where(weight > 0, weight, 1)


def accumulator_zeros(tree: types.PyTree) -> types.PyTree:
    """Zeros to sum `tree`-shaped terms in: float32, or the leaf's own dtype if wider; on the host,
    where they take no memory, so that a program that packs them has them packed already."""

    def zeros(x: Any) -> np.ndarray:
        return np.broadcast_to(wider(jnp.result_type(x), jnp.float32).type(0), jnp.shape(x))

    return jax.tree.map(zeros, tree)
