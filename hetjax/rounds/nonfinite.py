"""Which operation made the first number that is not finite? A microbatch, done once more, tells.

It is repeated at the parameters and the state of its round, which was not updated: operation by
operation, and each one's result is looked at.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from hetjax import debugging, types
from hetjax import mesh as mesh_lib
from hetjax.losses import stateful
from hetjax.processes import board as board_lib
from hetjax.rounds import run_state
from hetjax.rounds import setup as setup_lib

MOST_IDS = 10  # that a message shows
_PATIENCE_SECS = 60.0
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "hetjax")
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where a call keeps its program


class Guilty(NamedTuple):
    """A microbatch that was not finite."""

    worker: int
    position: int  # in its round
    ids: list[int]


def shown(ids: list[int]) -> str:
    """The first few of them."""
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return f"{ids[:MOST_IDS]}{more}"


def guilty_of(setup: setup_lib.Setup, plan: run_state.Plan, positions: np.ndarray) -> Guilty:
    """The first of this process's workers, or else of all.

    Args:
        setup: of the run.
        plan: of the round.
        positions: i32[W]; -1: all of the worker's were finite. One is not.
    """
    bad = np.flatnonzero(positions >= 0).tolist()
    worker = next((w for w in bad if w in setup.where.own), bad[0])
    position = int(positions[worker])
    ids = plan.assigned.microbatches(worker)[position]
    return Guilty(worker, position, ids[ids >= 0].tolist())


def told(setup: setup_lib.Setup, plan: run_state.Plan, state: Any, guilty: Guilty) -> str:
    """What the first operation was, a sentence; the worker's own process finds it for all.

    Args:
        setup: of the run.
        plan: of the round.
        state: of all workers, leaves `[W, ...]`, when the round began; None: nobody knows it.
        guilty: the microbatch.
    """
    of_all = None if setup.company.gather is None else board_lib.Board("nonfinite")
    if guilty.worker in setup.where.own:
        text = _told(setup, plan, state, guilty)
        if of_all is not None:
            of_all.post(str(guilty.worker), text)
        return text
    assert of_all is not None
    process = int(setup.company.meeting.process_of[guilty.worker])
    try:
        return of_all.wait(
            str(guilty.worker), _PATIENCE_SECS, what="repeat a microbatch", by=process
        )
    except TimeoutError:
        return f"Process {process} can tell by which operation."


@debugging.compiled
def _told(setup: setup_lib.Setup, plan: run_state.Plan, state: Any, guilty: Guilty) -> str:
    if not isinstance(state, types.TrainState):
        return ""
    own = setup.where.own.index(guilty.worker)
    of_worker = state.params, state.worker, state.model_state
    if setup.where.mesh is None:
        row = mesh_lib.rows_on(of_worker, setup.where.devices)[own]
    else:
        row = mesh_lib.worker_rows(of_worker)[own]
    params, kept, model_state = jax.tree.map(lambda leaf: leaf[0], row)
    if odd := _not_finite(params):
        return f"The parameters {odd} were not finite before: the update before made them so."
    shared = types.Shared(params, plan.given, model_state=model_state)
    pass_index = int(plan.assigned.passes[guilty.worker])
    rng = jax.random.fold_in(setup.rng, pass_index)
    rows, rule = plan.assigned.microbatches(guilty.worker), plan.programs.rule
    try:
        last = setup.feed.load(guilty.worker, rows[guilty.position], pass_index)
        if odd := _not_finite(last.examples):
            return f"The examples themselves are not finite: {odd}."
        worker, sums = rule.begin(shared, kept if rule.keeps_worker else rule.init(params))
        if rule.losses is None:  # what it adds may depend on the microbatches before
            for ids in rows[: guilty.position]:
                microbatch = setup.feed.load(guilty.worker, ids, pass_index)
                worker, sums = rule.add(shared, worker, sums, microbatch, rng)
        found = search(rule.add, shared, worker, sums, last, rng)
    except jax.errors.ConcretizationTypeError:
        return (
            "The loss asks for numbers; so which operation made it is told by debug=True with "
            "jax_debug_nans."
        )
    except Exception as error:
        return f"It could not be repeated: {type(error).__name__}: {error}."
    if not found:
        return "Repeated by itself it is finite."
    text = f"The first number that is not finite, {found[0].kind}, is made by {found[0]}."
    return text + "".join(f" The first NaN is made by {nan}." for nan in found[1:])


def _not_finite(tree: types.PyTree) -> str:
    """The first leaf that is not, by name."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if np.issubdtype(leaf.dtype, np.inexact) and not np.isfinite(np.asarray(leaf)).all():
            return repr(stateful.path_of(path))
    return ""


class Operation(NamedTuple):
    """One that made a number that is not finite."""

    name: str
    kind: str
    place: str  # in the user's program

    def __str__(self) -> str:
        return f"{self.name} in {self.place}"


class _FoundError(Exception):
    """There is nothing more to look for."""


def search(function: Callable[..., Any], *arguments: Any) -> list[Operation]:
    """Does a function operation by operation; the ones that made what is not finite.

    That is the first one that made such a number of finite ones, and the first that made a NaN of
    others, if that is another. Infinite constants, as of a mask, are made by none.

    Args:
        function: that is traced. Loops are done step by step.
        *arguments: its, with numbers.
    """
    with debugging.eager(True):  # loops and calls are traced as what is in them
        program = jax.make_jaxpr(function)(*arguments)
    found: dict[str, Operation] = {}
    with contextlib.suppress(_FoundError):
        _run(program, jax.tree.leaves(arguments), found)
    return list(dict.fromkeys(found.values()))


def _run(program: Any, arguments: Sequence[Any], found: dict[str, Operation]) -> list[Any]:
    """What a closed jaxpr makes of its arguments."""
    numbers = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    numbers.update(zip(program.jaxpr.invars, arguments, strict=True))

    def number_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else numbers[variable]

    for equation in program.jaxpr.eqns:
        ins = [number_of(variable) for variable in equation.invars]
        inside = _inside(equation, ins)
        if inside is not None:
            outs = _run(*inside, found)
        else:
            outs = _done(equation, ins)
            _look(equation, ins, outs, found)
        numbers.update(zip(equation.outvars, outs, strict=True))
    return [number_of(variable) for variable in program.jaxpr.outvars]


def _done(equation: Any, ins: list[Any]) -> list[Any]:
    """What an operation makes."""
    options: Any = equation.primitive.get_bind_params(equation.params)
    if isinstance(options, tuple):  # before JAX 0.10: functions, too
        functions, options = options
        ins = [*functions, *ins]
    with equation.ctx.manager:
        made = equation.primitive.bind(*ins, **options)
    return made if equation.primitive.multiple_results else [made]


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
    is_of = functools.partial(_is_below, filename)
    return any(map(is_of, others)) or (is_of(own) and not is_of(os.path.join(own, "zoo")))


def _is_below(filename: str, directory: str) -> bool:
    return filename.startswith(f"{directory}{os.sep}")
