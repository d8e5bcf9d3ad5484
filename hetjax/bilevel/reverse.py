"""The way back of an unrolled estimator: adjoints through each step, from the last one."""

import functools
import math

import jax
import jax.numpy as jnp

from hetjax.bilevel import diagnosis, forwards, machine, vectors, walks
from hetjax.bilevel.problem import At, Kind, What
from hetjax.types import PyTree


class Backwards(forwards.Unrolled):
    """Reverse mode: one step back is a pull through the optimiser, and a product of each level."""

    def moment(self, walk: walks.Walk) -> walks.Moment:
        """Of step k - 1, which the adjoint goes through next."""
        raise NotImplementedError

    def backward(self) -> tuple[machine.Step, ...]:
        asks = [
            machine.Ask(
                What(Kind.PRODUCTS, level, ("x", "y")),
                functools.partial(self.product_at, index),
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

        pull = diagnosis.pull_through(step, walk.x, moment.y, floats, moment.gradients)
        x, y, opt, gradients = pull(walk.adjoint)
        grad_x = vectors.add(walk.grad_x, x)
        return walk._replace(adjoint=(y, opt), grad_x=grad_x, gradients=gradients)

    def product_at(self, index: int, walk: walks.Walk) -> At:
        at = walks.at_step(walk._replace(y=self.moment(walk).y, k=walk.k - 1))
        return at._replace(vector=walk.gradients[index])


class Reverse(Backwards):
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
        def fewer(walk: walks.Walk) -> jax.Array:  # steps back, from the iterate that was taken
            return jnp.minimum(walk.k, self.back)

        back = self.backward(), fewer if self.picks_worst else None
        way = (*self.ways(x), machine.Repeat(self.back, *back))
        return (*way, machine.Then(self.begun)) if self.held == self.num_steps else way

    def begun(self, walk: walks.Walk) -> walks.Walk:
        return walks.through_first(self.lower.init, vectors.row(walk.past, 0).y, walk)


class Checkpointed(Backwards):
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
