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
        num = _common_length("Blocks.of", batch)
        if size < 1 or num % size:
            raise ValueError(f"Blocks.of: size is {size}; it must divide the {num} examples")
        return cls(
            jax.tree.map(lambda a: jnp.reshape(a, (num // size, size, *jnp.shape(a)[1:])), batch)
        )

    @property
    def num_blocks(self) -> int:
        """B.

        Raises:
            ValueError: the leaves have no such common axis.
        """
        return _common_length("Blocks", self.batches)

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


def _common_length(caller: str, tree: PyTree) -> int:
    if isinstance(tree, Stack | Blocks):
        raise ValueError(f"{caller}: got a {type(tree).__name__}; write Stack(Blocks(tree))")
    lengths = lengths_of(tree)
    if len(lengths) != 1 or min(lengths) < 1:
        raise ValueError(f"{caller}: leading axes are {sorted(lengths)}; give all leaves the same")
    return min(lengths)


class Batches(NamedTuple):
    """The batches of one hypergradient. Every request takes the whole of what is no `Stack`.

    Either may be in `Blocks`, which are computed one after the other.
    """

    upper: Any = None  # a pytree, leaves [n, ...], a `Stack` of such or `Blocks`; None: no data
    lower: Any = None  # likewise
