"""The explicit gradient: differentiates the lower steps that were made.

With `y_{t+1} = Psi_t(x, y_t)`, adjoints `a_T = d_y F(x, y_T)`, `a_t = (d_y Psi_t)' a_{t+1}`, the
hypergradient is `d_x F + sum_t (d_x Psi_t)' a_{t+1}`. Psi is an optimiser around a gradient. So an
adjoint goes through the optimiser by `jax.vjp`, and through the gradient by a product that is
asked for. Reverse mode holds the trajectory and asks for its batches again; forward mode carries
`Z_t = d y_t / d x`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.bilevel import lower as lower_lib
from hetjax.bilevel import machine, vectors, walks
from hetjax.bilevel.problem import LOWER, UPPER, At, Kind, What
from hetjax.types import PyTree

_OPTIONS = {
    "mode": ("reverse", "forward"),
    "start": ("warm", "cold", "learned"),
    "pick": ("last", "worst"),
}


class Learned(NamedTuple):
    """An upper variable that has the lower level's start in it, for `start="learned"`."""

    x: PyTree
    start: PyTree  # like y


def unroll(
    lower: lower_lib.Lower,
    num_steps: int,
    *,
    back: int | None = None,
    mode: str = "reverse",
    checkpoint: bool = False,
    start: str = "warm",
    pick: str = "last",
) -> machine.Estimator:
    """Differentiates `num_steps` lower steps.

    Args:
        lower: the steps, from `descent` or `aggregate`.
        num_steps: T.
        back: K, the steps that are differentiated, from the last one; by default all. 0: the lower
            variable counts as constant.
        mode: 'reverse', memory grows with K; 'forward', memory with the number of x's numbers
            and time with their number, for a few of them.
        checkpoint: reverse mode holds every sqrt(T)-th step, and makes the others once more.
        start: 'warm', where the last hypergradient ended; 'cold', at the y that is given;
            'learned': x is a `Learned`, and its start gets a gradient.
        pick: 'last'; or 'worst', the iterate with the highest upper loss, 1 to T.

    Returns:
        an estimator; the gradient has the form of x.

    Raises:
        ValueError: options that contradict each other; says which.

    References:
        Franceschi, Donini, Frasconi, Pontil, "Forward and reverse gradient-based hyperparameter
        optimization", 2017, arXiv 1703.01785; Shaban, Cheng, Hatch, Boots, "Truncated
        back-propagation for bilevel optimization", 2018, arXiv 1810.10667; Liu, Liu, Zeng, Zhang,
        "Towards gradient-based bilevel optimization with non-convex followers and beyond", 2021,
        arXiv 2110.00455 (learned start and worst iterate).
    """
    back = num_steps if back is None else back
    _check(num_steps, back, checkpoint=checkpoint, mode=mode, start=start, pick=pick)
    kind = _Forward if mode == "forward" else _Checkpointed if checkpoint else _Reverse
    made = kind(lower, num_steps, back, start, pick)
    return machine.Estimator(made.begin, made.program, made.end)


def _check(num_steps: int, back: int, *, checkpoint: bool, **chosen: str) -> None:
    for name, given in chosen.items():
        if given not in _OPTIONS[name]:
            known = ", ".join(map(repr, _OPTIONS[name]))
            raise ValueError(f"unroll: {name} is {given!r}; it must be one of {known}")
    if num_steps < 1 or not 0 <= back <= num_steps:
        raise ValueError(
            f"unroll: {num_steps} steps of which {back} are differentiated; give at least one "
            "step, and back between 0 and their number"
        )
    is_forward = chosen["mode"] == "forward"
    if is_forward and (back < num_steps or checkpoint or chosen["start"] == "learned"):
        raise ValueError(
            "unroll: forward mode differentiates all steps as they are made, holds nothing, and "
            "has no gradient of the start; take mode='reverse' for back, checkpoint or "
            "start='learned'"
        )
    if checkpoint and (back < num_steps or chosen["pick"] == "worst"):
        raise ValueError(
            "unroll: checkpoints are for all steps of the last iterate; leave out back= and "
            "pick='worst', or checkpoint=True"
        )


class _Unrolled:
    """What the modes have in common: the way forward, the upper gradient, the end."""

    def __init__(
        self, lower: lower_lib.Lower, num_steps: int, back: int, start: str, pick: str
    ) -> None:
        self.lower, self.num_steps, self.back = lower, num_steps, back
        self.start, self.picks_worst = start, pick == "worst"

    def begin(self, x: PyTree, y: PyTree, state: machine.State | None) -> walks.Walk:
        if self.start == "learned":
            if not isinstance(x, Learned):
                raise ValueError(
                    "unroll: with start='learned' the upper variable is "
                    "hetjax.bilevel.Learned(x, start), and start is where the lower level begins"
                )
            x, y = x
        elif self.start == "warm" and state is not None:
            y = state.y
        x, y = jax.tree.map(jnp.asarray, (x, y))
        opt = jax.tree.map(jnp.asarray, self.lower.init(x, y))
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
            reached=y,
            loss=loss,
            grad_x=vectors.zeros_like(x),
            adjoint=(vectors.zeros_like(y), list(map(jnp.zeros_like, vectors.floats(opt)))),
            turn=zero if state is None else jnp.asarray(state.turn, jnp.int32),
        )

    def first_past(self, moment: walks.Moment) -> PyTree:
        del moment
        return ()

    def first_tangents(self, x: PyTree, y: PyTree, opt: PyTree) -> walks.Tangents | tuple[()]:
        del x, y, opt
        return ()

    def ways(self, x: PyTree) -> tuple[machine.Step, ...]:
        """All steps forward, and the upper gradient where they end."""
        one = self.forward(x, self.made)
        if self.picks_worst:
            one += (machine.Ask(What(Kind.LOSS, UPPER), walks.here, walks.take_loss),)
        way: tuple[machine.Step, ...] = (machine.Repeat(self.num_steps, one),)
        if self.picks_worst:
            way += (machine.Then(walks.to_chosen),)
        return (
            *way,
            machine.Ask(What(Kind.GRADIENT, UPPER, ("x", "y")), walks.here, walks.take_upper),
        )

    def forward(self, x: PyTree, made: Any, *, is_new: bool = True) -> tuple[machine.Step, ...]:
        """One step: a gradient of each level, and then the optimiser."""
        del x
        asks = [
            machine.Ask(
                What(Kind.GRADIENT, level, is_new=is_new and level == LOWER),
                functools.partial(walks.at_step, level),
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
            grad_x = Learned(grad_x, walk.adjoint[0])
        chosen = walk.chosen.step if self.picks_worst else ()
        return machine.Result(
            grad_x,
            machine.State(walk.reached, (), walk.turn + 1),
            machine.Info(walk.loss, step_chosen=chosen),
        )


class _Backwards(_Unrolled):
    """Reverse mode: one step back is a pull through the optimiser, and a product of each level."""

    def moment(self, walk: walks.Walk) -> walks.Moment:
        """Of step k - 1, which the adjoint goes through next."""
        raise NotImplementedError

    def backward(self) -> tuple[machine.Step, ...]:
        asks = [
            machine.Ask(
                What(Kind.PRODUCTS, level, ("x", "y")),
                functools.partial(self.product_at, index, level),
                walks.take_products,
            )
            for index, level in enumerate(self.lower.levels)
        ]
        return (machine.Then(self.pulled), *asks, machine.Then(walks.one_less))

    def pulled(self, walk: walks.Walk) -> walks.Walk:
        """The adjoint before the optimiser of step k - 1, but for what goes through gradients."""
        moment = self.moment(walk)
        floats, rebuilt = vectors.split(moment.opt)

        def step(x: PyTree, y: PyTree, floats: list, gradients: tuple) -> tuple[PyTree, list]:
            y, opt = self.lower.step(x, y, rebuilt(floats), gradients, walk.k - 1)
            return vectors.like(y, moment.y), vectors.floats(vectors.like(opt, moment.opt))

        _, pull = jax.vjp(step, walk.x, moment.y, floats, moment.gradients)
        x, y, opt, gradients = pull(walk.adjoint)
        grad_x = vectors.add(walk.grad_x, x)
        return walk._replace(adjoint=(y, opt), grad_x=grad_x, gradients=gradients)

    def product_at(self, index: int, level: str, walk: walks.Walk) -> At:
        at = walks.at_step(level, walk._replace(y=self.moment(walk).y, k=walk.k - 1))
        return at._replace(vector=walk.gradients[index])


class _Reverse(_Backwards):
    """Holds the last K steps; where the worst iterate is taken, all of them."""

    @property
    def held(self) -> int:
        return self.num_steps if self.picks_worst and self.back else self.back

    def first_past(self, moment: walks.Moment) -> PyTree:
        return vectors.rows_of(moment, self.held) if self.held else ()

    def made(self, walk: walks.Walk) -> walks.Walk:
        if self.held:
            moment = walks.Moment(walk.y, walk.opt, walk.gradients)
            row = jnp.maximum(walk.k - (self.num_steps - self.held), 0)  # written over, before
            walk = walk._replace(past=vectors.put(walk.past, row, moment))
        return super().made(walk)

    def moment(self, walk: walks.Walk) -> walks.Moment:
        return vectors.row(walk.past, walk.k - 1 - (self.num_steps - self.held))

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        fewer = self.fewer if self.picks_worst else None
        way = (*self.ways(x), machine.Repeat(self.back, self.backward(), fewer))
        return (*way, machine.Then(self.begun)) if self.held == self.num_steps else way

    def begun(self, walk: walks.Walk) -> walks.Walk:
        return walks.through_first(self.lower.init, vectors.row(walk.past, 0).y, walk)

    def fewer(self, walk: walks.Walk) -> jax.Array:
        """Steps back from the iterate that was taken."""
        return jnp.minimum(walk.k, self.back)


class _Checkpointed(_Backwards):
    """Holds every R-th step; the steps between are made once more on the way back."""

    @property
    def length(self) -> int:
        return math.isqrt(self.num_steps - 1) + 1

    @property
    def num_segments(self) -> int:
        return -(-self.num_steps // self.length)

    def first_past(self, moment: walks.Moment) -> PyTree:
        start = moment._replace(gradients=())
        return vectors.rows_of(start, self.num_segments), vectors.rows_of(moment, self.length)

    def made(self, walk: walks.Walk) -> walks.Walk:
        starts, segment = walk.past
        row = walk.k // self.length
        is_start = walk.k % self.length == 0
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_start, new, old),
            walks.Moment(walk.y, walk.opt, ()),
            vectors.row(starts, row),
        )
        return super().made(walk._replace(past=(vectors.put(starts, row, kept), segment)))

    def made_again(self, walk: walks.Walk) -> walks.Walk:
        starts, segment = walk.past
        moment = walks.Moment(walk.y, walk.opt, walk.gradients)
        segment = vectors.put(segment, walk.k % self.length, moment)
        return super().made(walk._replace(past=(starts, segment)))

    def moment(self, walk: walks.Walk) -> walks.Moment:
        return vectors.row(walk.past[1], (walk.k - 1) % self.length)

    def begun(self, walk: walks.Walk) -> walks.Walk:
        return walks.through_first(self.lower.init, vectors.row(walk.past[0], 0).y, walk)

    def to_start(self, walk: walks.Walk) -> walks.Walk:
        """To the first step of the segment that step k - 1 is in."""
        row = (walk.k - 1) // self.length
        start = vectors.row(walk.past[0], row)
        return walk._replace(y=start.y, opt=start.opt, k=row * self.length)

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        again = self.forward(x, self.made_again, is_new=False)

        def segment(length: int) -> tuple[machine.Step, ...]:
            return (
                machine.Then(self.to_start),
                machine.Repeat(length, again),
                machine.Repeat(length, self.backward()),
            )

        last = self.num_steps - self.length * (self.num_segments - 1)
        others = machine.Repeat(self.num_segments - 1, segment(self.length))
        return (*self.ways(x), *segment(last), others, machine.Then(self.begun))


class _Forward(_Unrolled):
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
                    is_new=is_new and level == LOWER,
                    num_tangents=vectors.size_of(x),
                ),
                functools.partial(walks.tangents_at, level),
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
