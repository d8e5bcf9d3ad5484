"""Evaluation on one worker's device: weighted means of per-example metrics over a source."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import feed as feed_lib
from hetjax.data import rounds
from hetjax.training import accumulate as accumulate_lib

MetricsFn = Callable[[types.PyTree, types.PyTree], dict[str, Any]]
"""`(params, examples) -> {name: f32[B]}`; a value may be `(f32[B], weights f32[B])`."""

_BATCH_SIZE = 256


def metrics_of_loss(loss_fn: accumulate_lib.LossFn) -> MetricsFn:
    """The training loss as the only metric, with a fixed random key."""

    def metrics(params: types.PyTree, examples: types.PyTree) -> dict[str, Any]:
        return {"loss": loss_fn(params, examples, jax.random.key(0))}

    return metrics


class Evaluator:
    """Means of `metrics_fn` over all of `source`, in batches of one fixed shape.

    Args:
        metrics_fn: per-example metrics.
        source: a data source; kept in the memory of `device`.
        device: where parameters given to `__call__` lie.
    """

    def __init__(self, metrics_fn: MetricsFn, source: Any, device: jax.Device) -> None:
        self._feed = feed_lib.ResidentFeed(source, [device])
        ids = np.arange(len(source), dtype=np.int32)
        batch_size = min(_BATCH_SIZE, len(ids))
        padding = np.full(-len(ids) % batch_size, rounds.PADDING, np.int32)
        self._rows = np.concatenate([ids, padding]).reshape(-1, batch_size)

        def add(params: types.PyTree, microbatch: types.Microbatch, totals: Any) -> Any:
            mask = microbatch.example_mask > 0
            values = metrics_fn(params, microbatch.examples)

            def pair(value: Any) -> tuple[jax.Array, jax.Array]:
                value, weights = value if isinstance(value, tuple) else (value, None)
                weights = jnp.ones(mask.shape) if weights is None else weights
                weights = jnp.where(mask, weights, 0)
                return jnp.sum(jnp.where(mask, value, 0) * weights), jnp.sum(weights)

            pairs = {name: pair(value) for name, value in values.items()}
            return pairs if totals is None else jax.tree.map(jnp.add, totals, pairs)

        self._add = jax.jit(add)

    def __call__(self, params: types.PyTree) -> dict[str, float]:
        """Returns `{name: mean over the source}`; `params` without worker axis."""
        totals = None
        for row in self._rows:
            totals = self._add(params, self._feed.load(0, row), totals)
        return {k: float(total / count) for k, (total, count) in jax.device_get(totals).items()}
