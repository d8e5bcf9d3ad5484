"""The value-function gradient: the gap between f(x, y) and its least value, as a penalty.

With z near the minimum of f(x, .) and y near that of `F + lambda f`, the hypergradient is
`d_x F(x, y) + lambda (d_x f(x, y) - d_x f(x, z))`. So it takes only first derivatives, of two
ordinary training runs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.bilevel import lower as lower_lib
from hetjax.bilevel import machine, multipliers, vectors
from hetjax.bilevel.problem import LOWER, UPPER, Answer, At, Kind, What
from hetjax.types import PyTree


class Gap(NamedTuple):
    """What a value-gap estimator carries."""

    x: PyTree
    y: PyTree
    z: PyTree
    opt_y: PyTree
    opt_z: PyTree
    k: jax.Array  # i32[]: number of the next lower batch
    upper_k: jax.Array  # i32[]: number of the next upper batch
    upper_gradient: PyTree  # in y, of the step that is being made
    least: jax.Array  # f(x, z), with its ridge
    multiplier: jax.Array
    loss: jax.Array  # F(x, y)
    lower_loss: jax.Array  # f(x, y)
    grad_x: PyTree  # d_x F
    grad_gap: PyTree  # d_x f(x, y) - d_x f(x, z)
    grad_y: tuple[PyTree, PyTree]  # d_y F and d_y f at y, of a dynamic multiplier
    safe: PyTree  # the last y that was seen inside a barrier
    crossed: jax.Array  # i32[]: steps that a barrier took back
    stood: jax.Array  # i32[]: steps that it let stand; -1 until the start of y is seen
    turn: jax.Array  # i32[]: hypergradients before this one


def value_gap(
    lower: lower_lib.Lower,
    num_steps: int,
    *,
    multiplier: multipliers.Multiplier | float = 10.0,
    upper_steps: int | None = None,
    prox: float | None = None,
    central: bool = False,
) -> machine.Estimator:
    """Moves two lower variables by the same kind of steps; takes only first derivatives.

    Args:
        lower: the steps, from `descent`. y's steps go down `(F + lambda f) / max(lambda, 1)`, so
            one learning rate serves both.
        num_steps: T, steps of z; they begin where the last hypergradient ended.
        multiplier: a number, or one of `const`, `ramp`, `growing`, `exterior`, `barrier`,
            `dynamic`.
        upper_steps: steps of y; by default as many. With a barrier 2 or more: the last one is not
            taken, since it was not seen on which side it is. With prox by default 1: beside a z
            that does not move, y's loss may be concave, and more steps run away.
        prox: gamma of the Moreau envelope `min_z f(x, z) + |z - y|^2 / (2 gamma)`. It takes the
            place of the least value if f is not convex (MEHA).
        central: z and y go to the minima of `f - F / lambda` and `f + F / lambda`, and the
            difference is central: its error falls with the square of 1 / lambda.

    Returns:
        An estimator; `info` has the gap, the multiplier, and the steps that a barrier took back.

    Raises:
        ValueError: the lower steps use the upper gradient, or options contradict each other.

    References:
        Liu, Liu, Yuan, Zeng, Zhang, "A value-function-based interior-point method for non-convex
        bi-level optimization", 2021, arXiv 2106.07991 (barrier); Kwon, Kwon, Wright, Nowak, "A
        fully first-order method for stochastic bilevel optimization", 2023, arXiv 2301.10945;
        Shen, Chen, "On penalty-based bilevel gradient descent method", 2023, arXiv 2302.05185;
        Ye, Liu, Wright, Stone, Liu, "BOME!", 2022, arXiv 2209.08709 (dynamic).
    """
    lower_lib.check(lower, "value_gap", of_lower_alone=True)
    if not isinstance(multiplier, multipliers.Multiplier):
        multiplier = multipliers.const(multiplier)
    if upper_steps is None:
        upper_steps = num_steps if prox is None else 1
    least = 2 if multiplier.is_barrier else 0  # a step counts when the next one has seen it
    if num_steps < 1 or upper_steps < least or (prox is not None and prox <= 0):
        raise ValueError(
            f"value_gap: {num_steps} steps, upper_steps={upper_steps}, prox={prox}; give at least "
            f"1 step, {least} upper_steps, and a positive prox"
        )
    made = _ValueGap(lower, num_steps, upper_steps, multiplier, prox, central)
    if central + (prox is not None) + multiplier.is_barrier + made.is_dynamic > 1:
        raise ValueError("value_gap: take one of central, prox, a barrier, a dynamic multiplier")
    needs_all = needs_x = ""
    if made.is_dynamic:
        needs_all = needs_x = "a dynamic multiplier is made of inner products of whole gradients"
    elif multiplier.is_barrier:
        needs_all = "a barrier takes back a step by the loss of all examples"
    return machine.Estimator(made.begin, made.program, made.end, needs_all, needs_x)


class _ValueGap(NamedTuple):
    """The checked options of `value_gap`, and the functions that make its `Estimator`."""

    lower: lower_lib.Lower
    num_steps: int
    upper_steps: int
    multiplier: multipliers.Multiplier
    prox: float | None
    central: bool

    @property
    def is_dynamic(self) -> bool:
        return self.multiplier.pull is not None

    def begin(self, x: PyTree, y: PyTree, state: machine.State | None) -> Gap:
        x, y = jax.tree.map(jnp.asarray, (x, y))
        if state is None:
            state = machine.State(y, opt=((), ()), memory=(y, y))
        (y, z), (kept_y, kept_z) = state.memory, state.opt
        if self.is_dynamic:
            z = y
        zero, number = jnp.zeros((), jnp.int32), jnp.zeros((), vectors.dtype_of(y))
        none = vectors.zeros_like(y)
        begun = Gap(
            x=x,
            y=y,
            z=z,
            opt_y=self.lower.first_state(x, y, kept_y),
            opt_z=self.lower.first_state(x, z, kept_z),
            k=zero,
            upper_k=zero,
            upper_gradient=none,
            least=number,
            multiplier=number,
            loss=number,
            lower_loss=number,
            grad_x=vectors.zeros_like(x),
            grad_gap=vectors.zeros_like(x),
            grad_y=(none, none) if self.is_dynamic else ((), ()),
            safe=y,
            crossed=zero,
            stood=zero - 1,
            turn=jnp.asarray(state.turn, jnp.int32),
        )
        return begun._replace(multiplier=self.weight(begun, number))  # the gap is not known yet

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        to_z = machine.Repeat(self.num_steps, self.step_of("z"))
        to_y = machine.Repeat(0 if self.is_dynamic else self.upper_steps, self.step_of("y"))
        seen: tuple[machine.Step, ...] = ()
        if self.multiplier.needs_gap:
            seen = (machine.Ask(What(Kind.LOSS, LOWER, is_new=True), _at("z"), self.take_least),)
        wrt = ("x", "y") if self.is_dynamic else ("x",)
        upper = What(Kind.GRADIENT, UPPER, wrt, is_new=True)
        return (
            to_z,
            *seen,
            machine.Then(self.between),
            to_y,
            machine.Then(self.ended),
            machine.Ask(
                upper, lambda gap: At(gap.x, self.middle(gap), gap.upper_k), self.take_upper
            ),
            machine.Ask(What(Kind.GRADIENT, LOWER, wrt, is_new=True), _at("y"), self.take_at_y),
            machine.Ask(What(Kind.GRADIENT, LOWER, ("x",)), _at("z"), self.take_at_z),
            machine.Then(self.moved),
        )

    def step_of(self, which: str) -> tuple[machine.Step, ...]:
        """One step of y or z: asks for the upper gradient if it is needed, and the lower one."""
        lower = machine.Ask(
            What(Kind.GRADIENT, LOWER, is_new=True),
            _at(which),
            self.step_y if which == "y" else self.step_z,
            moves=(which,),
            keeps=(f"opt_{which}",),
        )
        if which == "z" and not self.central:
            return (lower,)
        what = What(Kind.GRADIENT, UPPER, is_new=True)
        return (machine.Ask(what, _at(which, "upper_k"), _take_upper_gradient), lower)

    def turn(self, gap: Gap) -> jax.Array:
        """Hypergradients before this one, as a floating-point number."""
        return gap.turn.astype(trees.wider(jnp.float32, gap.least.dtype))

    def weight(self, gap: Gap, value: jax.Array) -> jax.Array:
        return self.multiplier.of(self.turn(gap), value).astype(gap.least.dtype)

    def step_z(self, gap: Gap, answer: Answer) -> Gap:
        gradient = answer.y
        if self.central:
            gradient = vectors.add(gradient, gap.upper_gradient, -1 / gap.multiplier)
        gradient = vectors.add(gradient, gap.z, self.multiplier.ridge(self.turn(gap)))
        if self.prox is not None:
            gradient = vectors.add(gradient, vectors.add(gap.z, gap.y, -1.0), 1 / self.prox)
        z, opt = self.stepped(gap, gap.z, gap.opt_z, gradient)
        return gap._replace(z=z, opt_z=opt, k=gap.k + 1)

    def stepped(self, gap: Gap, y: PyTree, opt: PyTree, gradient: PyTree) -> tuple:
        return lower_lib.moved(self.lower, gap.x, y, opt, (vectors.like(gradient, y),), gap.k)

    def take_least(self, gap: Gap, answer: Answer) -> Gap:
        """Takes f at z, with its ridge."""
        square = vectors.inner(gap.z, gap.z)
        least = answer.loss + self.multiplier.ridge(self.turn(gap)) / 2 * square
        return gap._replace(least=least.astype(gap.least.dtype), k=gap.k + 1)

    def between(self, gap: Gap) -> Gap:
        """Before the steps of y. With a barrier they begin at z, which is inside it."""
        return gap._replace(y=gap.z, safe=gap.z) if self.multiplier.is_barrier else gap

    def step_y(self, gap: Gap, answer: Answer) -> Gap:
        value = answer.loss.astype(gap.least.dtype) - gap.least
        weight = self.weight(gap, value) if self.multiplier.needs_gap else gap.multiplier
        if self.multiplier.is_barrier:
            is_behind = value >= self.multiplier.shift(self.turn(gap))
            weight = jnp.where(is_behind, 1, weight)
        gradient = answer.y
        if self.prox is not None:
            gradient = vectors.add(gradient, vectors.add(gap.y, gap.z, -1.0), -1 / self.prox)
        upper = vectors.add(gap.upper_gradient, gap.y, self.multiplier.upper_ridge(self.turn(gap)))
        scale = 1 / jnp.maximum(weight, 1)
        both = vectors.add(
            jax.tree.map(lambda g: g * scale.astype(g.dtype), upper), gradient, scale * weight
        )
        y, opt = self.stepped(gap, gap.y, gap.opt_y, both)
        new = gap._replace(y=y, opt_y=opt, k=gap.k + 1, multiplier=weight, safe=gap.y)
        if not self.multiplier.is_barrier:
            return new
        new = new._replace(stood=gap.stood + 1)
        half = jax.tree.map(lambda a, b: (a + b) / 2, gap.y, gap.safe)
        back = gap._replace(y=half, k=gap.k + 1, crossed=gap.crossed + 1)
        return jax.tree.map(lambda a, b: jnp.where(is_behind, a, b), back, new)

    def ended(self, gap: Gap) -> Gap:
        """After the steps: with a barrier, takes the last y that was seen inside it."""
        return gap._replace(y=gap.safe) if self.multiplier.is_barrier else gap

    def middle(self, gap: Gap) -> PyTree:
        """Where F is asked for: at y; with central differences at the mean of y and z.

        The error there falls with the square of 1 / lambda.
        """
        if not self.central:
            return gap.y
        return jax.tree.map(lambda a, b: (a + b) / 2, gap.y, gap.z)

    def take_upper(self, gap: Gap, answer: Answer) -> Gap:
        of_upper, of_lower = gap.grad_y
        return gap._replace(
            loss=answer.loss.astype(gap.loss.dtype),
            grad_x=vectors.like(answer.x, gap.x),
            grad_y=(vectors.like(answer.y, of_upper), of_lower),
        )

    def take_at_y(self, gap: Gap, answer: Answer) -> Gap:
        of_upper, of_lower = gap.grad_y
        return gap._replace(
            lower_loss=answer.loss.astype(gap.loss.dtype),
            grad_gap=vectors.like(answer.x, gap.x),
            grad_y=(of_upper, vectors.like(answer.y, of_lower)),
        )

    def take_at_z(self, gap: Gap, answer: Answer) -> Gap:
        least = answer.loss.astype(gap.least.dtype)
        gap = gap._replace(grad_gap=vectors.add(gap.grad_gap, answer.x, -1.0))
        if not self.multiplier.needs_gap:
            return gap._replace(least=least)
        return gap._replace(multiplier=self.weight(gap, gap.lower_loss - gap.least))

    def moved(self, gap: Gap) -> Gap:
        """Computes a dynamic multiplier from all gradients, and makes the step of y."""
        if (pull := self.multiplier.pull) is None:
            return gap
        of_upper, of_lower = gap.grad_y
        along = vectors.inner(gap.grad_x, gap.grad_gap) + vectors.inner(of_upper, of_lower)
        square = vectors.inner(gap.grad_gap, gap.grad_gap) + vectors.inner(of_lower, of_lower)
        share = along / jnp.where(square > 0, square, 1)
        weight = jnp.where(square > 0, jnp.maximum(pull - share, 0), 0)
        weight = weight.astype(gap.multiplier.dtype)
        y, opt = self.stepped(gap, gap.y, gap.opt_y, vectors.add(of_upper, of_lower, weight))
        return gap._replace(y=y, opt_y=opt, multiplier=weight)

    def end(self, gap: Gap) -> machine.Result:
        weight = gap.multiplier / 2 if self.central else gap.multiplier
        grad_x = vectors.add(gap.grad_x, gap.grad_gap, weight)
        info = machine.Info(
            gap.loss,
            gap.lower_loss,
            gap=gap.lower_loss - gap.least,
            multiplier=gap.multiplier,
            crossed=gap.crossed if self.multiplier.is_barrier else (),
            stood=jnp.maximum(gap.stood, 0) if self.multiplier.is_barrier else (),
        )
        opts, memory = (gap.opt_y, gap.opt_z), (gap.y, gap.z)
        state = machine.State(self.middle(gap), opts, memory, gap.turn + 1)
        return machine.Result(grad_x, state, info)


def _at(which: str, number: str = "k") -> Callable[[Gap], At]:
    """Asks at y or z, on the next batch of the lower level, or with 'upper_k' of the upper one."""
    return lambda gap: At(gap.x, getattr(gap, which), getattr(gap, number))


def _take_upper_gradient(gap: Gap, answer: Answer) -> Gap:
    return gap._replace(upper_gradient=vectors.like(answer.y, gap.y), upper_k=gap.upper_k + 1)
