"""What do the norms of gradient and update cost a synchronisation? Rows for `rounds`."""

import itertools
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

import hetjax
from experiments.benchmarks.rows import Row

_WIDTHS, _TURNS, _CALLS = (64, 1024), 15, 8
_INPUTS, _CLASSES, _WORKERS = 784, 10, 4


def norm_rows() -> list[Row]:
    """The program of the synchronisation over the same without its norms, which XLA leaves out."""
    return [_row(width) for width in _WIDTHS]


def _row(width: int) -> Row:
    rng = np.random.default_rng(0)
    sizes = (_INPUTS, width, width, _CLASSES)
    params = [
        rng.normal(0, 0.03, size=pair).astype(np.float32) for pair in itertools.pairwise(sizes)
    ]
    data = {"x": rng.normal(size=(64, _INPUTS)).astype(np.float32)}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        out = batch["x"]
        for weights in params:
            out = jax.nn.relu(out @ weights)
        return (out**2).sum(-1)

    fields: dict[str, Any] = {"budget": 4, "quota": "equal", "examples_apart": "skip"}
    with hetjax.Run(loss_fn, params, optax.adam(1e-3), data, workers=_WORKERS, **fields) as run:
        state = run.init()
        shapes = run.parts.main.contribution_shapes(state.train.params, state.carried, ())
        contributed = jax.tree.map(
            lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), shapes
        )
        given = state.train, contributed, run.parts.shares, ()
        sync = run.parts.main.sync
        programs = [
            jax.jit(lambda *given: sync(*given)),
            jax.jit(lambda *given: sync(*given)._replace(step=())),
        ]
        secs: list[list[float]] = [[], []]
        for turn in range(_TURNS + 1):
            for program, own in zip(programs, secs, strict=True):
                began = time.perf_counter()
                for _ in range(_CALLS):
                    jax.block_until_ready(program(*given))
                if turn:
                    own.append((time.perf_counter() - began) / _CALLS)
    ratios = [a / b for a, b in zip(*secs, strict=True)]
    num = sum(weights.size for weights in params)
    return Row(
        f"synchronisation with the norms of its step over without, {num:,} parameters, Adam, "
        f"{_WORKERS} CPU workers, median of {_TURNS} turns",
        "none",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"{1e3 * statistics.median(secs[1]):.1f} ms without",
    )
