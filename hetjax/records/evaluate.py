"""Evaluation on one worker's device: weighted means of per-example metrics over a source."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import choosing, stream
from hetjax.rounds import losses as losses_lib

MetricsFn = Callable[[types.PyTree, types.PyTree], dict[str, Any]]
"""`(params, examples) -> {name: f32[B]}`; a value may be `(f32[B], weights f32[B])`."""

_BATCH_SIZE = 256


def metrics_of_loss(loss_fn: losses_lib.LossFn) -> MetricsFn:
    """The training loss as the only metric, with a fixed random key."""

    def metrics(params: types.PyTree, examples: types.PyTree) -> dict[str, Any]:
        return {"loss": loss_fn(params, examples, jax.random.key(0))}

    return metrics


class Evaluator:
    """Means of `metrics_fn` over all of `source`, in batches of one fixed shape.

    Args:
        metrics_fn: per-example metrics.
        source: a data source; kept in the memory of `device`.
        params: without worker axis; for shapes alone.
        device: where parameters given to `__call__` lie.
        on_batch: called before each batch.
        progress: show a bar where the source takes long to read.

    Raises:
        ValueError: the metrics are no dict of one number an example each.
    """

    def __init__(
        self,
        metrics_fn: MetricsFn,
        source: Any,
        params: types.PyTree,
        device: jax.Device,
        *,
        on_batch: Callable[[], None] = lambda: None,
        progress: bool = False,
    ) -> None:
        self._on_batch = on_batch
        self._feed = choosing.evaluation_feed(source, device, progress=progress)
        ids = np.arange(len(source), dtype=np.int32)
        batch_size = min(_BATCH_SIZE, len(ids))
        padding = np.full(-len(ids) % batch_size, stream.PADDING, np.int32)
        self._rows = np.concatenate([ids, padding]).reshape(-1, batch_size)
        names = _check_metrics(metrics_fn, params, self._feed.load(0, self._rows[0]).examples)

        def add(params: types.PyTree, microbatch: types.Microbatch, totals: Any) -> Any:
            mask = microbatch.example_mask > 0
            values = metrics_fn(params, microbatch.examples)

            def pair(value: Any) -> tuple[jax.Array, jax.Array]:
                value, weights = value if isinstance(value, tuple) else (value, None)
                weights = jnp.ones(mask.shape) if weights is None else weights
                weights = jnp.where(mask, weights, 0)
                return jnp.sum(jnp.where(mask, value, 0) * weights), jnp.sum(weights)

            return jax.tree.map(jnp.add, totals, {k: pair(v) for k, v in values.items()})

        self._add = jax.jit(add)
        self.names = names
        self._zeros = dict.fromkeys(names, (np.float32(0), np.float32(0)))
        placed = jax.device_put(params, device)
        jax.block_until_ready(self._add(placed, self._feed.load(0, self._rows[0]), self._zeros))

    def __call__(self, params: types.PyTree) -> dict[str, float]:
        """Returns `{name: mean over the source}`; `params` without worker axis."""
        totals = self._zeros
        for row in self._rows:
            self._on_batch()
            totals = self._add(params, self._feed.load(0, row), totals)
        return {k: float(total / count) for k, (total, count) in jax.device_get(totals).items()}


def _check_metrics(metrics_fn: MetricsFn, params: types.PyTree, examples: Any) -> list[str]:
    batch_size = jax.tree.leaves(examples)[0].shape[0]
    try:
        values = jax.eval_shape(metrics_fn, params, examples)
    except KeyError as error:
        raise ValueError(
            f"metrics_fn or loss_fn failed on an example of eval_source with KeyError {error}: "
            "eval_source must have the fields of source"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"metrics_fn returned {type(values).__name__}; it must return a dict of metrics, such "
            'as {"loss": f32[B], "accuracy": f32[B]}'
        )
    for name, value in values.items():
        for part in value if isinstance(value, tuple) else (value,):
            if getattr(part, "shape", None) != (batch_size,):
                raise ValueError(
                    f"metrics_fn returned {name!r} of shape {getattr(part, 'shape', None)} for "
                    f"{batch_size} examples; it must have one number an example, [{batch_size}]: "
                    "hetjax takes the mean, over examples that are no padding"
                )
    return list(values)
