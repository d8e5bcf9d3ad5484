"""One hypergradient by itself: on one device, without rounds, traceable."""

import jax

from hetjax.bilevel import batches as batches_lib
from hetjax.bilevel import diagnosis, machine
from hetjax.bilevel import problem as problem_lib
from hetjax.types import PyTree

_UPPER = problem_lib.What(problem_lib.Kind.LOSS, problem_lib.UPPER)


def hypergradient(
    problem: problem_lib.Bilevel,
    estimator: machine.Estimator,
    x: PyTree,
    y: PyTree,
    batches: batches_lib.Batches | None = None,
    state: machine.State | None = None,
) -> machine.Result:
    """The gradient of `F(x, y(x))` in x, as an estimator finds it.

    A pure function: it may be jitted, scanned and mapped. x, y and the batches are arguments, so
    nothing is captured.

    Args:
        problem: the two losses.
        estimator: from `unroll`, `implicit` or `value_gap`.
        x: the upper variable, a pytree of floating-point arrays.
        y: where the lower level begins if there is no state.
        batches: of each level; None for losses that need none. Either may be a `Stack`, with a
            batch for each request, and in `Blocks`, of which one at a time is in memory.
        state: what the last hypergradient kept; None for the first.

    Returns:
        `(grad_x, state, info)`: the gradient, like x; what is kept for the next one, with the lower
        variable that was reached in `state.y`; and what was found on the way.

    Raises:
        ValueError: the upper loss does not depend on y; the lower step has the derivative 0; a
            `Stack` or `Blocks` has wrong shapes; or, if nothing is traced, `check` refuses the
            result.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from hetjax import bilevel
        >>> problem = bilevel.Bilevel(
        ...     upper=lambda x, y, batch: 0.5 * (y - 1.0) ** 2,
        ...     lower=lambda x, y, batch: 0.5 * (y - x) ** 2,
        ... )
        >>> estimator = bilevel.implicit(bilevel.descent(optax.sgd(1.0)), 1)
        >>> grad_x, state, info = bilevel.hypergradient(
        ...     problem, estimator, jnp.float32(3.0), jnp.float32(0.0)
        ... )
        >>> float(grad_x), float(state.y)
        (2.0, 3.0)
    """
    given = batches_lib.Batches() if batches is None else batches

    def answered(what: problem_lib.What, at: problem_lib.At) -> problem_lib.Answer:
        return problem_lib.answer(problem, what, at, problem_lib.batch_of(given, what, at))

    program = estimator.program(x)
    for level, number in machine.num_batches(program).items():
        stack = getattr(given, level)
        if isinstance(stack, batches_lib.Stack):
            sizes = batches_lib.lengths_of(stack.batches)
            if len(sizes) != 1 or min(sizes) < number:
                raise ValueError(
                    f"Stack: the {level} batches are {sorted(sizes)}; the estimator needs {number}"
                )
    carry = estimator.begin(x, y, state)
    at = problem_lib.At(carry.x, carry.y)
    first = problem_lib.batch_of(given, _UPPER, at)
    if isinstance(first, batches_lib.Blocks):
        first = first.block(0)
    diagnosis.check_upper(problem_lib.mean(problem.upper), at.x, at.y, first)
    result = estimator.finish(machine.run(program, carry, answered), program)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)):
        diagnosis.check(result, stacklevel=3)
    return result
