"""Which results of a program are arguments of it, handed on as they are?

A transformation such as `remat` or `scan` gives back every variable of a model that went in. So a
new value of a variable need not be another number. This looks into the calls of JAX that hand
values on, and assumes that all else changes a value. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hetjax import executor

_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where a call keeps its program


def changed(function: Callable[[Any], Any], values: Any) -> list[bool]:
    """Whether each array that `function` returns differs from the argument in its place.

    Args:
      function: `values -> values`, equally many; it is traced, or eagerly called.
      values: a pytree of arrays.
    """
    if executor.is_eager():
        values = jax.tree.map(jnp.asarray, values)
        pairs = zip(jax.tree.leaves(function(values)), jax.tree.leaves(values), strict=True)
        return [not _is_same(*pair) for pair in pairs]
    program = jax.make_jaxpr(function)(values)
    return [place != index for index, place in enumerate(_forwarded(program.jaxpr))]


def _is_same(after: Any, before: Any) -> bool:
    """Whether it is the same number, or a derivative's and the same object."""
    is_traced = isinstance(after, jax.core.Tracer) or isinstance(before, jax.core.Tracer)
    return after is before or (not is_traced and np.array_equal(after, before))


def _forwarded(program: Any) -> list[int | None]:
    """For each result of a jaxpr the argument that it is; None if it is none."""
    places = {variable: place for place, variable in enumerate(program.invars)}

    def place_of(variable: Any) -> int | None:
        return None if isinstance(variable, core.Literal) else places.get(variable)

    for equation in program.eqns:
        for out, argument in zip(equation.outvars, _of_equation(equation), strict=True):
            place = None if argument is None else place_of(equation.invars[argument])
            if place is not None:
                places[out] = place
    return [place_of(variable) for variable in program.outvars]


def _of_equation(equation: Any) -> list[int | None]:
    """For each result of an equation the argument that it is; None if it is none."""
    count, name, params = len(equation.outvars), equation.primitive.name, equation.params
    if name == "optimization_barrier":
        return list(range(count))
    if name == "cond":
        branches = [_forwarded(branch.jaxpr) for branch in params["branches"]]
        return [
            one[0] + 1 if one[0] is not None and len(set(one)) == 1 else None
            for one in zip(*branches, strict=True)
        ]
    inner = next((params[key] for key in _INNER if key in params), None)
    if inner is None or name == "while":
        return [None] * count
    places = _forwarded(getattr(inner, "jaxpr", inner))
    if name == "scan":
        return _of_scan(places, *_scan_counts(params, len(equation.invars)))
    is_call = len(getattr(inner, "jaxpr", inner).invars) == len(equation.invars)
    return places if is_call and len(places) == count else [None] * count


def _scan_counts(params: dict[str, Any], num_arguments: int) -> tuple[int, int]:
    """How many of its arguments are constants of each step, and how many are carried on."""
    if "ft_in" in params:  # from JAX 0.11 on
        groups = params["ft_in"].update(tuple(range(num_arguments))).unpack()
        num_consts, num_carry = (len(list(group)) for group in groups[:2])
        return num_consts, num_carry
    return params["num_consts"], params["num_carry"]


def _of_scan(places: list[int | None], num_consts: int, num_carry: int) -> list[int | None]:
    """A carry is handed on if each step does so; of stacked arrays each step's own slice is."""

    def is_kept(index: int, place: int) -> bool:
        return place == num_consts + index if index < num_carry else place >= num_consts + num_carry

    return [
        place if place is not None and is_kept(index, place) else None
        for index, place in enumerate(places)
    ]
