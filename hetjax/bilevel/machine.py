"""An estimator is a machine that asks for sums: one program, run by a host or under `jit`.

A program is a tuple of steps: `Ask` for a sum, `Then` compute something without asking, `Repeat`
some steps. `Estimator.request` and `receive` go through it one request at a time; others answer.
`run` goes through all of it, with `lax.scan`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from hetjax.bilevel import per_example
from hetjax.bilevel import problem as problem_lib
from hetjax.types import PyTree


class Ask(NamedTuple):
    """Asks for a sum, and takes it."""

    what: problem_lib.What
    at: Callable[[PyTree], problem_lib.At]  # carry -> where it asks
    receive: Callable[[PyTree, problem_lib.Answer], PyTree]  # carry, answer -> carry
    moves: tuple[str, ...] = ()  # fields of the carry that it moves; gossip averages them
    keeps: tuple[str, ...] = ()  # more fields that it leaves to a worker that did nothing


class Then(NamedTuple):
    """Computes without asking."""

    function: Callable[[PyTree], PyTree]  # carry -> carry


class Repeat(NamedTuple):
    """Does some steps several times."""

    times: int
    steps: tuple["Step", ...]  # in this order
    fewer: Callable[[PyTree], jax.Array] | None = None
    """`carry -> i32[]`: how many times, at most `times`; asked before the first."""


Step: TypeAlias = Ask | Then | Repeat
Steps: TypeAlias = tuple[Step, ...]
Answering: TypeAlias = Callable[[problem_lib.What, problem_lib.At], problem_lib.Answer]


class Info(NamedTuple):
    """What an estimator found beside the hypergradient. Cost is static."""

    upper_loss: Any  # F at the lower variable that was reached; () if it is not asked for
    lower_loss: Any = ()  # f there, of a value gap; else before the last step; () without steps
    gap: Any = ()  # f(x, y) - f(x, z), of a value gap
    residual: Any = ()  # of the linear system, over the norm of its right side
    multiplier: Any = ()  # of a value gap
    step_chosen: Any = ()  # t, the iterate that was taken, 1 to T
    curvature: Any = ()  # the least p' (H + damp) p / p' p that conjugate gradients met
    crossed: Any = ()  # steps that a barrier halved
    stood: Any = ()  # steps that it let stand; 0: y is where z is
    cost: problem_lib.Cost = problem_lib.Cost()
    """Of the whole program; the most it may be, if a `Repeat` did fewer."""


class State(NamedTuple):
    """What an estimator keeps from one hypergradient to the next."""

    y: PyTree  # the lower variable that was reached
    opt: PyTree = ()  # the lower optimiser's state; () if it begins anew
    memory: PyTree = ()  # a warm adjoint, or both lower variables of a value gap
    turn: Any = 0  # i32[]: hypergradients so far


class Result(NamedTuple):
    """What an estimator ends with."""

    grad_x: PyTree  # the hypergradient, like x
    state: State
    info: Info


class Position(NamedTuple):
    """Where an estimator is between two requests. Only `carry` holds arrays."""

    carry: PyTree
    program: Steps
    left: Steps  # still to be done, the `Ask` of the request first; () at the end

    @property
    def is_done(self) -> bool:
        """Whether nothing more is asked for."""
        return not self.left


class Estimator(NamedTuple):
    """A method that estimates hypergradients: a record of pure functions.

    Attributes:
        begin: `(x, y, state) -> carry`; `state` is None, or what the last result kept.
        program: `x -> steps`: what it asks, in order. In forward mode x decides how much.
        end: `carry -> Result`, without its cost.
    """

    begin: Callable[[PyTree, PyTree, State | None], PyTree]
    program: Callable[[PyTree], Steps]
    end: Callable[[PyTree], Result]
    needs_all: str = ""
    """Why each sum must be that of all workers, for an error; '' if the workers may gossip."""
    needs_x: str = ""
    """Why the gradient in x must be whole in each answer, for an error. '' if it is only added up,
    so each worker may keep the part of its own examples."""

    def init(self, x: PyTree, y: PyTree, state: State | None = None) -> Position:
        """The position before the first request.

        Args:
            x: the upper variable, a pytree of arrays.
            y: the lower variable, a pytree of arrays.
            state: of the last result; None: the first hypergradient.
        """
        program = self.program(x)
        return _settled(program, self.begin(x, y, state), program)

    def request(self, position: Position) -> tuple[problem_lib.What, problem_lib.At]:
        """The sum that is wanted next; not to be called if `position.is_done`.

        Args:
            position: from `init` or `receive`.

        Returns:
            What is asked for, and at which point.

        Raises:
            ValueError: the position is behind the last request.
        """
        ask = next_ask(position.left)
        return ask.what, ask.at(position.carry)

    def receive(self, position: Position, answer: problem_lib.Answer) -> Position:
        """The position after the answer to the request.

        Args:
            position: whose request was answered.
            answer: the sums, divided by their weight.

        Raises:
            ValueError: the position is behind the last request.
        """
        carry = next_ask(position.left).receive(position.carry, answer)
        return _settled(position.program, carry, position.left[1:])

    def result(self, position: Position) -> Result:
        """The result, after the last request."""
        return self.finish(position.carry, position.program)

    def finish(self, carry: PyTree, program: Steps) -> Result:
        """The result, with its cost.

        Args:
            carry: of the last position.
            program: its program, which tells the cost.
        """
        found = self.end(carry)
        return found._replace(info=found.info._replace(cost=cost(program)))


def whole(estimator: Estimator) -> Callable[[PyTree, PyTree], tuple[Result, Result]]:
    """`(x, y) -> results` of two hypergradients in a row, to inspect what an estimator computes.

    The losses are the sum of the squares of all numbers; it is only for shapes and programs.
    """

    def squares(x: PyTree, y: PyTree, batch: Any) -> jax.Array:
        parts = jax.tree.leaves((per_example.plain(x), y))
        return jnp.sum(jnp.stack([jnp.sum(part.astype(jnp.float32) ** 2) for part in parts]))

    problem = problem_lib.Bilevel(squares, squares)

    def answered(what: problem_lib.What, at: problem_lib.At) -> problem_lib.Answer:
        return problem_lib.answer(problem, what, at, None)

    def computed(x: PyTree, y: PyTree) -> tuple[Result, Result]:
        program = estimator.program(x)
        first = estimator.end(run(program, estimator.begin(x, y, None), answered))
        return first, estimator.end(run(program, estimator.begin(x, y, first.state), answered))

    return computed


def run(program: Steps, carry: PyTree, answer: Answering) -> PyTree:
    """Runs the whole program; traceable: a `Repeat` is a `lax.scan`."""
    for step in program:
        match step:
            case Ask(what, at, receive):
                carry = receive(carry, answer(what, at(carry)))
            case Then(function):
                carry = function(carry)
            case Repeat() if step.times:
                carry = _repeated(step, carry, answer)
    return carry


def _repeated(repeat: Repeat, carry: PyTree, answer: Answering) -> PyTree:
    def once(carry: PyTree) -> PyTree:
        return run(repeat.steps, carry, answer)

    if repeat.fewer is None:
        return jax.lax.scan(lambda c, _: (once(c), None), carry, length=repeat.times)[0]
    return jax.lax.fori_loop(0, repeat.fewer(carry), lambda _, c: once(c), carry)


def num_batches(program: Steps) -> dict[str, int]:
    """How many batches of each level a program asks for."""
    found = {problem_lib.UPPER: 0, problem_lib.LOWER: 0}
    for what, times in asked_for(program):
        found[what.level] += times * what.is_new
    return found


def cost(program: Steps) -> problem_lib.Cost:
    """What a program costs; the most it may, if a `Repeat` may do fewer."""
    total = problem_lib.Cost()
    for what, times in asked_for(program):
        total = total.plus(problem_lib.cost_of(what), times)
    return total


def asked_for(program: Steps, times: int = 1) -> Iterator[tuple[problem_lib.What, int]]:
    """What a program asks for, and how often; at most, if a `Repeat` may do fewer."""
    for step in program:
        if isinstance(step, Ask):
            yield step.what, times
        elif isinstance(step, Repeat):
            yield from asked_for(step.steps, times * step.times)


# --- One request at a time: what of the program is left ---


def next_ask(left: Steps) -> Ask:
    """The `Ask` before which a program has stopped."""
    if not left:
        raise ValueError("bilevel: nothing more is asked; take estimator.result(position)")
    ask = left[0]
    assert isinstance(ask, Ask)
    return ask


def stop(left: Steps) -> tuple[tuple[Callable[[PyTree], PyTree], ...], Steps]:
    """Goes on to the next `Ask`, to a `Repeat` whose number the carry tells, or to the end.

    Returns:
        What is computed on the way, in this order, and the steps that are left then.
    """
    thens: list[Callable[[PyTree], PyTree]] = []
    while left:
        match left[0]:
            case Then(function):
                thens.append(function)
                left = left[1:]
            case Repeat(times, steps, None):
                left = (*steps, Repeat(times - 1, steps), *left[1:]) if times else left[1:]
            case _:
                break
    return tuple(thens), left


def _settled(program: Steps, carry: PyTree, left: Steps) -> Position:
    """Goes on with the steps that are left to the next `Ask`, or to the end."""
    while True:
        thens, left = stop(left)
        for function in thens:
            carry = function(carry)
        match left:
            case (Repeat(_, steps, fewer), *rest) if fewer is not None:
                left = (Repeat(int(fewer(carry)), steps), *rest)
            case _:
                return Position(carry, program, left)
