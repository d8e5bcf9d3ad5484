"""Where the leaves of a request are: in what the estimator carries, or made beside it.

A point that is a part of the carry, as y is, would else be written a second time in each round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from hetjax import types


class CarriedLeaves(NamedTuple):
    """Of one kind of request."""

    treedef: Any
    in_carry: tuple[int | None, ...]  # of each leaf: its number among the carry's; None: it is made

    def made(self, asked: types.PyTree) -> list[Any]:
        """The leaves that are made."""
        leaves = zip(jax.tree.leaves(asked), self.in_carry, strict=True)
        return [leaf for leaf, index in leaves if index is None]

    def whole(self, carry: types.PyTree, made: list[Any]) -> Any:
        """The request, its leaves in the carry those of the carry."""
        kept, others = jax.tree.leaves(carry), iter(made)
        leaves = [next(others) if index is None else kept[index] for index in self.in_carry]
        return jax.tree.unflatten(self.treedef, leaves)


NONE = CarriedLeaves(None, ())


def find(asked: Callable[[Any], Any], row: types.PyTree) -> CarriedLeaves:
    """Of `asked`, a function of a carry of these shapes, without worker axis."""
    closed, shape = jax.make_jaxpr(asked, return_shape=True)(row)
    number = {variable: index for index, variable in enumerate(closed.jaxpr.invars)}
    given = closed.jaxpr.outvars
    in_carry = (None if isinstance(v, core.Literal) else number.get(v) for v in given)
    return CarriedLeaves(jax.tree.structure(shape), tuple(in_carry))
