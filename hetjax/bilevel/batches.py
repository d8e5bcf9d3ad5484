"""The batches of a hypergradient: whole, in a stack with one for each request, or in blocks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.types import PyTree


class Stack(NamedTuple):
    """Batches, leaves `[K, ...]`. Each request of a level that wants a new batch takes the next."""

    batches: PyTree  # leaves [K, ...], a batch each


class Blocks(NamedTuple):
    """One batch in B equal blocks, leaves `[B, size, ...]`, of which one at a time is in memory.

    A loss that is a scalar is averaged over the blocks. If it is a mean over the examples of its
    batch, plus terms without examples, the result is that of all examples at once; so are the
    derivatives. A mean by weights is that of all examples, too: sums over the blocks are divided
    once. A loss that reads numbers of x for each example finds them by an index in the batch:
    `x[batch.index]`.

    A `Stack` of batches in blocks is `Stack(Blocks(tree))`, leaves `[K, B, size, ...]`.

    Example:
        >>> import numpy as np
        >>> blocks = Blocks.of({"a": np.zeros((12, 3)), "index": np.arange(12)}, size=4)
        >>> blocks.batches["a"].shape, blocks.batches["index"].shape
        ((3, 4, 3), (3, 4))
    """

    batches: PyTree  # leaves [B, size, ...]

    @classmethod
    def of(cls, batch: PyTree, size: int) -> "Blocks":
        """Cuts a batch, leaves `[n, ...]`, into blocks of `size` examples; n / size blocks.

        Args:
            batch: leaves `[n, ...]`.
            size: examples in a block; divides n.

        Raises:
            ValueError: the leaves are of several lengths, or `size` does not divide n.
        """
        if isinstance(batch, Stack | Blocks):
            raise ValueError(
                f"Blocks.of: got a {type(batch).__name__}; give one batch, leaves [n, ...]. "
                "Batches in blocks are Stack(Blocks(tree)), leaves [K, B, size, ...]"
            )
        lengths = lengths_of(batch)
        if len(lengths) != 1 or min(lengths) < 1:
            raise ValueError(
                f"Blocks.of: the leaves of the batch have leading axes {_said(lengths)}; all "
                "have to have one of the same length, that of the examples"
            )
        (num,) = lengths
        if size < 1 or num % size:
            near = sorted(
                (d for d in range(1, num + 1) if num % d == 0), key=lambda d: abs(d - size)
            )
            raise ValueError(
                f"Blocks.of: {num} examples cannot be cut into blocks of {size}: the mean over "
                "blocks is that over examples where all blocks are of one size. Sizes that divide "
                f"{num}: {', '.join(map(str, sorted(near[:3])))}"
            )
        return cls(
            jax.tree.map(lambda a: jnp.reshape(a, (num // size, size, *jnp.shape(a)[1:])), batch)
        )

    @property
    def num_blocks(self) -> int:
        """B.

        Raises:
            ValueError: the leaves have no such common axis.
        """
        if isinstance(self.batches, Stack):
            raise ValueError(
                "Blocks: got a Stack. Batches in blocks are Stack(Blocks(tree)), leaves "
                "[K, B, size, ...]"
            )
        lengths = lengths_of(self.batches)
        if len(lengths) != 1 or min(lengths) < 1:
            raise ValueError(
                f"Blocks: the leaves have leading axes {_said(lengths)}; give all of them "
                "[B, size, ...] with the same B, at least 1, as Blocks.of(batch, size) does"
            )
        return min(lengths)

    def block(self, number: Any) -> PyTree:
        """One block, leaves `[size, ...]`.

        Args:
            number: i32[], from 0 to B - 1.

        Returns:
            Leaves `[size, ...]`.

        Raises:
            ValueError: as `num_blocks`.
        """
        _ = self.num_blocks
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], self.batches)


def lengths_of(tree: PyTree) -> set[int]:
    """The lengths of the leaves' leading axes; 0 for a leaf without axes."""
    return {(*jnp.shape(leaf), 0)[0] for leaf in jax.tree.leaves(tree)}


def _said(lengths: set[int]) -> str:
    return ", ".join(map(str, sorted(lengths))) or "none"


class Batches(NamedTuple):
    """The batches of one hypergradient. Every request takes the whole of what is no `Stack`.

    Either may be in `Blocks`, which are computed one after the other.
    """

    upper: Any = None  # a pytree, leaves [n, ...], a `Stack` of such or `Blocks`; None: no data
    lower: Any = None  # likewise
