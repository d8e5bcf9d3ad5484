"""Checks what a bilevel run is given, and makes its two levels and what is between their rounds."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import messages, types
from hetjax.bilevel import diagnosis, machine, per_example, trajectory, vectors
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel.problem import LOWER, UPPER, Bilevel
from hetjax.bilevel.rounds import level, rules, stepping
from hetjax.config import experiment, kinds
from hetjax.data import iterables, sources
from hetjax.inputs import arguments, refusals
from hetjax.losses import named as named_lib

SEED_OF_UPPER = 0x5550  # added to the run's: its order and its delays are others
_REFUSED = {
    **dict.fromkeys(
        ("epochs", "max_rounds", "eval_every_rounds", "ema", "rule"),
        "a bilevel run has none; give outer_steps",
    ),
    "per_example_rng": "the losses of a bilevel problem are given no key",
    "nonfinite": "the sums of one hypergradient belong together; none is left out",
    **dict.fromkeys(("slices", "shard"), "the workers of a bilevel problem have a device each"),
    "debug": "an estimator traces the losses; debug one level alone, by hetjax.fit",
}
_OFF = {"nonfinite": "stop", "debug": False}  # values that are none
OF_A_LEVEL = ("budget", "microbatch_size", "quota", "gate", "ordering", "data", "seed", "replay")
"""Fields that each level may have of its own."""


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
    **fields: Any,
) -> tuple[dict[str, level.Level], stepping.Stepping, types.PyTree, types.PyTree]:
    """Both levels and the steps between their requests; arguments as of `hetjax.fit_bilevel`.

    Returns:
        The levels, the steps, and x and y on the host, without worker axis.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
    """
    of_level = {LOWER: lower or {}, UPPER: upper or {}}
    _check_given(problem, estimator, fields, of_level)
    fields.setdefault("seed", 0)
    at_level = {}
    for name, given in ((LOWER, lower_source), (UPPER, upper_source)):
        with messages.as_mistake(f"fit_bilevel, {name} source: "):
            at_level[name] = sources.as_source(given)
            if isinstance(at_level[name], iterables.Streamed):
                raise ValueError("got a hetjax.stream, which is read once; give one by index")
    _check_rows(x, at_level)
    tx = refusals.check_optimizer(optimizer, x, caller="fit_bilevel")
    made: dict[str, level.Level] = {}
    with contextlib.ExitStack() as stack:  # closes the levels that are made, if anything is wrong
        with messages.as_mistake("fit_bilevel: "):
            x, y = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), (x, y))
            point = _point(estimator, x, y)
            gossips = _gossips(estimator, fields)
        asked = [what for what, _ in machine.asked_for(estimator.program(x))]
        for name in (LOWER, UPPER):
            with messages.as_mistake(f"fit_bilevel, {name} level: "):
                made[name] = level.Level(
                    name,
                    problem,
                    at_level[name],
                    point,
                    level.bare(asked, name),
                    gossips=gossips,
                    beside=made[LOWER].run if made else None,
                    **_options(fields, of_level[name], at_level[name], name),
                )
            stack.enter_context(made[name].run)
        setup = made[LOWER].run.setup
        with messages.as_mistake("fit_bilevel: "):
            communicator = setup.company.communicator
            if not communicator.has_collectives:
                raise ValueError(f"{communicator.no_collectives}Take one process, local='virtual'")
            _check_gate(made)
            first = sources.fetch(at_level[UPPER], np.arange(1))
            rows = per_example.rows(point.x, UPPER, jnp.arange(1))
            diagnosis.check_upper(
                problem_lib.mean(named_lib.giving(problem.upper, 3)), rows, y, first
            )
        steps = stepping.Stepping(
            estimator, tx, x, mesh=setup.where.mesh, reducer=setup.methods.reducer
        )
        stack.pop_all()
    return made, steps, x, y


def _check_given(
    problem: Any,
    estimator: Any,
    fields: Mapping[str, Any],
    of_level: Mapping[str, Mapping[str, Any]],
) -> None:
    for name, given, kind in (
        ("problem", problem, Bilevel),
        ("estimator", estimator, machine.Estimator),
    ):
        if not isinstance(given, kind):
            raise ValueError(
                f"fit_bilevel: {name} is a {type(given).__name__}; give a hetjax.bilevel."
                f"{kind.__name__}"
            )
    for name, why in _REFUSED.items():
        if name in fields and (name not in _OFF or fields[name] != _OFF[name]):
            raise ValueError(f"fit_bilevel: {name}: {why}")
    for name, own in of_level.items():
        if others := [field for field in own if field not in OF_A_LEVEL]:
            raise ValueError(
                f"fit_bilevel: {name}: got {', '.join(map(repr, others))}; a level may have of its "
                f"own {', '.join(OF_A_LEVEL)}"
            )


def _check_rows(x: types.PyTree, at_level: Mapping[str, Any]) -> None:
    """Refuses per-example variables that are not as many as the examples."""
    sizes = {name: len(source) for name, source in at_level.items()}
    for path, leaf in jax.tree_util.tree_flatten_with_path(x, is_leaf=per_example.is_one)[0]:
        if not per_example.is_one(leaf):
            continue
        shape = getattr(leaf.values, "shape", ())
        if leaf.level not in sizes or shape[:1] != (sizes[leaf.level],):
            raise ValueError(
                f"fit_bilevel: x{jax.tree_util.keystr(path)} is PerExample of {leaf.level!r} with "
                f"rows {list(shape)}; give an array with a row for each example: {sizes}"
            )


def _check_gate(made: Mapping[str, level.Level]) -> None:
    """Refuses a gate that can never close: no gate closes the round that ends a pass."""
    setups = [own.run.setup for own in made.values()]
    if not setups[0].methods.gate.closes or setups[0].config.data.sharing != "shared":
        return
    if all(
        each.config.budget * each.config.microbatch_size >= each.stream.examples_per_epoch
        for each in setups
    ):
        raise ValueError(
            "gate: none closes a round that ends a pass, and here each round does; give a level a "
            "smaller budget"
        )


def _point(estimator: machine.Estimator, x: types.PyTree, y: types.PyTree) -> rules.Point:
    """A point of the shapes that all requests have, zeros but for x and y.

    Raises:
        ValueError: the estimator cannot do with such an x, or its steps have no derivative.
    """
    has_rows, is_learned = bool(per_example.split(x)[1]), isinstance(x, trajectory.Learned)
    if estimator.needs_x and has_rows:
        raise ValueError(f"x has PerExample leaves, and {estimator.needs_x}")
    carry = jax.eval_shape(lambda x, y: estimator.begin(x, y, None), x, y)
    if is_learned and isinstance(carry.x, trajectory.Learned):
        raise ValueError("x is Learned, and this estimator learns no start")
    jax.eval_shape(machine.whole(estimator), x, y)  # from the first hypergradient to the second
    has_vector, num_tangents = stepping.uses(estimator.program(x))
    if num_tangents and has_rows:
        raise ValueError("mode='forward' has a tangent for each number of x; PerExample has many")
    x = x.x if is_learned else x  # a learned start is no part of a request
    x, y = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), (x, y), (carry.x, carry.y))
    tangents = jax.device_get(vectors.stack_of((x, y), num_tangents)) if num_tangents else ()
    return rules.Point(x, y, jax.tree.map(np.zeros_like, y) if has_vector else (), tangents)


def _options(
    fields: Mapping[str, Any], own: Mapping[str, Any], source: Any, name: str
) -> dict[str, Any]:
    """Fields of a level's run. A request without a budget takes the whole set.

    What is no size or number here is left to the run, which says what is wrong with it.
    """
    both = {**fields, **own}
    if isinstance(data := both.get("data"), Mapping) and data.get("sharing") == "process_local":
        raise ValueError("data.sharing: got 'process_local'; a level takes 'shared' or 'private'")
    if "budget" not in both:
        size = both.get("microbatch_size", experiment.ExperimentConfig().microbatch_size)
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


def _gossips(estimator: machine.Estimator, fields: Mapping[str, Any]) -> bool:
    """Whether the reducer that is asked for averages parameters; refuses what cannot do with it."""
    gossips = not kinds.resolve("reducer", fields.get("reducer", "all_reduce")).keeps_replicas_equal
    if gossips and estimator.needs_all:
        raise ValueError(f"reducer: this estimator cannot gossip: {estimator.needs_all}")
    return gossips
