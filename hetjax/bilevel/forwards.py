"""The way forward of an unrolled estimator: its steps. Also forward mode, which holds none."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.bilevel import lower as lower_lib
from hetjax.bilevel import machine, trajectory, vectors
from hetjax.bilevel.problem import UPPER, At, Kind, What
from hetjax.bilevel.trajectory import Moment, Trajectory
from hetjax.types import PyTree


class Unrolled:
    """What the modes have in common: the way forward, the upper gradient, the end."""

    def __init__(
        self, lower: lower_lib.Lower, num_steps: int, back: int, start: str, pick: str
    ) -> None:
        self.lower, self.num_steps = lower, num_steps
        self.is_first_order = back == 0 and lower.uses_x  # all steps back, their gradients constant
        self.back = num_steps if self.is_first_order else back
        self.start, self.picks_worst = start, pick == "worst"

    def begin(self, x: PyTree, y: PyTree, state: machine.State | None) -> Trajectory:
        if self.start == "learned":
            if not isinstance(x, trajectory.Learned):
                raise ValueError("unroll: with start='learned' x is hetjax.bilevel.Learned(x, y)")
            x, y = x
        kept: PyTree = ()
        if self.start == "warm" and state is not None:
            y, kept = state.y, state.opt
        x, y = jax.tree.map(jnp.asarray, (x, y))
        opt = self.lower.first_state(x, y, kept)
        gradients = tuple(vectors.zeros_like(y) for _ in self.lower.levels)
        zero, loss = jnp.zeros((), jnp.int32), jnp.zeros((), vectors.dtype_of(y))
        tangents = self.first_tangents(x, y, opt)
        return Trajectory(
            x=x,
            y=y,
            opt=opt,
            k=zero,
            gradients=gradients,
            past=self.first_past(Moment(y, opt, gradients)),
            tangents=tangents,
            chosen=trajectory.Choice(loss - jnp.inf, zero, y, tangents) if self.picks_worst else (),
            reached=(y, opt),
            loss=loss,
            lower_loss=loss,
            grad_x=vectors.zeros_like(x),
            adjoint=(vectors.zeros_like(y), list(map(jnp.zeros_like, vectors.floats(opt)))),
            turn=zero if state is None else jnp.asarray(state.turn, jnp.int32),
        )

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        raise NotImplementedError

    def first_past(self, moment: Moment) -> PyTree:
        return ()

    def first_tangents(self, x: PyTree, y: PyTree, opt: PyTree) -> trajectory.Tangents | tuple[()]:
        return ()

    def ways(self, x: PyTree) -> tuple[machine.Step, ...]:
        """All steps forward, and then the upper gradient."""
        one = self.forward(x, self.made)
        batch = self.num_steps if UPPER in self.lower.levels else 0  # behind those of the steps

        def at(carry: Trajectory) -> At:
            return At(carry.x, carry.y, batch)

        what = What(Kind.GRADIENT, UPPER, ("x", "y"), is_new=not self.picks_worst)
        upper = machine.Ask(what, at, trajectory.take_upper)
        if not self.picks_worst:
            return machine.Repeat(self.num_steps, one), upper
        first, held = (
            machine.Ask(What(Kind.LOSS, UPPER, is_new=is_new), at, trajectory.take_loss)
            for is_new in (True, False)
        )
        others = machine.Repeat(self.num_steps - 1, (*one, held))
        return (*one, first, others, machine.Then(trajectory.to_chosen), upper)

    def forward(self, x: PyTree, made: Any, *, is_new: bool = True) -> tuple[machine.Step, ...]:
        """One step: a gradient of each level, and then the optimiser."""
        levels = enumerate(self.lower.levels)
        asks = [self.gradient(x, index, level, is_new) for index, level in levels]
        return (*asks, machine.Then(made))

    def gradient(self, x: PyTree, index: int, level: str, is_new: bool) -> machine.Ask:
        """Asks for the gradient of a level that a step takes."""
        what = What(Kind.GRADIENT, level, is_new=is_new)
        take = functools.partial(trajectory.take_gradient, index)
        return machine.Ask(what, trajectory.at_step, take)

    def made(self, carry: Trajectory) -> Trajectory:
        """The step itself, from the gradients that were asked for."""
        y, opt = lower_lib.moved(self.lower, carry.x, carry.y, carry.opt, carry.gradients, carry.k)
        return carry._replace(y=y, opt=opt, k=carry.k + 1)

    def smooth_step(self, opt: PyTree, k: Any) -> tuple[list[jax.Array], Callable]:
        """The floats of the optimiser's state, and a step `(x, y, floats, gradients)`."""
        floats, rebuilt = vectors.split(opt)

        def step(x: PyTree, y: PyTree, floats: list, gradients: tuple) -> tuple[PyTree, list]:
            y, opt = lower_lib.moved(self.lower, x, y, rebuilt(floats), gradients, k)
            return y, vectors.floats(opt)

        return floats, step

    def end(self, carry: Trajectory) -> machine.Result:
        grad_x = carry.grad_x
        if self.start == "learned":
            grad_x = trajectory.Learned(grad_x, carry.adjoint[0])
        chosen = carry.chosen.step if self.picks_worst else ()
        y, opt = carry.reached
        state = machine.State(y, () if self.picks_worst else opt, (), carry.turn + 1)
        info = machine.Info(carry.loss, carry.lower_loss, step_chosen=chosen)
        return machine.Result(grad_x, state, info)


class Displaced(Unrolled):
    """Differentiates nothing. `reached` holds the start until the steps are made."""

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        steps = machine.Repeat(self.num_steps, self.forward(x, self.made))
        return steps, machine.Then(self.displaced)

    def displaced(self, carry: Trajectory) -> Trajectory:
        away = vectors.add(carry.reached[0], carry.y, -1.0)
        return carry._replace(reached=(carry.y, carry.opt), adjoint=(away, carry.adjoint[1]))

    def end(self, carry: Trajectory) -> machine.Result:
        found = super().end(carry)
        return found._replace(info=found.info._replace(upper_loss=()))  # it was never asked for


class Forward(Unrolled):
    """Carries `d y / d x`, a tangent for each number of x; holds nothing of the steps."""

    def first_tangents(self, x: PyTree, y: PyTree, opt: PyTree) -> trajectory.Tangents:
        basis = vectors.basis(x)

        def begun(x: PyTree) -> list[jax.Array]:
            return vectors.floats(vectors.like(self.lower.init(x, y), opt))

        of_opt = jax.vmap(lambda dx: jax.jvp(begun, (x,), (dx,))[1])(basis)
        of_y = vectors.stack_of(y, vectors.size_of(x))
        return trajectory.Tangents(basis, of_y, of_opt, tuple(of_y for _ in self.lower.levels))

    def gradient(self, x: PyTree, index: int, level: str, is_new: bool) -> machine.Ask:
        what = What(Kind.TANGENTS, level, is_new=is_new, num_tangents=vectors.size_of(x))
        take = functools.partial(trajectory.take_tangents, index)
        return machine.Ask(what, trajectory.tangents_at, take)

    def made(self, carry: Trajectory) -> Trajectory:
        floats, step = self.smooth_step(carry.opt, carry.k)
        tangents = carry.tangents
        _, along = jax.linearize(step, carry.x, carry.y, floats, carry.gradients)
        y, opt = jax.vmap(along)(tangents.x, tangents.y, tangents.opt, tangents.gradients)
        return super().made(carry._replace(tangents=tangents._replace(y=y, opt=opt)))

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        return (*self.ways(x), machine.Then(self.gathered))

    def gathered(self, carry: Trajectory) -> Trajectory:
        """`d_x F + Z' d_y F`; the adjoint is the upper gradient."""
        along = jax.vmap(lambda dy: vectors.inner(dy, carry.adjoint[0]))(carry.tangents.y)
        return carry._replace(grad_x=vectors.add(carry.grad_x, trees.of_vector(along, carry.x)))
