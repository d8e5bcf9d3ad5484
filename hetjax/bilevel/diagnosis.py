"""What is wrong with a problem or a hypergradient, in words that say what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval as pe

from hetjax.bilevel import batches as batches_lib
from hetjax.bilevel import machine
from hetjax.bilevel import problem as problem_lib
from hetjax.types import PyTree

_GROWS = 1.0  # a residual above so many times the right side is that of no solution


def check_upper(upper: Callable, x: PyTree, y: PyTree, batch: Any) -> None:
    """Refuses an upper loss that does not depend on y, as its program shows.

    Raises:
        ValueError: its gradient in y is 0 everywhere.
    """
    if _is_zero(jax.grad(upper, 1), x, y, batch):
        raise ValueError("the upper loss does not depend on y: did upper and lower change places?")


def pull_through(step: Callable, *arguments: PyTree) -> Callable:
    """`jax.vjp` of a lower step, whose last argument is its gradients.

    Args:
        step: of the lower level.
        *arguments: the point at which it is differentiated.

    Raises:
        ValueError: the derivative of the step is 0 everywhere.
    """
    moved, pull = jax.vjp(step, *arguments)

    def pulled(gradients: PyTree, cotangents: PyTree) -> PyTree:
        return jax.vjp(lambda each: step(*arguments[:-1], each), gradients)[1](cotangents)

    if _is_zero(pulled, arguments[-1], moved):
        raise ValueError(
            "the lower step has the derivative 0 in the gradient; take a smooth optimiser, such as "
            "optax.sgd, or an estimator that does not differentiate it"
        )
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
    if not _is_finite(result.grad_x):
        raise ValueError("hypergradient: it is not finite; hetjax.bilevel.explain says where")
    check_found(info)
    if np.any(info.crossed):
        crossed, stood = np.sum(info.crossed), np.sum(info.stood)
        warnings.warn(
            f"value_gap: {crossed} of {crossed + stood} steps of y crossed the barrier and were "
            f"taken back by half. {BARRIER}",
            stacklevel=stacklevel,
        )


def check_found(info: machine.Info) -> None:
    """Refuses what is no solution of a linear system, and what a barrier left nothing of.

    Raises:
        ValueError: as `check`.
    """
    if not isinstance(info.residual, tuple):
        _check_solved(info)
    crossed, stood = np.asarray(info.crossed), np.asarray(info.stood)
    is_stuck = (crossed > 0) & (stood == 0)
    if is_stuck.any():
        of = f"in {is_stuck.sum()} of {is_stuck.size} hypergradients " if crossed.ndim else ""
        raise ValueError(f"value_gap: {of}all steps of y crossed the barrier. {BARRIER}")


def _check_solved(info: machine.Info) -> None:
    residual = float(np.max(info.residual))
    curvature = np.inf if isinstance(info.curvature, tuple) else float(np.min(info.curvature))
    if curvature <= 0:
        raise ValueError(
            f"implicit: the lower loss has the curvature {curvature:.3g}; give cg a damp that is "
            f"larger by {-curvature:.3g} at least, or take value_gap"
        )
    most, way = _GROWS, "give neumann a smaller eta or a damp, or take cg"
    if not isinstance(info.curvature, tuple):
        # The norm of their residuals may grow meanwhile by the root of the condition number.
        most = float(jnp.finfo(np.asarray(info.residual).dtype).eps) ** -0.5
        way = "it is singular: give cg a damp"
    if residual > most:
        raise ValueError(
            f"implicit: the linear system is left with {residual:.3g} times its right side; {way}"
        )


BARRIER = "Lower the learning rate, or give a larger sigma, shift or upper_steps"
"""What to do about steps that cross it."""


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
                f"{int(at.batch)}{_block(problem, what, at, batch)}: its {name} is not finite. "
                f"{_points(at)}"
            )
        position, number = estimator.receive(position, answer), number + 1
    return ""


def _not_finite(answer: problem_lib.Answer) -> str:
    """The first of an answer's sums that is not finite; "" if all are."""
    sums = zip(answer._fields, answer, strict=True)
    return next((name for name, tree in sums if not _is_finite(tree)), "")


def _is_finite(tree: PyTree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


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
    points = {"x": at.x, "y": at.y, "the vector": at.vector}
    wrong = [name for name, tree in points.items() if not _is_finite(tree)]
    if not wrong:
        return "It was asked at finite values: look at the loss and at this batch"
    return f"{' and '.join(wrong)} were not finite before: lower the learning rate of the steps"


def _is_zero(function: Callable, *arguments: PyTree) -> bool:
    """Whether a function's program shows that all it returns is 0, whatever it is given."""
    shapes = jax.eval_shape(lambda *given: given, *arguments)
    closed = jax.make_jaxpr(function)(*shapes)
    _, of_constants, of_given = pe.dce_jaxpr_consts(closed.jaxpr, [True] * len(closed.out_avals))
    constants = zip(closed.consts, of_constants, strict=True)  # one of another trace may be all
    if any(of_given) or any(is_used and isinstance(x, jax.core.Tracer) for x, is_used in constants):
        return False
    with jax.ensure_compile_time_eval():
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        found = function(*zeros)
        return all(not np.any(leaf) for leaf in jax.tree.leaves(found))
