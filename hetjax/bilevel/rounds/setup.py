"""Checks what a bilevel run is given, and makes its two levels and what is between their rounds."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import types
from hetjax.bilevel import diagnosis, machine, per_example, trajectory
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel.problem import LOWER, UPPER, Bilevel
from hetjax.bilevel.rounds import level, rules, stepping
from hetjax.config import experiment as config_lib
from hetjax.config import kinds
from hetjax.data import iterables, sources
from hetjax.inputs import arguments
from hetjax.inputs import refusals as inputs
from hetjax.processes import meeting as meeting_lib

LEVELS = (LOWER, UPPER)  # in the order in which they are made
SEED_OF_UPPER = 0x5550  # added to the run's: its order and its delays are others
_OF_TRAINING = ("epochs", "max_rounds", "eval_every_rounds", "best_by", "best_mode", "ema")
_OF_STEPS = (*_OF_TRAINING, "rule", "replay")
_OF_LOSSES = ("per_example_rng",)
OF_A_LEVEL = (
    "budget",
    "microbatch_size",
    "quota",
    "gate",
    "ordering",
    "data",
    "seed",
    "replay",
)
"""Fields that each level may have of its own."""


class Made(NamedTuple):
    """What a bilevel run is made of."""

    levels: dict[str, level.Level]
    stepping: stepping.Stepping
    optimizer: optax.GradientTransformationExtraArgs  # of x
    x: types.PyTree  # on the host, without worker axis
    y: types.PyTree
    point: rules.Point


def build(
    problem: Bilevel,
    x: types.PyTree,
    y: types.PyTree,
    estimator: machine.Estimator,
    optimizer: optax.GradientTransformation,
    *,
    upper_source: Any,
    lower_source: Any,
    upper: Mapping[str, Any] | None = None,
    lower: Mapping[str, Any] | None = None,
    begins: Any = None,
    **fields: Any,
) -> Made:
    """Both levels and the steps between their requests; arguments as of `hetjax.fit_bilevel`.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
    """
    _check_given(problem, estimator, fields, {UPPER: upper or {}, LOWER: lower or {}})
    fields.setdefault("seed", 0)
    given = {UPPER: upper_source, LOWER: lower_source}
    at_level = {}
    for name in LEVELS:
        with _naming(f"fit_bilevel, {name} source"):
            at_level[name] = sources.as_source(given[name])
            if isinstance(at_level[name], iterables.Streamed):
                raise ValueError(
                    "got a hetjax.stream, whose examples come once; the requests of an outer step "
                    "go through the same ones several times. Give a source by index"
                )
    x, y = _checked(x, y, at_level)
    tx = _check_optimizer(optimizer, x)
    if estimator.needs_x and per_example.split(x)[1]:
        raise ValueError(
            f"fit_bilevel: x has PerExample leaves, whose gradient stays with the workers, and "
            f"{estimator.needs_x}. Take another multiplier, or a plain array that the loss indexes "
            'by a field of the examples, such as x[batch["index"]]'
        )
    with _naming("fit_bilevel"):  # all that it computes, from its first hypergradient to the second
        carry = jax.eval_shape(lambda x, y: estimator.begin(x, y, None), x, y)
        if isinstance(x, trajectory.Learned) and isinstance(carry.x, trajectory.Learned):
            raise ValueError(
                "x is Learned, and this estimator learns no start; take "
                "unroll(…, start='learned'), or give x without it"
            )
        jax.eval_shape(machine.whole(estimator), x, y)
    point = _point(estimator, x, y, carry)
    program = estimator.program(x)
    asked = stepping.whats(program)
    of_level = {UPPER: upper or {}, LOWER: lower or {}}
    made: dict[str, level.Level] = {}
    with contextlib.ExitStack() as stack:  # closes the levels that are made, if anything is wrong
        for name in LEVELS:
            options = _options(fields, of_level[name], at_level[name], name)
            made[name] = level.Level(
                name,
                problem,
                at_level[name],
                point,
                level.bare(asked, name),
                gossips=_check_gossip(estimator, options),
                begins=begins,
                beside=made[LOWER].run if made else None,
                **options,
            )
            stack.enter_context(made[name].run)
        setup = made[LOWER].run.setup
        if setup.company.meeting.shares_gpu:
            raise ValueError(
                f"fit_bilevel: {meeting_lib.NO_COLLECTIVES}Its outer steps need them. Take one "
                "process, whose workers local='virtual' plays"
            )
        _check_gate(made)
        first = sources.fetch(at_level[UPPER], np.arange(1))
        rows = per_example.rows(point.x, UPPER, jnp.arange(1))
        diagnosis.check_upper(problem_lib.mean(problem.upper), rows, y, first)
        steps = stepping.Stepping(
            estimator, tx, x, mesh=setup.where.mesh, reducer=setup.methods.reducer
        )
        stack.pop_all()
    return Made(made, steps, tx, x, y, point)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """A ValueError begins with what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _check_given(
    problem: Any,
    estimator: Any,
    fields: Mapping[str, Any],
    of_level: Mapping[str, Mapping[str, Any]],
) -> None:
    if not isinstance(problem, Bilevel):
        raise ValueError(
            f"fit_bilevel: problem is a {type(problem).__name__}; give "
            "hetjax.bilevel.Bilevel(upper, lower), losses (x, y, examples) -> f[B]"
        )
    if not isinstance(estimator, machine.Estimator):
        raise ValueError(
            f"fit_bilevel: estimator is a {type(estimator).__name__}; give one of "
            "hetjax.bilevel.value_gap(…), implicit(…) or unroll(…), such as "
            "value_gap(descent(optax.sgd(0.1)), 10)"
        )
    wrong = [name for name in _OF_STEPS if name in fields]
    if wrong:
        raise ValueError(
            f"fit_bilevel: {', '.join(wrong)}: these fields are of `fit`; a bilevel run has "
            "outer_steps, and evaluates every eval_every of them"
        )
    if fields.get("nonfinite", "stop") != "stop":
        raise ValueError(
            f"fit_bilevel: nonfinite={fields['nonfinite']!r}: the requests of one hypergradient "
            "would each be without other microbatches, so that their sums do not belong together. "
            "Leave it out; a run ends at the first sum that is not finite, and names the examples"
        )
    if fields.get("debug"):
        raise ValueError(
            "fit_bilevel: debug: an estimator traces the losses to differentiate them, so they see "
            "no numbers. Debug one level alone, such as hetjax.fit(lambda y, batch, rng: lower(x, "
            "y, batch), y, …, debug=True)"
        )
    if any(name in fields for name in _OF_LOSSES):
        raise ValueError(
            "fit_bilevel: per_example_rng: the losses of a bilevel problem are given no key; draw "
            "what is random beforehand, as a field of the examples"
        )
    for name, own in of_level.items():
        if others := [field for field in own if field not in OF_A_LEVEL]:
            raise ValueError(
                f"fit_bilevel: {name}={{…}} has {', '.join(map(repr, others))}; a level may have "
                f"of its own {', '.join(OF_A_LEVEL)}. Give other fields to fit_bilevel itself, for "
                "both levels"
            )


def _checked(
    x: types.PyTree, y: types.PyTree, at_level: Mapping[str, Any]
) -> tuple[types.PyTree, types.PyTree]:
    """Both as NumPy arrays; refuses what is none of floating point, and rows of other examples."""
    if any(map(per_example.is_one, jax.tree.leaves(y, is_leaf=per_example.is_one))):
        raise ValueError("fit_bilevel: y has PerExample leaves; those of x alone may be")
    with _naming("fit_bilevel"):
        diagnosis.check_floating(x=x, y=y)
    _check_rows(x, at_level)
    return jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), (x, y))


def _check_optimizer(optimizer: Any, x: types.PyTree) -> optax.GradientTransformationExtraArgs:
    tx = inputs.check_optimizer(optimizer, x, caller="fit_bilevel")
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, x))
    if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in state):
        raise ValueError(
            "fit_bilevel: the state of this optimizer has a random key (as that of "
            "optax.noisy_sgd), which no bilevel run keeps; take one without"
        )
    return tx


def _check_rows(x: types.PyTree, at_level: Mapping[str, Any]) -> None:
    """Refuses per-example variables that are not as many as the examples."""
    paths = jax.tree_util.tree_flatten_with_path(x, is_leaf=per_example.is_one)[0]
    for path, leaf in paths:
        if not per_example.is_one(leaf):
            continue
        where = f"x{jax.tree_util.keystr(path)}"
        if leaf.level not in at_level:
            raise ValueError(
                f"fit_bilevel: {where} is PerExample of the level {leaf.level!r}; the levels are "
                "'upper' and 'lower'"
            )
        shape, wanted = np.shape(leaf.values), len(at_level[leaf.level])
        if not hasattr(leaf.values, "ndim"):
            raise ValueError(
                f"fit_bilevel: {where} is PerExample of a {type(leaf.values).__name__}; give an "
                "array, [N, ...]"
            )
        if not shape or shape[0] != wanted:
            raise ValueError(
                f"fit_bilevel: {where} is PerExample with rows {list(shape)}, and the "
                f"{leaf.level} source has {wanted} examples: give one row for each of them"
            )


def _check_gate(made: Mapping[str, level.Level]) -> None:
    """Refuses a gate that can never close: no gate closes the round that ends a pass."""
    setups = [own.run.setup for own in made.values()]
    if not setups[0].methods.gate.closes or setups[0].config.data.sharing != "shared":
        return
    if all(
        each.config.budget * each.config.microbatch_size >= each.stream.num_examples
        for each in setups
    ):
        raise ValueError(
            "fit_bilevel: a gate closes no round that ends a pass over the data, and here each "
            "request takes a whole pass, so that it would never close. Give a level a smaller "
            "budget, such as lower={'budget': 8}, or leave the gate out"
        )


def _point(
    estimator: machine.Estimator, x: types.PyTree, y: types.PyTree, carry: Any
) -> rules.Point:
    """A point of the shapes that all requests have, zeros but for x and y."""
    has_vector, num_tangents = stepping.uses(estimator.program(x))
    if num_tangents and per_example.split(x)[1]:
        raise ValueError(
            "fit_bilevel: forward mode carries a tangent for each number of x, and x has "
            f"{num_tangents}: PerExample leaves have too many. Take mode='reverse', implicit or "
            "value_gap"
        )
    x = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), _x_of(x), carry.x)
    y = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), y, carry.y)
    tangents: types.PyTree = ()
    if num_tangents:
        tangents = jax.tree.map(
            lambda leaf: np.zeros((num_tangents, *leaf.shape), leaf.dtype), (x, y)
        )
    return rules.Point(x, y, jax.tree.map(np.zeros_like, y) if has_vector else (), tangents)


def _x_of(x: types.PyTree) -> types.PyTree:
    """As requests have it: a learned start is no part of it."""
    return x.x if isinstance(x, trajectory.Learned) else x


def _options(
    fields: Mapping[str, Any], own: Mapping[str, Any], source: Any, name: str
) -> dict[str, Any]:
    """Fields of a level's run. A request without a budget takes the whole set.

    What is no size or number here is left to the run, which says what is wrong with it.
    """
    both = {**fields, **own}
    if "budget" not in both:
        size = both.get("microbatch_size", config_lib.ExperimentConfig().microbatch_size)
        both["budget"] = 1
        if isinstance(size, int) and size > 0:
            both["budget"] = max(_least_budget(both), math.ceil(len(source) / size))
    if name == UPPER and isinstance(both["seed"], int):
        both["seed"] += SEED_OF_UPPER
    return both


def _least_budget(fields: Mapping[str, Any]) -> int:
    """With private shards a microbatch for each worker."""
    data, workers = fields.get("data"), fields.get("workers")
    if not isinstance(data, Mapping) or data.get("sharing") != "private":
        return 1
    cluster = arguments.cluster_fields(fields.get("cluster", {}), workers=workers)
    count = cluster["num_workers"] if isinstance(cluster, dict) else 1
    return count if isinstance(count, int) else 1


def _check_gossip(estimator: machine.Estimator, options: Mapping[str, Any]) -> bool:
    """Whether the reducer that is asked for averages parameters; refuses what cannot do with it."""
    reducer = options.get("reducer", "all_reduce")
    try:
        gossips = not kinds.resolve("reducer", reducer).keeps_replicas_equal
    except ValueError:
        return False  # the run says what is wrong with it
    if gossips and estimator.needs_all:
        raise ValueError(
            f"fit_bilevel: this estimator cannot gossip: {estimator.needs_all}. Take "
            "reducer='all_reduce' or 'ring', or a value_gap with a constant or growing multiplier"
        )
    return gossips
