"""The way back of an unrolled estimator: adjoints go through each step, from the last one."""

import functools
import math

import jax
import jax.numpy as jnp

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
        asks = [
            machine.Ask(
                What(Kind.PRODUCTS, level, ("x", "y")),
                functools.partial(self.product_at, index),
                trajectory.take_products,
            )
            for index, level in enumerate(self.lower.levels)
        ]
        return (
            machine.Then(self.pulled),
            *([] if self.is_first_order else asks),
            machine.Then(lambda carry: carry._replace(k=carry.k - 1)),
        )

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
        return (*way, machine.Then(self.begun)) if self.held == self.num_steps else way

    def begun(self, carry: Trajectory) -> Trajectory:
        return trajectory.through_first(self.lower.init, vectors.item(carry.past, 0).y, carry)


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
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_start, new, old),
            Moment(carry.y, carry.opt, ()),
            vectors.item(starts, number),
        )
        return super().made(carry._replace(past=(vectors.put(starts, number, kept), segment)))

    def made_again(self, carry: Trajectory) -> Trajectory:
        starts, segment = carry.past
        moment = Moment(carry.y, carry.opt, carry.gradients)
        segment = vectors.put(segment, carry.k % self.length, moment)
        return super().made(carry._replace(past=(starts, segment)))

    def moment(self, carry: Trajectory) -> Moment:
        return vectors.item(carry.past[1], (carry.k - 1) % self.length)

    def begun(self, carry: Trajectory) -> Trajectory:
        return trajectory.through_first(self.lower.init, vectors.item(carry.past[0], 0).y, carry)

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
        return (*self.ways(x), *segment(last), others, machine.Then(self.begun))
