"""The few operations on pytrees that optax and jax lack."""

import jax
import jax.numpy as jnp

from hetjax import types


def first_row(tree: types.PyTree) -> types.PyTree:
    """Leaves `[1, ...]` without their leading axis."""
    return jax.tree.map(lambda x: x[0], tree)


def add_row_axis(tree: types.PyTree) -> types.PyTree:
    """Leaves `[...]` as `[1, ...]`."""
    return jax.tree.map(lambda x: x[None], tree)


def select(condition: jax.Array, on_true: types.PyTree, on_false: types.PyTree) -> types.PyTree:
    """Leaf by leaf `where`, with one scalar condition; keeps the dtypes of `on_false`."""
    return jax.tree.map(
        lambda a, b: jnp.where(condition, a, b).astype(jnp.asarray(b).dtype), on_true, on_false
    )


def all_finite(tree: types.PyTree) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity: bool[].

    By the sum of each leaf, which either would spoil: a third of the time of asking each number
    (on CPU). So numbers whose sum overflows count as infinite.
    """
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack([jnp.isfinite(jnp.sum(x)) for x in wide] or [jnp.bool_(True)]))


def accumulator_zeros(tree: types.PyTree) -> types.PyTree:
    """Zeros to sum `tree`-shaped terms in: float32, or the leaf's own dtype where wider."""
    return jax.tree.map(
        lambda x: jnp.zeros(jnp.shape(x), jnp.promote_types(jnp.result_type(x), jnp.float32)),
        tree,
    )


def perturbed(tree: types.PyTree, seed: int) -> types.PyTree:
    """Each leaf moved at random, by about its own size, or 0.1 where it is smaller."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def move(leaf: jax.Array, key: jax.Array) -> jax.Array:
        wide = jnp.asarray(leaf, jnp.float32)
        scale = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(wide))), 0.1)
        return (wide + scale * jax.random.normal(key, wide.shape)).astype(leaf.dtype)

    return jax.tree.unflatten(treedef, map(move, leaves, keys))
