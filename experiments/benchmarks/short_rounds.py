"""What does one worker's round add to a step in plain Flax? The README's network, in turn."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hetjax
from experiments.benchmarks import quota_overhead
from experiments.benchmarks.rows import Row

_BATCH, _NUM_EXAMPLES = 128, 2048
_STEPS = 50  # in a row, before the other side has its turn
# Size of a microbatch, local form: target
_ARMS = {(128, "stepped"): "≤ 1.3", (8, "stepped"): "≤ 2.5", (8, "fused"): "none"}


def one_worker_rows(turns: int = 30) -> list[Row]:
    """A round of one worker, as one microbatch and as sixteen, over a step of `nnx.jit`."""
    x = np.random.default_rng(0).normal(size=(_NUM_EXAMPLES, 10)).astype(np.float32)
    data = {"x": x, "y": np.sin(x[:, :1] + x[:, 1:2])}
    loss_fn, params = hetjax.nnx_loss(_network(), _loss)
    rows = []
    for (size, form), target in _ARMS.items():
        fields: dict[str, Any] = {"microbatch_size": size, "budget": _BATCH // size, "local": form}
        fields |= {"epochs": 1_000_000, "workers": 1}
        with hetjax.Run(loss_fn, params, optax.adam(3e-3), data, **fields) as run:
            programs = {"rounds": _rounds(run), "plain": _plain(data)}
            secs = quota_overhead.in_turn(programs, turns)
        ratio, low, high = quota_overhead.ratio_of(secs["rounds"], secs["plain"])
        ours, theirs = (np.median(of_side) / _STEPS * 1e3 for of_side in secs.values())
        rows.append(
            Row(
                f"one worker, README's MLP, a round of {_BATCH} examples in microbatches of "
                f"{size}, local={form!r}, over a step of nnx.jit, ratio of medians of {turns} "
                f"blocks of {_STEPS} in turn and its 95 % interval",
                target,
                f"{ratio:.2f} ({low:.2f} to {high:.2f}); {ours:.2f} and {theirs:.2f} ms; load "
                f"{os.getloadavg()[0]:.1f}",
            )
        )
    return rows


def _network() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(10, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))


def _loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def _rounds(run: hetjax.Run) -> Callable[[], None]:
    state = run.init()

    def block() -> None:
        nonlocal state
        for _ in range(_STEPS):
            state, _ = run.round(state)
        run.settle()

    return block


def _plain(data: Any) -> Callable[[], None]:
    model = _network()
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    order = np.random.default_rng(1).permutation(_NUM_EXAMPLES).reshape(-1, _BATCH)
    steps = 0

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: _loss(model, batch).mean())(model)
        optimizer.update(model, grads)
        return loss

    def block() -> None:
        nonlocal steps
        for _ in range(_STEPS):
            ids = order[steps % len(order)]
            loss = step(model, optimizer, {name: array[ids] for name, array in data.items()})
            steps += 1
        jax.block_until_ready(loss)

    return block
