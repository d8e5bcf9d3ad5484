"""Plays an arm of the study: what it has lost, sent and waited at some numbers of examples.

All clocks are virtual: a microbatch takes as long as its worker's speed says, and nothing else
takes time. What is sent is counted, so that a report can say what links would add.
"""

import functools
import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from experiments.local import study
from experiments.local.study import SECS, Arm, Run
from hetjax import wires
from hetjax.data import sources

_POINTS = 8  # at which what is held out is evaluated; while rates are tuned at the end alone
_AT_ONCE = 64  # examples of it


class Problem(NamedTuple):
    """What a task's arms have in common."""

    task: study.Task
    loss_fn: Any
    params: Any
    train: Any
    held_out: Any

    def held_out_loss(self, params: Any) -> float:
        """The mean over what is held out."""
        total = np.zeros(2)
        for start in range(0, self.task.evaluated, _AT_ONCE):
            part = jax.tree.map(lambda x, a=start: x[a : a + _AT_ONCE], self.held_out)
            total += np.asarray(_sums(self.loss_fn, params, part))
        return float(total[0] / total[1])


@functools.partial(jax.jit, static_argnums=0)
def _sums(loss_fn: Any, params: Any, batch: Any) -> jax.Array:
    """`(sum of the weighted losses, of their weights)`."""
    losses, weights = _of(loss_fn(params, batch, jax.random.key(0)))
    return jnp.stack([jnp.sum(losses * weights), jnp.sum(weights)])


def _of(found: Any) -> tuple[jax.Array, jax.Array]:
    losses, weights = found[:2] if isinstance(found, tuple) else (found, None)
    return losses, jnp.ones_like(losses) if weights is None else weights


@functools.cache
def problem(name: str, data_dir: str) -> Problem:
    task = study.TASKS[name]
    made, held_out = task.made(data_dir)
    return Problem(task, made.loss_fn, made.params, made.train, held_out)


@functools.cache
def begun(name: str, data_dir: str, seed: int) -> Any:
    """The parameters with which all arms of a seed begin: those of some all-reduce."""
    of = problem(name, data_dir)
    optimizer = of.task.optimizer(of.task.inner[1])
    return _fit(of, Arm("", 0), optimizer, seed, of.params, of.task.begun, []).params


def played(run: Run, data_dir: str) -> dict[str, Any]:
    """The run's curve: of each point the examples, the seconds, the bytes, the loss."""
    of, arm = problem(run.task, data_dir), study.ARMS[run.arm]
    params, curve = begun(run.task, data_dir, run.seed), list[dict[str, float]]()
    curve.append({"examples": 0, "secs": 0.0, "rounds": 0, "bytes": 0, "bytes_of_sums": 0})
    curve[0]["loss"] = of.held_out_loss(params)
    if arm.delays:
        asynchronous(of, arm, run, params, curve)
    else:
        optimizer = of.task.optimizer(run.inner)
        if arm.steps:
            optimizer = optax.sgd(run.outer, arm.momentum, nesterov=True)
        _fit(of, arm, optimizer, run.seed, params, run.examples, curve, rate=run.inner)
    return {"curve": curve}


def _fit(
    of: Problem,
    arm: Arm,
    optimizer: optax.GradientTransformation,
    seed: int,
    params: Any,
    examples: int,
    curve: list[dict[str, float]],
    *,
    rate: float = 0.0,
) -> Any:
    """All arms but the asynchronous ones."""
    told = {"secs": 0.0, "rounds": 0, "bytes": 0, "bytes_of_sums": 0}
    secs, every = SECS[: arm.workers], _every(of, examples)
    budget = arm.workers * (arm.steps or 2)
    fields: dict[str, Any] = {"quota": "equal"}
    if arm.unequal:
        fields["quota"] = hetjax.quota.static(proportions=[1 / each for each in secs])
    if arm.gate < 1:
        fields["gate"] = hetjax.gates.quorum(round(arm.gate * budget))
    if arm.steps:
        fields["rule"] = hetjax.local_steps(of.task.optimizer(rate), **dict(arm.options))

    def on_round(report: hetjax.RoundReport) -> bool:
        line = report.to_plain()
        told["secs"] += line["round_secs"]
        told["rounds"] += 1
        told["bytes"] += line["bytes_sent"]
        told["bytes_of_sums"] += line["bytes_of_sums"]
        done = line["examples_processed"]
        if curve and done >= len(curve) * every:
            loss = of.held_out_loss(report.params())
            curve.append({"examples": done, **told, "loss": loss})
        return done >= examples

    result = hetjax.fit(
        of.loss_fn,
        params,
        optimizer,
        of.train,
        epochs=1000,
        seed=seed,
        microbatch_size=study.MICROBATCH,
        budget=budget,
        local="stepped" if arm.wire == "float32" else "virtual",
        cluster={"num_workers": len(secs), "secs_per_microbatch": secs, "clock": "virtual"},
        reducer=hetjax.topology.all_reduce(wire=arm.wire),
        callbacks=[on_round],
        progress=False,
        **fields,
    )
    if result.summary["interrupted"]:
        raise KeyboardInterrupt  # what is not whole is not kept
    return result


# --- Each hands in alone ---


def asynchronous(
    of: Problem, arm: Arm, run: Run, params: Any, curve: list[dict[str, float]]
) -> None:
    """Each worker takes its steps from the newest parameters and hands in; the update is at once.

    Liu et al., "Asynchronous local-SGD training for language modeling", 2024, arXiv 2401.09135:
    delayed Nesterov uses the momentum once in `arm.delays` hand-ins, and the gradient in each. The
    workers' next microbatches are those of one order. What is in flight at the end is lost.
    """
    inner = of.task.optimizer(run.inner)
    order = np.random.default_rng(run.seed)
    ids = np.concatenate([order.permutation(len(of.train)) for _ in range(_passes(of, run))])
    unit, taken = arm.steps * study.MICROBATCH, 0
    every = _every(of, run.examples)
    size = wires.num_bytes(sum(leaf.size for leaf in jax.tree.leaves(params)), arm.wire)

    def steps(at: int) -> Iterator[Any]:
        """The microbatches of the next steps."""
        for rows in ids[at : at + unit].reshape(arm.steps, study.MICROBATCH):
            yield sources.fetch(of.train, rows)

    states = [inner.init(params)] * arm.workers
    momentum = gathered = jax.tree.map(jnp.zeros_like, params)
    came_from = [params] * arm.workers
    given = []
    due = [(arm.steps * secs, worker) for worker, secs in enumerate(SECS)]
    for _ in range(arm.workers):
        given.append(taken)
        taken += unit
    heapq.heapify(due)
    done = hand_ins = 0
    while done < run.examples:
        at, worker = heapq.heappop(due)
        after = came_from[worker]
        for batch in steps(given[worker]):
            after, states[worker] = _step(of.loss_fn, inner, after, states[worker], batch)
        delta = jax.tree.map(jnp.subtract, came_from[worker], after)
        hand_ins, done = hand_ins + 1, done + unit
        uses = hand_ins % arm.delays == 0
        params, momentum, gathered = _update(
            params, momentum, gathered, delta, run.outer, arm=arm, uses=uses
        )
        came_from[worker], given[worker] = params, taken
        taken += unit
        heapq.heappush(due, (at + arm.steps * SECS[worker], worker))
        if done >= len(curve) * every:
            sent = {"bytes": 2 * hand_ins * size, "bytes_of_sums": hand_ins * size}
            told = {"examples": done, "secs": at, "rounds": hand_ins, **sent}
            curve.append({**told, "loss": of.held_out_loss(params)})


def _every(of: Problem, examples: int) -> float:
    """After how many examples what is held out is evaluated."""
    return examples / (_POINTS if examples == of.task.examples else 1)


def _passes(of: Problem, run: Run) -> int:
    return 2 + (run.examples + 8 * 16 * study.MICROBATCH) // len(of.train)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(loss_fn: Any, inner: Any, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    def mean(params: Any) -> jax.Array:
        losses, weights = _of(loss_fn(params, batch, jax.random.key(0)))
        return jnp.sum(losses * weights) / jnp.sum(weights)

    updates, state = inner.update(jax.grad(mean)(params), state, params)
    return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnames=("arm", "uses"))
def _update(
    params: Any, momentum: Any, gathered: Any, delta: Any, rate: Any, *, arm: Arm, uses: bool
) -> tuple[Any, Any, Any]:
    """`(params, momentum, gathered)` after a hand-in; with one delay it is Nesterov's update."""
    gathered = jax.tree.map(jnp.add, gathered, delta)
    moved = jax.tree.map(lambda d: d / arm.delays, delta)
    if uses:
        of_mean = functools.partial(jax.tree.map, lambda m, g: arm.momentum * m + g)
        momentum = of_mean(momentum, jax.tree.map(lambda g: g / arm.delays, gathered))
        gathered = jax.tree.map(jnp.zeros_like, gathered)
        moved = of_mean(momentum, moved)
    params = jax.tree.map(lambda p, d: p - rate * d, params, moved)
    return params, momentum, gathered
