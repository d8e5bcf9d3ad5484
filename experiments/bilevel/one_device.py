"""A bilevel problem on one device: hypergradients and updates under `jit`, and records of them.

`few_shot`, `search` and `gan` have each a function that makes a `Made` of a configuration. What is
random in a hypergradient (tasks, points, noise) comes of a key, so equal seeds make equal runs.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.bilevel import cleaning, estimators, settings
from hetjax.bilevel import machine
from hetjax.types import PyTree

_INFO = ("upper_loss", "lower_loss", "gap", "residual", "curvature", "multiplier")

Record = dict[str, Any]


class Made(NamedTuple):
    """What a configuration is on one device."""

    x: PyTree
    hypergradient: Callable[[PyTree, PyTree, jax.Array], machine.Result]
    """`(x, state, key) -> (grad_x, state, info)`; the first state is None."""
    measure: Callable[[PyTree, PyTree, jax.Array], dict[str, jax.Array]]
    """`(x, state, key) -> {name: f[]}`, for a record; traced."""
    finish: Callable[[PyTree, PyTree, jax.Array], Record]
    """`(x, state, key) -> what the run came to`, with `solved`; the key is that of all records."""


class At(NamedTuple):
    """Between two hypergradients."""

    x: PyTree
    opt: optax.OptState
    state: PyTree
    count: jax.Array  # i32[]: hypergradients so far
    info: machine.Info  # of the last one, without its cost


def solve(
    config: settings.TrainConfig,
    made: Made,
    *,
    on_record: Callable[[Record], object] = lambda record: None,
) -> tuple[Record, list[Record]]:
    """The summary and the records, one every `eval_every` hypergradients.

    `train_secs` is the time of hypergradients and updates, without compiling and evaluating.

    Raises:
        ValueError: the upper loss is not finite.
    """
    tx = estimators.make_upper(config)
    root, of_measures = jax.random.split(jax.random.key(config.seed))
    costs: list[Any] = []

    def step(at: At) -> At:
        found = made.hypergradient(at.x, at.state, jax.random.fold_in(root, at.count))
        costs.append(found.info.cost)
        updates, opt = tx.update(found.grad_x, at.opt, at.x)
        info = found.info._replace(cost=())
        return At(optax.apply_updates(at.x, updates), opt, found.state, at.count + 1, info)

    start = At(made.x, tx.init(made.x), None, jnp.int32(0), machine.Info((), cost=()))
    many = jax.jit(lambda at, num: jax.lax.fori_loop(0, num, lambda _, at: step(at), at))
    measure = jax.jit(made.measure)
    began = time.perf_counter()
    at = jax.block_until_ready(jax.jit(step)(start))
    compiled = many.lower(at, 1).compile()
    compile_secs, secs = time.perf_counter() - began, 0.0
    history: list[Record] = []
    for number in range(config.upper.steps // config.eval_every):
        began = time.perf_counter()
        done = int(at.count)
        at = jax.block_until_ready(compiled(at, (number + 1) * config.eval_every - done))
        secs += time.perf_counter() - began
        record = {"step": int(at.count), "train_secs": secs} | _numbers(at.info)
        if not math.isfinite(record["upper_loss"]):
            raise ValueError(
                f"The upper loss is not finite after {record['step']} hypergradients of "
                f"{config.estimator.name}. Lower lower.learning_rate={config.lower.learning_rate} "
                f"or upper.learning_rate={config.upper.learning_rate}"
            )
        measured = measure(at.x, at.state, of_measures)
        record |= {name: float(value) for name, value in measured.items()}
        history.append(record)
        on_record(record)
    cost = costs[0]
    summary = {
        "problem": config.problem,
        "estimator": estimators.METHODS[config.estimator.name].title,
        "hypergradients": history[-1]["step"],
        "train_secs": secs,
        "compile_secs": compile_secs,
        "cost_of_a_hypergradient": dataclasses.asdict(cost),
        "work": history[-1]["step"] * cleaning.work(cost),
        **{name: history[-1][name] for name in history[-1] if name not in ("step", "train_secs")},
        **made.finish(at.x, at.state, of_measures),
    }
    return summary, history


def _numbers(info: machine.Info) -> Record:
    """The fields of an info that a method has; the means of those of several tasks."""
    found = {name: getattr(info, name) for name in _INFO}
    return {name: float(jnp.mean(v)) for name, v in found.items() if not isinstance(v, tuple)}
