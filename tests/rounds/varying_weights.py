"""What a round descends whose weights depend on the parameters: sum(w l) / sum(w).

In plain NumPy, from the examples that each worker did, and differentiated by differences.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from tests.rounds import objectives, problems

POINT = {"a": np.array([0.3, -0.7]), "b": np.array(0.4)}
DATA = {
    "x": np.random.default_rng(0).normal(size=(61, 3, 2)),
    "y": np.random.default_rng(1).normal(size=(61, 3)),
}
_WORKERS, _SIZE, _BUDGET = 4, 2, 8
_LOCALS = ("virtual", "stepped", "fused")


class Line(NamedTuple):
    """One combination."""

    local: str
    sharing: str
    weighting: str
    reducer: str


def lines() -> Iterator[Line]:
    """All combinations; shared data has no shards to weigh."""
    of_data = [("shared", "shard")]
    of_data += itertools.product(["private"], objectives.WEIGHTINGS)
    reducers = (*objectives.SUMS, "d_psgd", "matcha")
    for local, data, reducer in itertools.product(_LOCALS, of_data, reducers):
        yield Line(local, *data, reducer)


def _both(xp: Any, params: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """`(losses, weights)`, both [B, 3], as of three tokens; of NumPy or of JAX."""
    losses = (x @ params["a"] + params["b"] - y) ** 2
    return losses, 1 / (1 + losses) + xp.tanh(params["a"][0] * y) + 1


def loss_fn(params: Any, batch: Any, rng: jax.Array) -> hetjax.Losses:
    """Whose weights depend on losses and parameters; with a metric of the same weights."""
    del rng
    losses, weights = _both(jnp, params, batch["x"], batch["y"])
    return hetjax.Losses(losses, weights, {"again": losses})


def held(params: Any, batch: Any, rng: jax.Array) -> hetjax.Losses:
    """The same with constant weights."""
    losses, weights, _ = loss_fn(params, batch, rng)
    return hetjax.Losses(losses, jax.lax.stop_gradient(weights))


def objective(
    params: Any, rows: Sequence[np.ndarray], shares: Sequence[float], weighting: str
) -> float:
    """What a round descends, in plain NumPy.

    Args:
        params: like `POINT`.
        rows: of each worker the ids that it did.
        shares: of each worker, its shard's part of the examples.
        weighting: what is minimised; `example` where all is in one sum.
    """
    top, bottom, means = 0.0, 0.0, []
    for ids, share in zip(rows, shares, strict=True):
        if len(ids):
            losses, weights = _both(np, params, DATA["x"][ids], DATA["y"][ids])
            scale = share / len(ids) if weighting == "shard" else 1
            top += scale * np.sum(losses * weights)
            bottom += scale * np.sum(weights)
            means.append((share, np.sum(losses * weights) / np.sum(weights)))
    if weighting == "shard_mean":
        return sum(s * m for s, m in means) / sum(s for s, _ in means)
    return top / bottom


def by_differences(function: Callable[[Any], float], step: float = 1e-3) -> Any:
    """The gradient of a function of `POINT`, by differences of sixth order."""
    flat, shaped = jax.flatten_util.ravel_pytree(POINT)
    found = []
    for unit in np.eye(len(flat)) * step:
        at = [function(shaped(flat + k * unit)) for k in (-3, -2, -1, 1, 2, 3)]
        found.append(np.dot(at, (-1, 9, -45, 45, -9, 1)) / (60 * step))
    return shaped(np.array(found))


def gap(line: Line) -> float:
    """How far one update of a line's run is from the derivative, over its largest entry.

    Of the mean of the replicas, which are equal before. Call it with 64-bit numbers.
    """
    fields = {"microbatch_size": _SIZE, "local": line.local, "reducer": line.reducer}
    fields["data"] = {"sharing": line.sharing, "weighting": line.weighting}
    fields["quota"] = {"policy": "static", "proportions": (4, 3, 1, 0.1)}
    with problems.run(DATA, POINT, loss_fn=loss_fn, optimizer=optax.sgd(1.0), **fields) as run:
        state, report = run.round(run.init())
        shares = run.setup.stream.shares
    rows = [report.done.microbatches(worker).reshape(-1) for worker in range(_WORKERS)]
    rows = [ids[ids >= 0] for ids in rows]
    weighting, part = line.weighting, 1.0  # of a full round, or of the workers that did something
    if line.reducer in objectives.SUMS:
        weighting = "example" if line.sharing == "shared" else weighting
    elif weighting == "example":
        part = sum(map(len, rows)) / (_SIZE * _BUDGET)
    else:
        part = sum(share for share, ids in zip(shares, rows, strict=True) if len(ids))
    expected = by_differences(lambda params: part * objective(params, rows, shares, weighting))
    moved = jax.tree.map(lambda a, b: a - np.asarray(b).mean(0), POINT, state.train.params)
    (expected, _), (moved, _) = map(jax.flatten_util.ravel_pytree, (expected, moved))
    return float(np.max(np.abs(moved - expected)) / np.max(np.abs(expected)))
