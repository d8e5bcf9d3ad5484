"""The way back of an unrolled estimator: adjoints go through each step, from the last one."""

import functools
import math

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.bilevel import diagnosis, forwards, machine, trajectory, vectors
from hetjax.bilevel.problem import At, Kind, What
from hetjax.bilevel.trajectory import Moment, Trajectory
from hetjax.types import PyTree


class Backwards(forwards.Unrolled):
    """Reverse mode: a step back is a pull through the optimiser and a product of each level."""

    def moment(self, carry: Trajectory) -> Moment:
        """What is held of step k - 1, which the adjoint goes through next."""
        raise NotImplementedError

    def backward(self) -> tuple[machine.Step, ...]:
        levels = () if self.is_first_order else self.lower.levels
        asks = [
            machine.Ask(
                What(Kind.PRODUCTS, level, ("x", "y")),
                functools.partial(self.product_at, index),
                trajectory.take_products,
            )
            for index, level in enumerate(levels)
        ]
        to_next = machine.Then(lambda carry: carry._replace(k=carry.k - 1))
        return machine.Then(self.pulled), *asks, to_next

    def pulled(self, carry: Trajectory) -> Trajectory:
        """Pulls the adjoint through the optimiser of step k - 1; products come next."""
        moment = self.moment(carry)
        floats, step = self.smooth_step(moment.opt, carry.k - 1)
        at = carry.x, moment.y, floats, moment.gradients
        pull = jax.vjp(step, *at)[1] if self.is_first_order else diagnosis.pull_through(step, *at)
        x, y, opt, gradients = pull(carry.adjoint)
        grad_x = vectors.add(carry.grad_x, x)
        return carry._replace(adjoint=(y, opt), grad_x=grad_x, gradients=gradients)

    def product_at(self, index: int, carry: Trajectory) -> At:
        at = trajectory.at_step(carry._replace(y=self.moment(carry).y, k=carry.k - 1))
        return at._replace(vector=carry.gradients[index])

    def first_state(self, starts: PyTree, carry: Trajectory) -> Trajectory:
        """After all steps back: pulls the adjoint through the optimiser's first state.

        That state is made of x and the first y, which is that of the first of `starts`. A learning
        rate that it holds gets its gradient here.
        """
        of_y, of_opt = carry.adjoint
        if not of_opt:
            return carry

        def made(x: PyTree, y: PyTree) -> list[jax.Array]:
            return vectors.floats(vectors.like(self.lower.init(x, y), carry.opt))

        _, pull = jax.vjp(made, carry.x, vectors.item(starts, 0).y)
        of_x, of_first = pull([jnp.where(carry.k == 0, adjoint, 0) for adjoint in of_opt])
        adjoint = vectors.add(of_y, of_first), of_opt
        return carry._replace(adjoint=adjoint, grad_x=vectors.add(carry.grad_x, of_x))


class Reverse(Backwards):
    """Holds the last K steps, or all of them if the worst iterate is taken."""

    @property
    def held(self) -> int:
        return self.num_steps if self.picks_worst and self.back else self.back

    def first_past(self, moment: Moment) -> PyTree:
        return vectors.stack_of(moment, self.held) if self.held else ()

    def made(self, carry: Trajectory) -> Trajectory:
        if self.held:
            moment = Moment(carry.y, carry.opt, carry.gradients)
            place = jnp.maximum(carry.k - (self.num_steps - self.held), 0)  # 0: overwritten later
            carry = carry._replace(past=vectors.put(carry.past, place, moment))
        return super().made(carry)

    def moment(self, carry: Trajectory) -> Moment:
        return vectors.item(carry.past, carry.k - 1 - (self.num_steps - self.held))

    def program(self, x: PyTree) -> tuple[machine.Step, ...]:
        fewer = None  # steps back, from the iterate that was taken
        if self.picks_worst:
            fewer = lambda carry: jnp.minimum(carry.k, self.back)  # noqa: E731
        way = (*self.ways(x), machine.Repeat(self.back, self.backward(), fewer))
        begun = machine.Then(lambda carry: self.first_state(carry.past, carry))
        return (*way, begun) if self.held == self.num_steps else way


class Checkpointed(Backwards):
    """Holds every R-th step; the steps between are made once more on the way back."""

    @property
    def length(self) -> int:
        return math.isqrt(self.num_steps - 1) + 1

    @property
    def num_segments(self) -> int:
        return -(-self.num_steps // self.length)

    def first_past(self, moment: Moment) -> PyTree:
        start = moment._replace(gradients=())
        return vectors.stack_of(start, self.num_segments), vectors.stack_of(moment, self.length)

    def made(self, carry: Trajectory) -> Trajectory:
        starts, segment = carry.past
        number = carry.k // self.length  # of the segment
        is_start = carry.k % self.length == 0
        kept = trees.select(is_start, Moment(carry.y, carry.opt, ()), vectors.item(starts, number))
        return super().made(carry._replace(past=(vectors.put(starts, number, kept), segment)))

    def made_again(self, carry: Trajectory) -> Trajectory:
        starts, segment = carry.past
        moment = Moment(carry.y, carry.opt, carry.gradients)
        segment = vectors.put(segment, carry.k % self.length, moment)
        return super().made(carry._replace(past=(starts, segment)))

    def moment(self, carry: Trajectory) -> Moment:
        return vectors.item(carry.past[1], (carry.k - 1) % self.length)

    def to_start(self, carry: Trajectory) -> Trajectory:
        """Goes to the first step of the segment that step k - 1 is in."""
        number = (carry.k - 1) // self.length
        start = vectors.item(carry.past[0], number)
        return carry._replace(y=start.y, opt=start.opt, k=number * self.length)

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
        begun = machine.Then(lambda carry: self.first_state(carry.past[0], carry))
        return (*self.ways(x), *segment(last), others, begun)
