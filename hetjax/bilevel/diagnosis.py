"""What is wrong with a problem or a hypergradient, in words that say what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hetjax.bilevel import batches as batches_lib
from hetjax.bilevel import machine
from hetjax.bilevel import problem as problem_lib
from hetjax.types import PyTree

_GROWS = 1.0  # a residual above so many times the right side is that of no solution
_INSTEAD = "implicit or value_gap"  # what to take if lower steps have no derivative


def check_floating(**given: PyTree) -> None:
    """Refuses what is no pytree of floating-point arrays.

    Raises:
        ValueError: it is none. The message names the leaf.
    """
    for name, tree in given.items():
        leaves = jax.tree.leaves_with_path(tree)
        if not leaves:
            raise ValueError(f"{name} has no arrays; give a pytree of them")
        for path, leaf in leaves:
            try:
                kind: Any = jnp.result_type(leaf)
                is_floating = jnp.issubdtype(kind, jnp.floating)
            except TypeError:  # no array
                kind, is_floating = type(leaf).__name__, False
            if not is_floating:
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} is of type {kind}; {name} is a pytree of "
                    "floating-point arrays, which have derivatives. Give other values in the batch"
                )


def check_upper(upper: Callable, x: PyTree, y: PyTree, batch: Any) -> None:
    """Refuses an upper loss that does not depend on y, as its program shows.

    Raises:
        ValueError: its gradient in y is 0 everywhere.
    """
    if _is_zero(lambda x, y, batch: jax.grad(upper, 1)(x, y, batch), x, y, batch):
        raise ValueError(
            "the upper loss does not depend on y, so the lower level changes "
            "nothing: the gradient is that of the upper loss in x alone. Did upper and lower "
            "change places, or is y used through stop_gradient?"
        )


def check_stack(level: str, given: Any, number: int) -> None:
    """Refuses a stack of fewer batches than an estimator asks for.

    Raises:
        ValueError: it has fewer.
    """
    if not isinstance(given, batches_lib.Stack):
        return
    sizes = batches_lib.lengths_of(given.batches)
    if len(sizes) != 1 or min(sizes) < number:
        raise ValueError(
            f"the stack of {level} batches has leading axes {sorted(sizes)}, and "
            f"this estimator asks for {number} batches of that level: give leaves [{number}, ...], "
            "or one batch without Stack, which every request takes whole"
        )


def pull_through(step: Callable, *arguments: PyTree, instead: str = _INSTEAD) -> Callable:
    """`jax.vjp` of a lower step, whose last argument is its gradients.

    Args:
        step: of the lower level.
        *arguments: the point at which it is differentiated.
        instead: what to take if it has no derivative, for the message.

    Raises:
        ValueError: the step has no derivative, or one that is 0 everywhere.
    """
    what = (
        "the lower step cannot be differentiated: {}. Take an optimiser that is a smooth "
        f"function of the gradient, such as optax.sgd or optax.adam, or {instead}, "
        "which do not differentiate it"
    )
    try:
        moved, pull = jax.vjp(step, *arguments)
    except Exception as error:
        raise ValueError(what.format(error)) from error

    def in_gradients(gradients: PyTree) -> PyTree:
        return step(*arguments[:-1], gradients)

    def pulled(gradients: PyTree, cotangents: PyTree) -> PyTree:
        return jax.vjp(in_gradients, gradients)[1](cotangents)

    if _is_zero(pulled, arguments[-1], moved):
        raise ValueError(what.format("its derivative in the gradient is 0 everywhere"))
    return pull


def check(result: machine.Result, *, stacklevel: int = 2) -> None:
    """Refuses a wrong hypergradient. Call it on the host, after a jitted function has returned.

    If nothing is traced, `hypergradient` calls it by itself. It warns, by `warnings`, of steps that
    a barrier took back; if no step was left, that is an error.

    Args:
        result: of `hypergradient`, or of a mapped one.
        stacklevel: of the warning: 2 names the line of the caller.

    Raises:
        ValueError: conjugate gradients met a curvature that is not positive, a linear system was
            not solved, all steps crossed a barrier, or the gradient is not finite.
    """
    info = result.info
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.grad_x)):
        raise ValueError(
            "hypergradient: it is not finite. hetjax.bilevel.explain(problem, estimator, x, y, "
            "batches, state) names the first request whose answer was not"
        )
    check_solved(info)
    check_barrier(info)
    _warn_of_barrier(info, stacklevel + 1)


def check_solved(info: machine.Info) -> None:
    """Refuses what is not the solution of a linear system.

    Raises:
        ValueError: as `check`.
    """
    residual = -np.inf if isinstance(info.residual, tuple) else float(np.max(info.residual))
    curvature = np.inf if isinstance(info.curvature, tuple) else float(np.min(info.curvature))
    if curvature <= 0:
        raise ValueError(
            f"implicit: conjugate gradients met a direction of curvature {curvature:.3g}, along "
            "which the lower loss has no minimum: it is not convex at y, or y is not near its "
            f"minimum. Give a damp that is larger by {-curvature:.3g} at the least (other "
            "directions may need more), make more lower steps, or take value_gap, which needs no "
            "convexity"
        )
    if not isinstance(info.curvature, tuple):
        kind = np.asarray(info.residual).dtype
        # The norm of their residuals may grow meanwhile by the root of the condition number.
        if residual**2 * float(jnp.finfo(kind).eps) > 1:
            raise ValueError(
                f"implicit: conjugate gradients left a residual of {residual:.3g} times the right "
                f"side of their system, which is singular to the precision of {kind}: give a damp, "
                "add a ridge to the lower loss, or take value_gap"
            )
    elif residual > _GROWS:
        raise ValueError(
            f"implicit: the linear system is left with a residual of {residual:.3g} times its "
            "right side: the steps of its solution grow. Give neumann a smaller eta (below 2 over "
            "the greatest curvature) or a damp, or take cg"
        )


def check_barrier(info: machine.Info) -> None:
    """Refuses a hypergradient all of whose steps a barrier took back.

    Raises:
        ValueError: as `check`.
    """
    if isinstance(info.crossed, tuple):
        return
    crossed, stood = np.asarray(info.crossed), np.asarray(info.stood)
    is_stuck = (crossed > 0) & (stood == 0)
    if is_stuck.any():
        of = f"in {is_stuck.sum()} of {is_stuck.size} hypergradients " if crossed.ndim else ""
        raise ValueError(
            f"value_gap: {of}all steps of y crossed the barrier, {crossed[is_stuck].max()} one "
            "after the other, and were taken back by half. So y is where z is, and nothing is left "
            f"of the lower level in the gradient. {BARRIER}"
        )


def _warn_of_barrier(info: machine.Info, stacklevel: int) -> None:
    if isinstance(info.crossed, tuple):
        return
    crossed, stood = np.asarray(info.crossed), np.asarray(info.stood)
    if crossed.any():
        warnings.warn(
            f"value_gap: {crossed.sum()} of {crossed.sum() + stood.sum()} steps of y crossed the "
            "barrier and were taken back by half, which costs their gradients; y went on from the "
            f"others. If they are many: {BARRIER[0].lower()}{BARRIER[1:]}",
            stacklevel=stacklevel,
        )


BARRIER = (  # what to do about steps that cross it
    "Lower the learning rate of the lower steps, or give the barrier a larger sigma, which turns y "
    "back sooner, or a larger shift, which lets y farther; upper_steps=, more steps of y, leaves "
    "more halvings"
)


def explain(
    problem: problem_lib.Bilevel,
    estimator: machine.Estimator,
    x: PyTree,
    y: PyTree,
    batches: batches_lib.Batches | None = None,
    state: machine.State | None = None,
) -> str:
    """Computes a hypergradient request by request; names the first answer that is not finite.

    Args:
        problem: its losses are computed eagerly.
        estimator: asks for the sums.
        x: the upper variable.
        y: the lower variable.
        batches: of both levels; None: losses without data.
        state: the last result's; None: the first hypergradient.

    Returns:
        A sentence; "" if every answer is finite.

    Raises:
        ValueError: the leaves of `Blocks` have no leading axis in common.
    """
    given = batches_lib.Batches() if batches is None else batches
    position, number = estimator.init(x, y, state), 0
    while not position.is_done:
        what, at = estimator.request(position)
        batch = problem_lib.batch_of(given, what, at)
        answer = problem_lib.answer(problem, what, at, batch)
        if name := _not_finite(answer):
            return (
                f"request {number}, {what.kind.value} of the {what.level} level on batch "
                f"{int(at.batch)}{_block(problem, what, at, batch)}: {_NAMES[name]} is not "
                f"finite. {_points(at)}"
            )
        position, number = estimator.receive(position, answer), number + 1
    return ""


_NAMES = {
    "loss": "the loss",
    "x": "what is like x",
    "y": "what is like y",
    "tangents": "a derivative along a tangent",
}


def _not_finite(answer: problem_lib.Answer) -> str:
    """The first of an answer's sums that is not finite; "" if all are."""
    for name, tree in zip(answer._fields, answer, strict=True):
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)):
            return name
    return ""


def _block(
    problem: problem_lib.Bilevel, what: problem_lib.What, at: problem_lib.At, batch: Any
) -> str:
    """The first block whose own answer is not finite."""
    if not isinstance(batch, batches_lib.Blocks):
        return ""
    for number in range(batch.num_blocks):
        if _not_finite(problem_lib.answer(problem, what, at, batch.block(number))):
            return f", block {number} of {batch.num_blocks}"
    return ""


def _points(at: problem_lib.At) -> str:
    """Whether the point at which it was asked was finite, in words."""
    wrong = [
        name
        for name, tree in (("x", at.x), ("y", at.y), ("the vector", at.vector))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    ]
    if not wrong:
        return "It was asked at finite values: look at the loss and at this batch"
    return f"{' and '.join(wrong)} were not finite before: lower the learning rate of the steps"


def _is_known(variable: Any, known: set) -> bool:
    return not isinstance(variable, core.Literal) and variable in known


def _is_zero(function: Callable, *arguments: PyTree) -> bool:
    """Whether a function's program shows that all it returns is 0, whatever it is given."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), arguments
    )
    closed = jax.make_jaxpr(function)(*shapes)
    jaxpr = closed.jaxpr
    known = set(jaxpr.invars)
    for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        if isinstance(constant, jax.core.Tracer):  # of another trace: it may have any values
            known.add(variable)
    for equation in jaxpr.eqns:
        if any(_is_known(v, known) for v in equation.invars):
            known.update(equation.outvars)
    if any(_is_known(v, known) for v in jaxpr.outvars):
        return False
    with jax.ensure_compile_time_eval():
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        found = function(*zeros)
        return all(not np.any(leaf) for leaf in jax.tree.leaves(found))
