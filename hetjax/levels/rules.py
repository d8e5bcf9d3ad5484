"""The local rule of a request: what a worker adds up over its microbatches to answer it.

Each worker differentiates the sum over its own examples. The synchronisation adds these sums up
and divides once by the weight of all: nothing is differentiated through a collective.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import trees, types
from hetjax.bilevel import per_example
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel.problem import Answer, At, Bilevel, Kind, What
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import rules

_WITH_LOSS = (Kind.LOSS, Kind.GRADIENT, Kind.TANGENTS)


class Point(NamedTuple):
    """Where the sums of a round are asked for: what a level's rounds have in place of parameters.

    What a request does not use is there all the same, so that all have the same shapes.
    """

    x: types.PyTree
    y: types.PyTree
    vector: types.PyTree = ()  # like y
    tangents: types.PyTree = ()  # (like x, like y), leaves [n, ...]


class Sums(NamedTuple):
    """What a worker adds up: `answer` is asked for, of x the part that all examples share."""

    answer: Answer
    own: list[per_example.PerExample]  # of x, the part that belongs to one example each
    loss_sum: jax.Array  # f[]; 0 where no loss is asked for
    weight_sum: jax.Array  # f[]


def loss_of(problem: Bilevel, level: str) -> losses_lib.LossFn:
    """A level's loss as one of a microbatch, at a `Point` whose x has the microbatch's rows."""
    loss = problem.upper if level == problem_lib.UPPER else problem.lower

    def of_point(point: Any, examples: types.PyTree, rng: jax.Array) -> Any:
        del rng
        found = loss(per_example.plain(point.x), point.y, examples)
        if isinstance(found, types.Losses) and found.metrics is not None:
            raise ValueError(
                "the loss returns hetjax.Losses with metrics, which no request adds up; leave them "
                "out, and give metrics_fn= with an eval_source"
            )
        return found

    return of_point


def tried_loss(problem: Bilevel, level: str) -> losses_lib.LossFn:
    """As `loss_of`, at a `Point` whose x has all rows: for any examples, by which it is tried."""
    of_point = loss_of(problem, level)

    def tried(point: Any, examples: types.PyTree, rng: jax.Array) -> Any:
        num = len(jax.tree.leaves(examples)[0])
        x = per_example.rows(point.x, level, jnp.arange(num, dtype=jnp.int32))
        return of_point(point._replace(x=x), examples, rng)

    return tried


def answering(problem: Bilevel, what: What, *, gossips: bool = False) -> rules.LocalRule:
    """Adds up what a request asks for, and the weight by which it is divided.

    Args:
        problem: losses of one number an example.
        what: that is asked for.
        gossips: all stays with the worker.
    """
    loss_fn = loss_of(problem, what.level)

    def begin(shared: types.Shared, worker: tuple) -> tuple[tuple, Sums]:
        return worker, _zeros(what, shared.params)

    def add(
        shared: types.Shared,
        worker: tuple,
        sums: Sums,
        microbatch: types.Microbatch,
        rng: jax.Array,
    ) -> tuple[tuple, Sums]:
        point: Point = shared.params
        ids = jnp.asarray(microbatch.example_ids)
        losses = losses_lib.masked(loss_fn, microbatch, rng)

        def total(x: types.PyTree, y: types.PyTree, batch: Any) -> jax.Array:
            del batch
            return jnp.sum(losses(Point(x, y))[0])

        x = per_example.rows(point.x, what.level, ids)
        at = At(x, point.y, vector=point.vector, tangents=point.tangents)
        found = problem_lib.answer(Bilevel(total, total), what, at, None)
        shared_x, own = per_example.split(found.x) if "x" in what.wrt else ((), [])
        found = found._replace(x=shared_x)
        loss_sum = found.loss if what.kind in _WITH_LOSS else jnp.zeros_like(sums.loss_sum)
        # The loss speaks for all that was added: see `gradients.gradient_sums`.
        loss_sum = jnp.where(trees.all_finite((found, own)), loss_sum, jnp.nan)
        weight_sum = jnp.sum(losses(Point(x, point.y))[1])
        return worker, Sums(
            jax.tree.map(_added, sums.answer, found),
            [
                per_example.add_rows(all_rows, rows, what.level, ids)
                for all_rows, rows in zip(sums.own, own, strict=True)
            ],
            _added(sums.loss_sum, loss_sum),
            _added(sums.weight_sum, weight_sum),
        )

    def finish(
        shared: types.Shared, worker: tuple, sums: Sums
    ) -> tuple[tuple, types.PyTree, jax.Array]:
        return worker, () if gossips else sums.answer, sums.weight_sum

    def own_sums(sums: Sums) -> types.PyTree:
        return (sums.answer if gossips else ()), sums.own

    return rules.LocalRule(
        begin,
        add,
        finish,
        checked=lambda worker, sums: (sums.loss_sum, sums.weight_sum),
        loss_sum=(lambda sums: sums.loss_sum) if what.kind in _WITH_LOSS else None,
        own_sums=own_sums,
    )


def answer_of(mean: types.PyTree, own: types.PyTree, x: types.PyTree, what: What) -> Answer:
    """The answer to a request, of what a round without update leaves; of one worker.

    Args:
        mean, own: of the round's report.
        x: the upper variable.
        what: that was asked for.
    """
    of_worker, rows = own
    answer = mean or of_worker
    return answer._replace(x=per_example.joined(x, answer.x, rows) if "x" in what.wrt else ())


def _zeros(what: What, point: Point) -> Sums:
    dtypes = map(jnp.result_type, jax.tree.leaves((point.x, point.y)))
    scalar = jnp.zeros((), trees.wider(*dtypes, jnp.float32))
    shared_x, own = per_example.split(point.x) if "x" in what.wrt else ((), [])
    has_loss = what.kind in _WITH_LOSS
    has_y = what.kind is Kind.TANGENTS or (what.kind is not Kind.LOSS and "y" in what.wrt)
    answer = Answer(
        loss=scalar if has_loss else (),
        x=trees.accumulator_zeros(shared_x) if what.kind is not Kind.LOSS else (),
        y=trees.accumulator_zeros(point.y) if has_y else (),
        tangents=trees.accumulator_zeros(point.tangents[1]) if what.num_tangents else (),
    )
    return Sums(answer, trees.accumulator_zeros(own), scalar, scalar)


def _added(total: jax.Array, part: jax.Array) -> jax.Array:
    return total + part.astype(total.dtype)


def size_bytes(what: What, point: Point, *, gossips: bool) -> int:
    """Of what a worker sends of its sums: all but the part that belongs to one example each."""
    if gossips:
        return 0
    answer = jax.eval_shape(functools.partial(_zeros, what), point).answer
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(answer))
