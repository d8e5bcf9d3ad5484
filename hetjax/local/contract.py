"""Does what a local rule returns keep to its contract?

Shapes and types are looked at while JAX traces the rule, before the rule's first round. So nothing
is computed or traced for it, and all that a round is given is known. What only broadcasts
to the right shape would train all the same, and wrongly.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from hetjax import parts, types

_MOST_CHARACTERS = 160  # that are shown of a tree
_STAYS = "each of worker and sums must keep its tree, shapes and types from call to call"


class BrokenError(ValueError):
    """A function of a rule returned what it may not; says which, what, and what is allowed."""


def begun(function: Callable, returned: Any, kept: tuple) -> tuple[types.PyTree, types.PyTree]:
    """`(worker, sums)` of `begin`; `kept` is `(worker,)` as it was, or () where nothing is kept."""
    worker, sums = _several("begin", function, returned, "(worker, sums)")
    for before in kept:
        _check_like("begin", function, "worker", worker, before, _STAYS)
    return worker, _arrays("begin", function, "sums", sums)


def added(
    name: str, function: Callable, returned: Any, before: tuple[types.PyTree, types.PyTree]
) -> tuple[types.PyTree, types.PyTree]:
    """`(worker, sums)` of `add` or `take`, which change the values of those `before` alone."""
    found = _several(name, function, returned, "(worker, sums)")
    for part, new, like in zip(("worker", "sums"), found, before, strict=True):
        _check_like(name, function, part, new, like, _STAYS)
    return found


def finished(
    function: Callable, returned: Any, kept: tuple, params: tuple
) -> tuple[types.PyTree, types.PyTree, jax.Array]:
    """`(worker, contribution, weight)` of `finish`.

    Args:
        function: it.
        returned: by it.
        kept: `(worker,)` where it goes to the next round; else ().
        params: `(params,)` where the run updates them by the contribution; else ().
    """
    found = _several("finish", function, returned, "(worker, contribution, weight)")
    worker, contribution, weight = found
    for before in kept:
        _check_like("finish", function, "worker", worker, before, _STAYS)
    sums("finish", function, contribution, "contribution")
    for like in params:
        must = "in a run that updates the contribution must have the parameters' tree and shapes"
        _check_like("finish", function, "contribution", contribution, like, must, typed=False)
    number("finish", function, weight, "weight")
    return found


def sums(name: str, function: Callable, returned: Any, part: str = "sums") -> types.PyTree:
    """Sums that are divided by a weight: of whole numbers all would become 0."""
    for leaf in jax.tree.leaves(_arrays(name, function, part, returned)):
        if not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
            must = "it is divided by the weight, so all of it must be floating point"
            _refuse(name, function, f"{part} {_shown(returned)}", must)
    return returned


def number(name: str, function: Callable, returned: Any, part: str = "a loss") -> jax.Array:
    """One number, of float32 or wider: counts travel in its type."""
    shown = _shown(_arrays(name, function, part, returned))
    if shown not in ("float32[]", "float64[]"):
        must = f"{part} must be one number, float32[] or wider"
        _refuse(name, function, f"{part} {shown}", must)
    return returned


def of_metrics(function: Callable, returned: Any, names: Sequence[str]) -> types.PyTree:
    """Of each metric its weighted sum and its weight."""
    form = f"{{name: (weighted sum, weight)}} of {', '.join(names)}"
    if not isinstance(returned, Mapping) or sorted(returned) != sorted(names):
        _refuse("metric_sums", function, _shown(returned), f"it must return {form}")
    for name, pair in returned.items():
        for each in _several("metric_sums", function, pair, "(weighted sum, weight) of a name"):
            number("metric_sums", function, each, f"sum of {name!r}")
    return returned


def of_weights(function: Callable, returned: Any, contribution: types.PyTree) -> types.PyTree:
    """The derivative of the sum of weights, which is taken off the contribution."""
    must = "it must have the contribution's tree, shapes and types"
    _check_like("weight_grads", function, "the derivative", returned, contribution, must)
    return returned


def _several(name: str, function: Callable, returned: Any, form: str) -> Any:
    is_several = isinstance(returned, tuple | list) and len(returned) == form.count(",") + 1
    if not is_several:
        _refuse(name, function, _shown(returned), f"it must return {form}")
    return tuple(returned)


def _check_like(
    name: str, function: Callable, part: str, new: Any, like: Any, must: str, *, typed: bool = True
) -> None:
    """Refuses a tree of another structure or other shapes or, where `typed`, other types."""
    _arrays(name, function, part, new)
    structures: list[Any] = [jax.tree.structure(new), jax.tree.structure(like)]
    if structures[0] != structures[1]:
        _refuse(name, function, f"{part} {_shown(new)} where {_shown(like)} is due", must)
    pairs = zip(jax.tree.leaves_with_path(new), jax.tree.leaves(like), strict=True)
    for (path, one), other in pairs:
        mine, wanted = jax.typeof(one), jax.typeof(other)
        if mine.shape != wanted.shape or (typed and mine.dtype != wanted.dtype):
            where = f"{part}{jax.tree_util.keystr(path)}"
            _refuse(name, function, f"{where} {_shown(one)} where {_shown(other)} is due", must)


def _arrays(name: str, function: Callable, part: str, tree: Any) -> Any:
    for leaf in jax.tree.leaves(tree):
        try:
            jax.typeof(leaf)
        except TypeError:
            must = "it must hold only arrays or numbers"
            _refuse(name, function, f"{part} with {parts.shown(leaf)} in it", must)
    return tree


def _refuse(name: str, function: Callable, got: str, must: str) -> NoReturn:
    raise BrokenError(f"rule: its {name}, {parts.path_of(function)}, returned {got}; {must}")


class _Text(str):
    """A text that shows itself without quotes in a tree."""

    def __repr__(self) -> str:
        return str(self)


def _shown(tree: Any) -> str:
    """A tree with its leaves' types and shapes: {'a': float32[3]}."""

    def of_leaf(leaf: Any) -> _Text:
        try:
            aval = jax.typeof(leaf)
        except TypeError:
            return _Text(parts.shown(leaf))
        return _Text(f"{aval.dtype}{list(aval.shape)}")

    text = repr(jax.tree.map(of_leaf, tree))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
