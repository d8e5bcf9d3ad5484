"""The small leaves of a tree packed into a few vectors, so that fewer arrays go to and fro.

An array costs the host the same whatever is in it. Each that goes into a program or comes out on
four devices, or is made of its workers' rows, takes a hundredth of a millisecond. Nothing is
computed here: what is unpacked is to the bit what was packed. Barriers have XLA compile what is
between `unpack` and `pack` as if there were no packing, so that its sums are those of before, too.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types

_MOST_NUMBERS = 1024  # of a leaf that is small, in a row


class _Slot(NamedTuple):
    """Where a leaf is: alone, or in a vector."""

    vector: str | None  # type of the vector; None: alone
    dtype: str  # of the leaf
    start: int
    shape: tuple[int, ...]  # of a row


@dataclasses.dataclass(eq=False)
class _Contents:
    """What is where. Two that are equal are one object: JAX compares them at each call."""

    slots: tuple[_Slot, ...]
    treedef: Any


_contents = functools.cache(_Contents)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """A tree whose small leaves are one array, or one for each width of number.

    Attributes:
        alone: the other leaves.
        small: `[..., n]` by type; numbers of 4 and of 8 bytes as the integers of their bits.
        contents: what is where.
    """

    alone: list[Any]
    small: dict[str, Any]
    contents: _Contents = dataclasses.field(metadata={"static": True})


def pack(tree: types.PyTree, *, row_axes: int = 1) -> Packed:
    """A tree, packed; traceable.

    Args:
        tree: of arrays, all with the same leading `row_axes`.
        row_axes: axes that the vectors keep; 0 for a tree without rows.
    """
    leaves, treedef = jax.tree.flatten(tree)
    known = all(isinstance(leaf, np.ndarray) for leaf in leaves)  # then it is packed now
    join = np.concatenate if known else jnp.concatenate
    leaves = leaves if known else jax.lax.optimization_barrier(leaves)
    parts: dict[str, list[Any]] = {}
    ends: dict[str, int] = {}
    alone, slots = [], []
    for leaf in leaves:
        shape = leaf.shape[row_axes:]
        size = math.prod(shape)
        if size > _MOST_NUMBERS or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            alone.append(leaf)
            slots.append(_Slot(None, "", 0, shape))
            continue
        name = _carrier(leaf.dtype)
        slots.append(_Slot(name, str(leaf.dtype), ends.get(name, 0), shape))
        ends[name] = ends.get(name, 0) + size
        part = leaf.reshape((*leaf.shape[:row_axes], size))
        parts.setdefault(name, []).append(_as_type(part, name))
    small = {name: join(part, axis=row_axes) for name, part in parts.items()}
    return Packed(alone, small, _contents(tuple(slots), treedef))


def unpack(tree: types.PyTree) -> types.PyTree:
    """The tree that was packed, of arrays or NumPy arrays; any other tree as it is."""
    if not isinstance(tree, Packed):
        return tree
    alone, leaves = iter(tree.alone), []
    for slot in tree.contents.slots:
        if slot.vector is None:
            leaves.append(next(alone))
            continue
        vector = tree.small[slot.vector]
        part = vector[..., slot.start : slot.start + math.prod(slot.shape)]
        part = _as_type(part, slot.dtype)
        leaves.append(part.reshape((*vector.shape[:-1], *slot.shape)))
    if not any(isinstance(leaf, np.ndarray) for leaf in leaves):
        leaves = jax.lax.optimization_barrier(leaves)
    return jax.tree.unflatten(tree.contents.treedef, leaves)


def pack_like(example: types.PyTree, tree: types.PyTree, *, row_axes: int = 1) -> types.PyTree:
    """Packed where `example` is, else the tree as it is."""
    return pack(tree, row_axes=row_axes) if isinstance(example, Packed) else tree


def _carrier(dtype: np.dtype) -> str:
    """The type in which numbers of this type travel."""
    is_plain = dtype.kind in "fiu" and dtype.itemsize in (4, 8)
    return f"uint{8 * dtype.itemsize}" if is_plain else str(dtype)


def _as_type(vector: Any, dtype: str) -> Any:
    """The same bits as another type of the same width."""
    if isinstance(vector, np.ndarray):
        return vector.view(dtype)
    if str(vector.dtype) == dtype:
        return vector
    return jax.lax.bitcast_convert_type(vector, dtype)
