"""Upper variables that belong to one example each, such as its weight.

Marked as `PerExample` they stay with their example: a loss gets those of its batch. In rounds their
gradient needs no sum over the workers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExample:
    """A leaf of x whose row i belongs to example i of a level's data.

    A loss of that level gets the rows of its batch's examples, `[B, ...]`, as a plain array. A loss
    of the other level gets all rows, `[N, ...]`. In `hetjax.bilevel.hypergradient` a batch is the
    whole set, in its order.

    Example:
        >>> def lower(x, y, batch):  # cleaning: a weight for each example
        ...     return jax.nn.sigmoid(x) * (batch["images"] @ y - batch["targets"]) ** 2
        >>> x = PerExample(jnp.zeros(5000))
    """

    values: Any  # f[N, ...]
    level: str = dataclasses.field(default="lower", metadata={"static": True})
    """The level to whose examples they belong: 'upper' or 'lower'."""


def is_one(leaf: Any) -> bool:
    """Whether it is a `PerExample`."""
    return isinstance(leaf, PerExample)


def plain(x: PyTree) -> PyTree:
    """x as a loss gets it: arrays in place of `PerExample`."""
    return jax.tree.map(lambda leaf: leaf.values if is_one(leaf) else leaf, x, is_leaf=is_one)


def rows(x: PyTree, level: str, example_ids: jax.Array) -> PyTree:
    """x whose leaves of this level have only these examples' rows; padding (-1) gets any."""

    def row(leaf: Any) -> Any:
        if not is_one(leaf) or leaf.level != level:
            return leaf
        return PerExample(leaf.values[jnp.maximum(example_ids, 0)], level)

    return jax.tree.map(row, x, is_leaf=is_one)


def split(x: PyTree) -> tuple[list[Any], list[PerExample]]:
    """The other leaves of a tree like x, and its `PerExample`."""
    leaves = jax.tree.leaves(x, is_leaf=is_one)
    return [leaf for leaf in leaves if not is_one(leaf)], [leaf for leaf in leaves if is_one(leaf)]


def joined(like: PyTree, others: list[Any], own: list[PerExample]) -> PyTree:
    """A tree like x, of what `split` gave."""
    each, mine = iter(others), iter(own)
    return jax.tree.map(lambda leaf: next(mine if is_one(leaf) else each), like, is_leaf=is_one)


def add_rows(total: PerExample, part: PerExample, level: str, example_ids: jax.Array) -> PerExample:
    """Adds the rows of a batch's examples to a sum over all; a leaf of the other level has all."""
    added = part.values.astype(total.values.dtype)
    if total.level != level:
        return PerExample(total.values + added, total.level)
    places = jnp.where(example_ids < 0, len(total.values), example_ids)
    return PerExample(total.values.at[places].add(added, mode="drop"), level)
