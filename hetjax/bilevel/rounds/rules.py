"""The local rule of a request: what a worker adds up over its microbatches to answer it.

Each worker differentiates the sum over its own examples. The synchronisation adds these sums up
and divides once by the weight of all: nothing is differentiated through a collective. Where the
weights depend on x or y, their sum is differentiated beside it, and each worker takes the quotient
rule at the sums of all (`problem.quotient`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import mesh, trees, types
from hetjax.bilevel import per_example
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel.problem import Answer, At, Bilevel, Kind, What
from hetjax.local import rules
from hetjax.losses import loss as losses_lib
from hetjax.losses import named

_Rows = list[per_example.PerExample]
_WITH_LOSS = (Kind.LOSS, Kind.GRADIENT, Kind.TANGENTS)


class Point(NamedTuple):
    """Where the sums of a round are asked for: what a level's rounds have in place of parameters.

    What a request does not use is there all the same, so that all have the same shapes.
    """

    x: types.PyTree
    y: types.PyTree
    vector: types.PyTree = ()  # like y
    tangents: types.PyTree = ()  # (like x, like y), leaves [n, ...]


class LevelSums(NamedTuple):
    """What a worker adds up."""

    answers: tuple[Answer, ...]  # `problem.summands`; of x the part that all examples share
    own: list[_Rows]  # of x of each, the part that belongs to one example each
    loss_sum: jax.Array  # f[]; 0 where no loss is asked for
    weight_sum: jax.Array  # f[]


def loss_of(problem: Bilevel, level: str) -> losses_lib.LossFn:
    """A level's loss as one of a microbatch, at a `Point` whose x has the microbatch's rows."""
    loss = problem.upper if level == problem_lib.UPPER else problem.lower
    loss = named.giving(loss, 3)

    def of_point(point: Any, examples: types.PyTree, rng: jax.Array) -> Any:
        found = loss(per_example.plain(point.x), point.y, examples)
        if isinstance(found, types.Losses) and found.metrics is not None:
            raise ValueError("the loss returns metrics, which no request adds up; leave them out")
        return losses_lib.split(found)  # its weights may depend on x and y

    return of_point


def tried_loss(problem: Bilevel, level: str) -> losses_lib.LossFn:
    """As `loss_of`, at a `Point` whose x has all rows: for any examples, by which it is tried."""
    of_point = loss_of(problem, level)

    def tried(point: Any, examples: types.PyTree, rng: jax.Array) -> Any:
        num = len(jax.tree.leaves(examples)[0])
        x = per_example.rows(point.x, level, jnp.arange(num, dtype=jnp.int32))
        return of_point(point._replace(x=x), examples, rng)

    return tried


def depends(problem: Bilevel, what: What, point: Point, examples: types.PyTree) -> bool:
    """Whether the weights depend on what a request differentiates, by the first examples."""
    loss_fn = tried_loss(problem, what.level)

    def both(x: types.PyTree, y: types.PyTree, examples: Any) -> tuple[Any, Any]:
        found = losses_lib.split(loss_fn(Point(x, y), examples, jax.random.key(0)))
        return found.losses, found.weights

    return problem_lib.weights_depend(both, what, At(point.x, point.y), examples)


def answering(
    problem: Bilevel,
    what: What,
    *,
    gossips: bool = False,
    depends: bool = False,
    of_shards: bool = False,
) -> rules.LocalRule:
    """Adds up what a request asks for, and the weight by which it is divided.

    Args:
        problem: losses of one number an example.
        what: that is asked for.
        gossips: all stays with the worker.
        depends: the weights depend on what is differentiated.
        of_shards: the mean of the workers' own means is taken.
    """
    loss_fn = loss_of(problem, what.level)

    def begin(shared: types.Shared, worker: tuple) -> tuple[tuple, LevelSums]:
        return worker, _zeros(what, shared.params, depends=depends)

    def add(
        shared: types.Shared,
        worker: tuple,
        sums: LevelSums,
        microbatch: types.Microbatch,
        rng: jax.Array,
    ) -> tuple[tuple, LevelSums]:
        point: Point = shared.params
        ids = jnp.asarray(microbatch.example_ids)
        losses = losses_lib.masked(loss_fn, microbatch, rng)

        def both(x: types.PyTree, y: types.PyTree, batch: Any) -> tuple[jax.Array, jax.Array]:
            products, amounts = losses(Point(x, y))
            return jnp.sum(products), jnp.sum(amounts)

        x = per_example.rows(point.x, what.level, ids)
        at = At(x, point.y, vector=point.vector, tangents=point.tangents)
        found, own = _parted(problem_lib.summands(both, what, at, None, depends=depends))
        loss_sum = found[0].loss if what.kind in _WITH_LOSS else jnp.zeros_like(sums.loss_sum)
        # The loss speaks for all that was added: see `gradients.gradient_sums`.
        loss_sum = jnp.where(trees.all_finite((found, own)), loss_sum, jnp.nan)
        weight_sum = both(x, point.y, None)[1]

        def add_rows(total: per_example.PerExample, part: per_example.PerExample) -> Any:
            return per_example.add_rows(total, part, what.level, ids)

        return worker, LevelSums(
            jax.tree.map(_added, sums.answers, found),
            jax.tree.map(add_rows, sums.own, own, is_leaf=per_example.is_one),
            _added(sums.loss_sum, loss_sum),
            _added(sums.weight_sum, weight_sum),
        )

    def contributed(sums: LevelSums) -> tuple[tuple[Answer, ...], list[_Rows]]:
        if not of_shards:
            return sums.answers, sums.own
        # Each worker divides by its own weight.
        answer = problem_lib.quotient(what, _with_rows(sums.answers, sums.own))
        return (answer._replace(x=answer.x[0]),), [answer.x[1]]

    def finish(
        shared: types.Shared, worker: tuple, sums: LevelSums
    ) -> tuple[tuple, types.PyTree, jax.Array]:
        return worker, () if gossips else contributed(sums)[0], sums.weight_sum

    def own_sums(sums: LevelSums) -> types.PyTree:
        answers, rows = contributed(sums)
        return (answers if gossips else ()), rows

    return rules.LocalRule(
        begin,
        add,
        finish,
        checked=lambda worker, sums: (sums.loss_sum, sums.weight_sum),
        reads=rules.Reads(
            loss_sum=(lambda sums: sums.loss_sum) if what.kind in _WITH_LOSS else None,
            own_sums=own_sums,
        ),
    )


def _parted(answers: tuple[Answer, ...]) -> tuple[tuple[Answer, ...], list[_Rows]]:
    """Answers with the part of x that all examples share, and the rest of x of each."""
    parts = [per_example.split(each.x) for each in answers]
    shared = tuple(each._replace(x=x) for each, (x, _) in zip(answers, parts, strict=True))
    return shared, [rows for _, rows in parts]


def _with_rows(answers: tuple[Answer, ...], own: list[_Rows]) -> tuple[Answer, ...]:
    """Answers whose x is both parts, a pair."""
    return tuple(each._replace(x=(each.x, rows)) for each, rows in zip(answers, own, strict=True))


def answer_of(mean: types.PyTree, own: types.PyTree, x: types.PyTree, what: What) -> Answer:
    """The answer to a request, of what a round without update leaves; of one worker.

    Args:
        mean, own: of the round's report.
        x: the upper variable.
        what: that was asked for.
    """
    of_worker, rows = own
    answers = _with_rows(mean or of_worker, rows)
    if mean or len(answers) == 1:
        answer = problem_lib.quotient(what, answers)
    else:  # of a worker that gossips: of its own part, at the mean loss of all
        of_all = jax.lax.pmean([each.loss for each in answers], mesh.WORKER_AXIS)
        at_all = (each._replace(loss=loss) for each, loss in zip(answers, of_all, strict=True))
        answer = problem_lib.quotient(what, tuple(at_all))._replace(loss=answers[0].loss)
    return answer._replace(x=per_example.joined(x, *answer.x) if "x" in what.wrt else ())


def _zeros(what: What, point: Point, *, depends: bool) -> LevelSums:
    dtypes = map(jnp.result_type, jax.tree.leaves((point.x, point.y)))
    scalar = jnp.zeros((), trees.wider(*dtypes, jnp.float32))
    has_loss, has_tangents = what.kind in _WITH_LOSS, what.kind is Kind.TANGENTS
    has_y = has_tangents or (what.kind is not Kind.LOSS and "y" in what.wrt)
    has_x = what.kind is not Kind.LOSS and "x" in what.wrt
    here = Answer(
        loss=scalar if has_loss or depends else (),
        x=trees.accumulator_zeros(point.x) if has_x else (),
        y=trees.accumulator_zeros(point.y) if has_y else (),
    )
    tangents = trees.accumulator_zeros(point.tangents[1]) if has_tangents else ()
    answers: tuple[Answer, ...] = (here._replace(tangents=tangents),)
    if depends:
        answers = here, here
        if what.kind is Kind.PRODUCTS:
            answers = *answers, here, here
        elif has_tangents:
            row = jnp.zeros((what.num_tangents,), scalar.dtype)
            answers = *answers, *[here._replace(loss=row, y=tangents)] * 2
    return LevelSums(*_parted(answers), scalar, scalar)


def _added(total: jax.Array, part: jax.Array) -> jax.Array:
    return total + part.astype(total.dtype)
