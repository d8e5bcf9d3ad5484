"""The gradients of any part of a microbatch's examples, from one forward pass of all of them.

`jax.linearize` gives the Jacobian J of the vector of losses as a program of the forward pass's
arrays (its residuals): J v = T(residuals, v). What is wanted are the rows of J of some n of the N
examples. If T treats each example by itself, these rows are T traced for n examples, on the rows of
the residuals that belong to them. The sum of their gradients is that program, transposed, of ones.
The two programs themselves are proven to agree, equation by equation (`by_rows`), whenever a
program is built. So this holds for any parameters, examples and keys. Where it is not proven, the
sum is the transpose of the whole T, applied to the indicator of the examples. That is right for
every loss, but costs a backward pass of all examples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import debugging, types
from hetjax.ordering import by_rows, pairs

Losses = Callable[..., tuple[jax.Array, Any]]
Linear = Callable[[types.PyTree], jax.Array]


class Microbatch:
    """The losses of a microbatch, and what the gradients of its examples are needed for.

    Args:
        losses: `(params, positions) -> (losses f[k], weights f[k])` of the examples at
            `positions i32[k]` (None: of all N). The weights may be a record with a `sum()`.
        params: the parameters.
        size: N, even.
        block_pairs: pairs of a block; the last one may have fewer.

    Attributes:
        values: f[N], the losses.
        weights: f[N], or that record.
        blocks: where each begins and ends. One block has all examples if the losses of a block
            cannot be computed from those of the microbatch.
        refusal: why one forward pass and half a backward pass for each half of a block are not
            enough; '' if they are. It is also '' if halves have one example: its program often has
            another form, and the second half of its backward pass costs little.
    """

    def __init__(self, losses: Losses, params: types.PyTree, size: int, block_pairs: int) -> None:
        self._losses, self._params, self._size = losses, params, size
        self.values, self._whole, self.weights = jax.linearize(
            lambda p: losses(p, None), params, has_aux=True
        )
        self._parts: dict[int, Callable[[jax.Array], Linear]] = {}
        self.refusal = ""
        starts = range(0, size, 2 * block_pairs)
        self.blocks = [(start, min(start + 2 * block_pairs, size)) for start in starts]
        counts = {stop - start for start, stop in self.blocks}
        if not all(self._add_part(count) for count in sorted(counts, reverse=True)):
            self.blocks, counts = [(0, size)], {size}
        for count in {count // 2 for count in counts} - self._parts.keys():
            self._add_part(count)

    def _add_part(self, count: int) -> bool:
        """Whether the gradients of any `count` examples can be computed by themselves."""
        if count == self._size:
            return True
        try:
            part = _part(self._whole, self._losses, self._params, self._size, count)
        except by_rows.NotByRowsError as error:
            if count > 1:
                self.refusal = self.refusal or str(error)
            return False
        self._parts[count] = part
        return True

    def products(self, block: tuple[int, int], vector: types.PyTree) -> jax.Array:
        """f[k]: the inner products of a block's gradients and a vector like the parameters."""
        start, stop = block
        if stop - start < self._size:
            return self._parts[stop - start](jnp.arange(start, stop))(vector)
        # Not `self._whole`: if the loss has a `jax.checkpoint`, that would compute it once more.
        return jax.jvp(lambda p: self._losses(p, None)[0], (self._params,), (vector,))[1]

    def half_sums(
        self, block: tuple[int, int], sign: jax.Array
    ) -> tuple[types.PyTree, types.PyTree]:
        """The sums of a block's gradients: of the examples of sign +, and of those of sign -.

        Args:
            block: one of `blocks`.
            sign: [k / 2], of each pair: 1 = its first example has +, its second -; -1 = reversed.
        """
        start, stop = block
        part, count = self._parts.get((stop - start) // 2), stop - start
        if part is None:
            whole = (
                self._whole if count == self._size else self._parts[count](jnp.arange(start, stop))
            )
            inside = [pairs.join(sign * s > 0, sign * s < 0) for s in (1, -1)]
            return tuple(self._pulled_back(whole, x) for x in inside)
        evens = jnp.arange(start, stop, 2)
        halves = [evens + turned.astype(evens.dtype) for turned in (sign < 0, sign > 0)]
        return tuple(self._pulled_back(part(half), jnp.ones(count // 2)) for half in halves)

    def _pulled_back(self, linear: Linear, weights: jax.Array) -> types.PyTree:
        transposed = jax.linear_transpose(linear, self._params)
        return transposed(weights.astype(self.values.dtype))[0]


def _part(
    whole: Linear, losses: Losses, params: types.PyTree, size: int, count: int
) -> Callable[[jax.Array], Linear]:
    """Makes the linear function of any `count` examples; refuses if that is not proven right."""
    if debugging.is_on():
        raise by_rows.NotByRowsError("in debugging nothing is traced")
    try:
        _, part, _ = jax.linearize(lambda p: losses(p, jnp.arange(count)), params, has_aux=True)
    except Exception as error:  # whatever the user's function raises
        reason = str(error).strip().split("\n")[0]
        message = f"it cannot be called with {count} of {size} examples: {reason}"
        raise by_rows.NotByRowsError(message) from error
    kept, whole_structure = jax.tree.flatten(whole)
    shapes, structure = jax.tree.flatten(part)
    if len(kept) != len(shapes):
        raise by_rows.NotByRowsError("what it keeps depends on the number of examples")
    axes = [_axis(one, other, size, count) for one, other in zip(kept, shapes, strict=True)]
    by_rows.prove(
        lambda leaves, v: jax.tree.unflatten(whole_structure, leaves)(v),
        lambda leaves, v: jax.tree.unflatten(structure, leaves)(v),
        ((kept, params), (shapes, params)),
        [*axes, *[None] * len(jax.tree.leaves(params))],
        counts=(size, count),
    )

    def of(positions: jax.Array) -> Linear:
        taken = [_take(x, rows, positions, size) for x, rows in zip(kept, axes, strict=True)]
        return jax.tree.unflatten(structure, taken)

    return of


def _axis(kept: Any, like: Any, size: int, count: int) -> by_rows.Relation:
    """How an array that the whole keeps becomes the part's: as it is, or some of its rows."""
    shapes = jnp.shape(kept), jnp.shape(like)
    if shapes[0] == shapes[1]:
        return None
    axes = [i for i, (w, p) in enumerate(zip(*shapes, strict=False)) if w != p]
    if len(shapes[0]) == len(shapes[1]) and len(axes) == 1:
        length = shapes[0][axes[0]]
        if length % size == 0 and length // size * count == shapes[1][axes[0]]:
            return by_rows.Rows(axes[0], length // size)
    raise by_rows.NotByRowsError(f"it keeps {shapes[0]} of {size}, {shapes[1]} of {count} examples")


def _take(kept: Any, rows: by_rows.Relation, positions: jax.Array, size: int) -> Any:
    if rows is None:
        return kept
    axis, shape = rows.axis, kept.shape
    split = (*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :])
    taken = jnp.take(kept.reshape(split), positions, axis=axis)
    return taken.reshape(*shape[:axis], -1, *shape[axis + 1 :])
