"""Does a program treat each example of a batch by itself, wherever in the batch it stands?

Two traces of one function are walked side by side, equation by equation: one for a batch of N
examples, the whole, and one for n of them, the part. The rows of a value are its entries along the
axis of the examples, one an example. The part may be given any n examples, in the order of the
whole. For each of its values it is shown that it is the same as the whole's, or the whole's rows of
these examples. So no value may depend on where its example stands, or on other examples. That
excludes a position (`iota`, an index into the batch), a sum, a sort or a scan over the examples,
and a number that depends on N.

This is a proof by induction over the equations, not a test: nothing is computed. No sizes are
guessed at: an axis is of examples if the two programs differ in it, whatever else is as long. A
primitive that is not known, or is used in an unknown way, is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hetjax.ordering import row_rules
from hetjax.ordering.row_walk import NotByRowsError, Proof, Relation, Rows, Rule

__all__ = ["NotByRowsError", "Relation", "Rows", "prove"]


def prove(
    whole: Callable[..., Any],
    part: Callable[..., Any],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    relations: Sequence[Relation],
    *,
    counts: tuple[int, int],
    rules: Mapping[str, Rule] = row_rules.RULES,
) -> None:
    """Shows that `part` gives those rows of the result of `whole` that belong to its examples.

    Args:
        whole: `(*arguments) -> array` with the examples along axis 0, for N examples.
        part: the same function for n examples.
        arguments: of `whole` and of `part`: pytrees, as many for one as for the other.
        relations: how each leaf of the part's arguments follows from the whole's.
        counts: N and n, 1 <= n < N.
        rules: of the primitives; other rules show something else.

    Raises:
        NotByRowsError: this was not shown. It may be true all the same.
    """
    programs = jax.make_jaxpr(whole)(*arguments[0]), jax.make_jaxpr(part)(*arguments[1])
    for out in Proof(counts, rules).program(*programs, relations):
        if out is None or out.axis != 0 or out.inner not in (None, 1):
            raise NotByRowsError("its results are not one number an example")
