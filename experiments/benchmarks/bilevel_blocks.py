"""What a batch in blocks takes: temporary memory as XLA plans it, and time beside the whole."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks import bilevel_plain, rows
from hetjax import bilevel

SHAPE = bilevel_plain.Shape(5000, 5000, 784, 10)
_SIZE = 50
_SGD = bilevel.descent(optax.sgd(0.1))
_GAP = bilevel.value_gap(_SGD, SHAPE.steps)
_METHODS = {
    "value gap, T = 10": _GAP,
    "RHG, T = 500": bilevel.unroll(_SGD, 500),
    "RHG, T = 500, checkpointed": bilevel.unroll(_SGD, 500, checkpoint=True),
}


def _lower(x: jax.Array, y: jax.Array, batch: Any) -> jax.Array:
    images, labels, index = batch
    return bilevel_plain.lower(x[index], y, (images, labels))


_PROBLEM = bilevel.Bilevel(bilevel_plain.upper, _lower)


def _made(shape: bilevel_plain.Shape, size: int) -> tuple[jax.Array, jax.Array, bilevel.Batches]:
    """x, y and both batches, in blocks unless `size` is 0."""
    x, y, valid, train = bilevel_plain.made(shape)
    batches = bilevel.Batches(valid, (*train, jnp.arange(len(x))))
    if not size:
        return x, y, batches
    return x, y, bilevel.Batches(*(bilevel.Blocks.of(batch, size) for batch in batches))


def _compiled(estimator: bilevel.Estimator, arguments: tuple) -> Any:
    def call(x, y, batches):
        return bilevel.hypergradient(_PROBLEM, estimator, x, y, batches)

    return jax.jit(call).lower(*arguments).compile()


def block_rows(num_turns: int = 15, shape: bilevel_plain.Shape = SHAPE) -> list[rows.Row]:
    arguments = [_made(shape, size) for size in (0, _SIZE)]
    planned = {
        name: [
            _compiled(estimator, each).memory_analysis().temp_size_in_bytes for each in arguments
        ]
        for name, estimator in _METHODS.items()
    }
    gap = planned["value gap, T = 10"][1]
    found = [
        rows.Row(
            f"temporary memory, {name}, {shape.train} x {shape.features} images, whole and in "
            f"blocks of {_SIZE}",
            "value gap 1/50" if name == "RHG, T = 500" else "none",
            f"{whole / 1e3:,.0f} and {cut / 1e3:,.0f} kB"
            + ("" if estimator is _GAP else f"; the value gap's in blocks is 1/{cut / gap:.1f}"),
        )
        for (name, estimator), (whole, cut) in zip(_METHODS.items(), planned.values(), strict=True)
    ]
    calls = [_compiled(_GAP, each) for each in arguments]
    secs: list[list[float]] = [[], []]
    for turn in range(num_turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            secs[which].append(_secs(calls[which], arguments[which])[0])
    whole, cut = ([1e3 * each for each in own[1:]] for own in secs)
    ratio = statistics.median(b / a for a, b in zip(whole, cut, strict=True))
    found.append(
        rows.Row(
            f"value gap, T = 10, in blocks of {_SIZE}: time over that of whole batches, "
            f"median of {num_turns} turns",
            "none",
            f"{ratio:.2f} ({statistics.median(cut):.0f} and {statistics.median(whole):.0f} ms)",
        )
    )
    found.append(_unrolled_row(calls[1], arguments[1]))
    return found


def _unrolled_row(gap: Any, arguments: tuple) -> rows.Row:
    """Blocks keep one core busy, so processor time is time alone on the machine."""
    unrolled = _compiled(_METHODS["RHG, T = 500"], arguments)
    ours = statistics.median(_secs(gap, arguments)[1] for _ in range(15))
    theirs = statistics.median(_secs(unrolled, arguments)[1] for _ in range(3))
    return rows.Row(
        "a hypergradient by RHG, T = 500, over one by the value gap, T = 10, in blocks of "
        f"{_SIZE}, in processor time",
        "none",
        f"{theirs / ours:.1f} ({theirs:.2f} and {ours:.3f} s)",
    )


def _secs(call: Any, arguments: tuple) -> tuple[float, float]:
    """Of the wall clock, and of the processor."""
    began, busy = time.perf_counter(), time.process_time()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - began, time.process_time() - busy
