"""Which operation made the first number that is not finite? A microbatch, done once more, tells.

It is repeated at the parameters and the state of its round, which was not updated: operation by
operation, and each one's result is looked at.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from hetjax import executor, types
from hetjax.local import rules
from hetjax.losses import stateful

MOST_IDS = 10  # that a message shows
COMES = "no operation makes it: it comes from"  # in a sentence about what was not finite before
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "hetjax")
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where a call keeps its program


def shown(ids: np.ndarray) -> str:
    """The first few of a microbatch; what is below 0 is none."""
    real = ids[ids >= 0].tolist()
    more = f" and {len(real) - MOST_IDS} more" if len(real) > MOST_IDS else ""
    return f"{real[:MOST_IDS]}{more}"


@executor.compiled
def cause(
    rule: rules.LocalRule,
    load: Callable[[np.ndarray], types.Microbatch],
    rows: np.ndarray,
    *,
    shared: types.Shared,
    kept: types.PyTree,
    rng: jax.Array,
) -> str:
    """What made the first number that is not finite, a sentence.

    Args:
        rule: that the worker has done.
        load: brings a microbatch by the ids of its examples.
        rows: i32[k, B]: the worker's microbatches of the round, up to the guilty one.
        shared, kept: what the round handed out, and what the worker kept, when it began.
        rng: the key of the worker's pass.
    """
    if odd := _not_finite(shared.params):
        made = "the update before made them so, or they were given"
        return f"The parameters{odd} were not finite before: {made}."
    try:
        last = load(rows[-1])
        if odd := _not_finite(last.examples):
            return f"The examples themselves are not finite:{odd}."
        worker, sums = rule.begin(
            shared, kept if rule.traits.keeps_worker else rule.init(shared.params)
        )
        if rule.observed is None:  # what it adds may depend on the microbatches before
            for ids in rows[:-1]:
                worker, sums = rule.add(shared, worker, sums, load(ids), rng)
        found = search(rule.add, shared, worker, sums, last, rng, taken=True)
    except jax.errors.ConcretizationTypeError:
        return "The loss asks for numbers: debug=True with jax_debug_nans tells the operation."
    except Exception as error:
        return f"It could not be repeated: {type(error).__name__}: {error}."
    if not found:
        return "Repeated by itself it is finite."
    if found[0].is_maker:
        text = f"The first number that is not finite, {found[0].kind}, is made by {found[0]}."
        return text + "".join(f" The first NaN is made by {nan}." for nan in found[1:])
    source = "a constant of the program"
    own = {"what the rule keeps": (worker, sums), "the model's state": shared.model_state}
    for whose, tree in {**own, "the values given to the round": shared.given}.items():
        source = f"{whose}{odd}" if (odd := _not_finite(tree)) else source
    return f"It is {found[-1].kind}, and {COMES} {source}, which {found[-1]} takes."


def _not_finite(tree: types.PyTree) -> str:
    """The first leaf that is not, by name."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if _kinds([leaf])[1]:
            return f" {stateful.path_of(path)!r}" if path else " (the array)"
    return ""


class Operation(NamedTuple):
    """One that made a number that is not finite."""

    name: str
    kind: str
    place: str  # in the user's program
    is_maker: bool = True  # else it takes one that no operation made

    def __str__(self) -> str:
        return f"{self.name} in {self.place}"


class _FoundError(Exception):
    """There is nothing more to look for."""


def search(function: Callable[..., Any], *arguments: Any, taken: bool = False) -> list[Operation]:
    """Does a function operation by operation; the ones that made what is not finite.

    That is the first one that made such a number of finite ones, and the first that made a NaN of
    others, if that is another. Infinite constants, as of a mask, are made by none.

    Args:
        function: that is traced. Loops are done step by step.
        *arguments: its, with numbers.
        taken: if none made it and the result is not finite, the ones that took such a number, of
            each kind the first.
    """
    with executor.of(executor.EAGER):  # loops and calls are traced as what is in them
        program = jax.make_jaxpr(function)(*arguments)
    found: dict[str, Operation] = {}
    with contextlib.suppress(_FoundError):
        taken &= _kinds(_run(program, jax.tree.leaves(arguments), found))[1]
    makers = [each for each in found.values() if each.is_maker]
    return list(dict.fromkeys(makers or (found.values() if taken else ())))


def _run(program: Any, arguments: Sequence[Any], found: dict[str, Operation]) -> list[Any]:
    """What a closed jaxpr makes of its arguments."""
    numbers = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    numbers.update(zip(program.jaxpr.invars, arguments, strict=True))

    def number_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else numbers[variable]

    for equation in program.jaxpr.eqns:
        ins = [number_of(variable) for variable in equation.invars]
        if (inside := _inside(equation, ins)) is not None:
            outs = _run(*inside, found)
        else:
            options = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                made = equation.primitive.bind(*ins, **options)
            outs = made if equation.primitive.multiple_results else [made]
            _look(equation, ins, outs, found)
        numbers.update(zip(equation.outvars, outs, strict=True))
    return [number_of(variable) for variable in program.jaxpr.outvars]


def _inside(equation: Any, ins: list[Any]) -> tuple[Any, list[Any]] | None:
    """The program in an operation, and what it is given; None where it is to be done as a whole."""
    params = equation.params
    if equation.primitive.name == "cond":
        return params["branches"][int(ins[0])], ins[1:]
    inner = next((params[key] for key in _INNER if key in params), None)
    if inner is None or equation.primitive.name in ("scan", "while"):
        return None
    closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    return (closed, ins) if len(closed.jaxpr.invars) == len(ins) else None


def _look(equation: Any, ins: list[Any], outs: list[Any], found: dict[str, Operation]) -> None:
    """Notes what an operation made.

    Raises:
        _FoundError: a NaN, of none.
    """
    is_nan, is_odd = _kinds(outs)
    if not is_odd:
        return
    was_nan, was_odd = _kinds(ins)
    kind = "NaN" if is_nan else "infinite"
    made = Operation(equation.primitive.name, kind, _place(equation))
    if not was_odd:
        found.setdefault("any", made)
    if is_nan and not was_nan:
        found["nan"] = made
        raise _FoundError
    found.setdefault(f"taken {kind}", made._replace(is_maker=False))


def _kinds(values: list[Any]) -> tuple[bool, bool]:
    """Whether a NaN is among them, and whether anything is not finite."""
    numbers = [v for v in values if jax.numpy.issubdtype(jax.numpy.result_type(v), np.inexact)]
    on_host = [np.asarray(v) for v in numbers]
    return any(np.isnan(v).any() for v in on_host), any(not np.isfinite(v).all() for v in on_host)


def _place(equation: Any) -> str:
    """The innermost line of the user's that asked for an operation, or for what it derives."""
    of = "the derivative of " if "transpose" in str(equation.source_info.name_stack) else ""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:  # the innermost comes first
        if not _is_of_a_library(frame.file_name):
            function = frame.function_name.split("<locals>.")[-1]
            return f"{of}{frame.file_name}:{frame.line_num}, in {function}"
    return f"{of}a library"


def _is_of_a_library(filename: str) -> bool:
    """Whether a file is of what hetjax stands on, or of hetjax but for its models."""
    loaded = [sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules]
    *others, own = [os.path.dirname(file) for file in loaded if file]
    is_of = pathlib.PurePath(filename).is_relative_to
    return any(map(is_of, others)) or (is_of(own) and not is_of(os.path.join(own, "zoo")))
