"""The way forward of an unrolled estimator: its steps; and forward mode, which holds none."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.bilevel import lower as lower_lib
from hetjax.bilevel import machine, vectors, walks
from hetjax.bilevel.problem import UPPER, Kind, What
from hetjax.types import PyTree


class Unrolled:
    """What the modes have in common: the way forward, the upper gradient, the end."""

    def __init__(
        self, lower: lower_lib.Lower, num_steps: int, back: int, start: str, pick: str
    ) -> None:
        self.lower, self.num_steps, self.back = lower, num_steps, back
        self.start, self.picks_worst = start, pick == "worst"

    def begin(self, x: PyTree, y: PyTree, state: machine.State | None) -> walks.Walk:
        if self.start == "learned":
            if not isinstance(x, walks.Learned):
                raise ValueError(
                    "unroll: with start='learned' the upper variable is "
                    "hetjax.bilevel.Learned(x, start), and start is where the lower level begins"
                )
            x, y = x
        kept: PyTree = ()
        if self.start == "warm" and state is not None:
            y, kept = state.y, state.opt
        x, y = jax.tree.map(jnp.asarray, (x, y))
        opt = self.lower.first_state(x, y, kept)
        gradients = tuple(vectors.zeros_like(y) for _ in self.lower.levels)
        zero, loss = jnp.zeros((), jnp.int32), jnp.zeros((), vectors.dtype_of(y))
        tangents = self.first_tangents(x, y, opt)
        return walks.Walk(
            x=x,
            y=y,
            opt=opt,
            k=zero,
            gradients=gradients,
            past=self.first_past(walks.Moment(y, opt, gradients)),
            tangents=tangents,
            chosen=walks.Choice(loss - jnp.inf, zero, y, tangents) if self.picks_worst else (),
            reached=(y, opt),
            loss=loss,
            lower_loss=loss,
            grad_x=vectors.zeros_like(x),
            adjoint=(vectors.zeros_like(y), list(map(jnp.zeros_like, vectors.floats(opt)))),
            turn=zero if state is None else jnp.asarray(state.turn, jnp.int32),
        )

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        raise NotImplementedError

    def first_past(self, moment: walks.Moment) -> PyTree:
        del moment
        return ()

    def first_tangents(self, x: PyTree, y: PyTree, opt: PyTree) -> walks.Tangents | tuple[()]:
        del x, y, opt
        return ()

    def ways(self, x: PyTree) -> tuple[machine.Step, ...]:
        """All steps forward, and the upper gradient where they end."""
        one = self.forward(x, self.made)
        at = functools.partial(walks.at_end, self.num_steps if UPPER in self.lower.levels else 0)
        what = What(Kind.GRADIENT, UPPER, ("x", "y"), is_new=not self.picks_worst)
        upper = machine.Ask(what, at, walks.take_upper)
        if not self.picks_worst:
            return machine.Repeat(self.num_steps, one), upper
        first, held = (
            machine.Ask(What(Kind.LOSS, UPPER, is_new=is_new), at, walks.take_loss)
            for is_new in (True, False)
        )
        others = machine.Repeat(self.num_steps - 1, (*one, held))
        return (*one, first, others, machine.Then(walks.to_chosen), upper)

    def forward(self, x: PyTree, made: Any, *, is_new: bool = True) -> tuple[machine.Step, ...]:
        """One step: a gradient of each level, and then the optimiser."""
        del x
        asks = [
            machine.Ask(
                What(Kind.GRADIENT, level, is_new=is_new),
                walks.at_step,
                functools.partial(walks.take_gradient, index),
            )
            for index, level in enumerate(self.lower.levels)
        ]
        return (*asks, machine.Then(made))

    def made(self, walk: walks.Walk) -> walks.Walk:
        """The step itself, from the gradients that were asked for."""
        y, opt = self.lower.step(walk.x, walk.y, walk.opt, walk.gradients, walk.k)
        y, opt = vectors.like(y, walk.y), vectors.like(opt, walk.opt)
        return walk._replace(y=y, opt=opt, k=walk.k + 1)

    def end(self, walk: walks.Walk) -> machine.Result:
        grad_x = walk.grad_x
        if self.start == "learned":
            grad_x = walks.Learned(grad_x, walk.adjoint[0])
        chosen = walk.chosen.step if self.picks_worst else ()
        y, opt = walk.reached
        return machine.Result(
            grad_x,
            machine.State(y, () if self.picks_worst else opt, (), walk.turn + 1),
            machine.Info(walk.loss, walk.lower_loss, step_chosen=chosen),
        )


class Displaced(Unrolled):
    """Differentiates nothing; `reached` is the start until the steps are made."""

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        steps = machine.Repeat(self.num_steps, self.forward(x, self.made))
        return steps, machine.Then(self.displaced)

    def displaced(self, walk: walks.Walk) -> walks.Walk:
        away = vectors.add(walk.reached[0], walk.y, -1.0)
        return walk._replace(reached=(walk.y, walk.opt), adjoint=(away, walk.adjoint[1]))

    def end(self, walk: walks.Walk) -> machine.Result:
        found = super().end(walk)
        return found._replace(info=found.info._replace(upper_loss=()))  # nobody asked for it


class Forward(Unrolled):
    """Carries `d y / d x`, a tangent for each number of x; nothing is held of the steps."""

    def first_tangents(self, x: PyTree, y: PyTree, opt: PyTree) -> walks.Tangents:
        basis = vectors.basis(x)
        num = vectors.size_of(x)

        def none(leaf: jax.Array) -> jax.Array:
            return jnp.zeros((num, *leaf.shape), leaf.dtype)

        def begun(x: PyTree) -> list[jax.Array]:
            return vectors.floats(vectors.like(self.lower.init(x, y), opt))

        of_opt = jax.vmap(lambda dx: jax.jvp(begun, (x,), (dx,))[1])(basis)
        of_y = jax.tree.map(none, y)
        return walks.Tangents(basis, of_y, of_opt, tuple(of_y for _ in self.lower.levels))

    def forward(self, x: PyTree, made: Any, *, is_new: bool = True) -> tuple[machine.Step, ...]:
        asks = [
            machine.Ask(
                What(
                    Kind.TANGENTS,
                    level,
                    is_new=is_new,
                    num_tangents=vectors.size_of(x),
                ),
                walks.tangents_at,
                functools.partial(walks.take_tangents, index),
            )
            for index, level in enumerate(self.lower.levels)
        ]
        return (*asks, machine.Then(made))

    def made(self, walk: walks.Walk) -> walks.Walk:
        floats, rebuilt = vectors.split(walk.opt)

        def step(x: PyTree, y: PyTree, floats: list, gradients: tuple) -> tuple[PyTree, list]:
            y, opt = self.lower.step(x, y, rebuilt(floats), gradients, walk.k)
            return vectors.like(y, walk.y), vectors.floats(vectors.like(opt, walk.opt))

        tangents = walk.tangents
        _, along = jax.linearize(step, walk.x, walk.y, floats, walk.gradients)
        y, opt = jax.vmap(along)(tangents.x, tangents.y, tangents.opt, tangents.gradients)
        return super().made(walk._replace(tangents=tangents._replace(y=y, opt=opt)))

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        return (*self.ways(x), machine.Then(self.gathered))

    def gathered(self, walk: walks.Walk) -> walks.Walk:
        """`d_x F + Z' d_y F`; the adjoint is the upper gradient."""
        along = jax.vmap(lambda dy: vectors.inner(dy, walk.adjoint[0]))(walk.tangents.y)
        leaves, treedef = jax.tree.flatten(walk.x)
        parts, start = [], 0
        for leaf in leaves:
            part = along[start : start + leaf.size].reshape(leaf.shape)
            parts.append(part.astype(leaf.dtype))
            start += leaf.size
        indirect = jax.tree.unflatten(treedef, parts)
        return walk._replace(grad_x=vectors.add(walk.grad_x, indirect))
