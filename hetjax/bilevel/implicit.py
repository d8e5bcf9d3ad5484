"""The implicit gradient: differentiates the condition that the lower level is at its minimum.

From `grad_y f(x, y) = 0` follows the hypergradient `d_x F - C v` with `H v = d_y F`. H is the
second derivative of f in y, and `C v = grad_x <grad_y f(x, y), v>`. No step of the lower level is
held.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetjax import parts
from hetjax.bilevel import diagnosis, machine, solvers, trajectory, vectors
from hetjax.bilevel import lower as lower_lib
from hetjax.bilevel.problem import LOWER, UPPER, Answer, At, Kind, What
from hetjax.types import PyTree

_NEEDS_ALL = "its linear system is that of one Hessian at one point"


class Implied(NamedTuple):
    """What an implicit estimator carries."""

    x: PyTree
    y: PyTree
    opt: PyTree
    k: jax.Array  # i32[]: steps made
    gradients: tuple[PyTree, ...]  # of the last step
    before: tuple[PyTree, PyTree]  # y and opt before it
    loss: jax.Array  # F
    lower_loss: jax.Array  # f before the last step
    grad_x: PyTree
    solving: solvers.Solving
    start: PyTree  # v of the last hypergradient
    turn: jax.Array  # i32[]: hypergradients before this one


def implicit(
    lower: lower_lib.Lower,
    num_steps: int,
    *,
    solve: solvers.Solver | None = None,
    cross: str = "jvp",
    fd_step: float = 0.01,
    warm: bool = True,
) -> machine.Estimator:
    """Solves the lower level by `num_steps` steps, and a linear system there.

    Args:
        lower: the steps, from `descent`; begun where the last hypergradient ended.
        num_steps: T.
        solve: `cg(Q, damp)` (default, Q = 10), `neumann(Q, eta)`, `scaled(eta)`, `one_step()` or
            `rank_one()`.
        cross: 'jvp', exact cross products; 'fd', by central differences of two gradients, at
            `y ± fd_step v / |v|`.
        fd_step: the distance of these points from y; the error falls with its square. 0.01 as in
            DARTS.
        warm: also begin the system with its last solution, for one product more.

    Returns:
        An estimator. It cannot tune what the lower minimum does not depend on, such as its
        learning rate: see `unroll`.

    Raises:
        ValueError: the lower steps use the upper gradient, or an option is not allowed.

    References:
        Pedregosa, "Hyperparameter optimization with approximate gradient", 2016, arXiv 1602.02355
        (conjugate gradients); Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by
        implicit differentiation", 2019, arXiv 1911.02590 (Neumann).
    """
    lower_lib.check(lower, "implicit", of_lower_alone=True)
    if not isinstance(solve, solvers.Solver | None):
        raise ValueError(f"implicit: solve is {solve!r}; give a solver, such as cg(10)")
    parts.choice("jvp", "fd").check("implicit: cross", cross)
    solve = solvers.cg(10) if solve is None else solve
    least = int(solve.kind == "optimizer")  # which goes through the last step
    parts.integer(at_least=least).check("implicit: num_steps", num_steps)
    parts.number(above=0.0).check("implicit: fd_step", fd_step)
    distance = fd_step if cross == "fd" else None
    made = _Implicit(lower, num_steps, solve, distance, solve.warm if warm else None)
    return machine.Estimator(made.begin, made.program, made.end, needs_all=_NEEDS_ALL)


class _Implicit(NamedTuple):
    """The checked options of `implicit`, and the functions that make its `Estimator`."""

    lower: lower_lib.Lower
    num_steps: int
    solve: solvers.Solver
    fd_step: float | None  # None: exact cross products
    warm: Callable[[solvers.Solving, PyTree], solvers.Solving] | None  # None: it begins anew

    def begin(self, x: PyTree, y: PyTree, state: machine.State | None) -> Implied:
        zero = jnp.zeros((), jnp.int32)
        x, y = jax.tree.map(jnp.asarray, (x, y if state is None else state.y))
        opt = self.lower.first_state(x, y, () if state is None else state.opt)
        none = vectors.zeros_like(y)
        return Implied(
            x=x,
            y=y,
            opt=opt,
            k=zero,
            gradients=(none,),
            before=(y, opt),
            loss=jnp.zeros((), vectors.dtype_of(y)),
            lower_loss=jnp.zeros((), vectors.dtype_of(y)),
            grad_x=vectors.zeros_like(x),
            solving=self.solve.begin(none, None),
            start=none if state is None or not self.warm else state.memory,
            turn=zero if state is None else jnp.asarray(state.turn, jnp.int32),
        )

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        take = functools.partial(trajectory.take_gradient, 0)
        ask = machine.Ask(What(Kind.GRADIENT, LOWER, is_new=True), trajectory.at_step, take)
        what = What(Kind.GRADIENT, UPPER, ("x", "y"), is_new=True)
        upper = machine.Ask(what, lambda carry: At(carry.x, carry.y), self.take_upper)
        first = (machine.Repeat(self.num_steps, (ask, machine.Then(self.made))), upper)
        match self.solve.kind:
            case "rank_one":
                what = What(Kind.GRADIENT, LOWER, ("x", "y"), is_new=True)
                return (*first, machine.Ask(what, trajectory.at_step, self.take_rank_one))
            case "optimizer":
                return (*first, machine.Then(self.pulled), *self.cross(is_new=True))
            case _:
                has_products = self.warm or self.solve.num_products
                return (*first, *self.system(), *self.cross(is_new=not has_products))

    def system(self) -> tuple[machine.Step, ...]:
        """The products, all on the next batch of the lower level."""

        def product(take: Callable, *, is_new: bool) -> machine.Ask:
            def taken(carry: Implied, answer: Answer) -> Implied:
                return carry._replace(solving=take(carry.solving, vectors.like(answer.y, carry.y)))

            return machine.Ask(What(Kind.PRODUCTS, LOWER, is_new=is_new), _along("vector"), taken)

        first, num_others = self.solve.take, self.solve.num_products - 1
        if self.warm:
            first, num_others = self.warm, self.solve.num_products
        if num_others < 0:
            return ()
        others = machine.Repeat(num_others, (product(self.solve.take, is_new=False),))
        return product(first, is_new=True), others

    def cross(self, *, is_new: bool) -> tuple[machine.Step, ...]:
        """Subtracts the cross product with v."""
        if self.fd_step is None:

            def subtracted(carry: Implied, answer: Answer) -> Implied:
                return carry._replace(grad_x=vectors.add(carry.grad_x, answer.x, -1.0))

            what = What(Kind.PRODUCTS, LOWER, ("x",), is_new=is_new)
            return (machine.Ask(what, _along("solution"), subtracted),)
        return tuple(
            machine.Ask(
                What(Kind.GRADIENT, LOWER, ("x",), is_new=is_new and sign > 0),
                functools.partial(self.beside, sign),
                functools.partial(self.take_difference, sign),
            )
            for sign in (1.0, -1.0)
        )

    def distance(self, carry: Implied) -> jax.Array:
        """The distance of the points of a central difference from y, over |v|."""
        assert self.fd_step is not None
        size = vectors.norm(carry.solving.solution)
        return self.fd_step / jnp.where(size > 0, size, 1)

    def beside(self, sign: float, carry: Implied) -> At:
        y = vectors.add(carry.y, carry.solving.solution, sign * self.distance(carry))
        return At(carry.x, y, carry.k)

    def take_difference(self, sign: float, carry: Implied, answer: Answer) -> Implied:
        scale = -sign / (2 * self.distance(carry))
        return carry._replace(grad_x=vectors.add(carry.grad_x, answer.x, scale))

    def made(self, carry: Implied) -> Implied:
        y, opt = lower_lib.moved(self.lower, carry.x, carry.y, carry.opt, carry.gradients, carry.k)
        return carry._replace(y=y, opt=opt, k=carry.k + 1, before=(carry.y, carry.opt))

    def take_upper(self, carry: Implied, answer: Answer) -> Implied:
        right = vectors.like(answer.y, carry.y)
        return carry._replace(
            loss=answer.loss.astype(carry.loss.dtype),
            grad_x=vectors.like(answer.x, carry.x),
            solving=self.solve.begin(right, carry.start if self.warm else None),
        )

    def take_rank_one(self, carry: Implied, answer: Answer) -> Implied:
        square = vectors.inner(answer.y, answer.y) + self.solve.damp
        along = vectors.inner(carry.solving.right, answer.y)
        share = jnp.where(square > 0, along / jnp.where(square > 0, square, 1), 0)
        return carry._replace(grad_x=vectors.add(carry.grad_x, answer.x, -share))

    def pulled(self, carry: Implied) -> Implied:
        y, opt = carry.before

        def step(gradients: tuple) -> PyTree:
            return lower_lib.moved(self.lower, carry.x, y, opt, gradients, carry.k - 1)[0]

        ((pulled,),) = diagnosis.pull_through(step, carry.gradients)(carry.solving.right)
        solution = jax.tree.map(jnp.negative, pulled)
        return carry._replace(solving=carry.solving._replace(solution=solution))

    def end(self, carry: Implied) -> machine.Result:
        solving = carry.solving
        has_system = self.solve.num_products > 0 or self.warm
        size, left = vectors.norm(solving.right), vectors.norm(solving.residual)
        info = machine.Info(
            carry.loss,
            carry.lower_loss if self.num_steps else (),
            residual=left / jnp.where(size > 0, size, 1) if has_system else (),
            curvature=solving.curvature if has_system else (),
        )
        memory = solving.solution if self.warm else ()
        state = machine.State(carry.y, carry.opt, memory, carry.turn + 1)
        return machine.Result(carry.grad_x, state, info)


def _along(which: str) -> Callable[[Implied], At]:
    """At the last step, along a vector of the linear system."""
    return lambda carry: trajectory.at_step(carry)._replace(vector=getattr(carry.solving, which))
