"""The first step of a synchronisation: what the workers contributed becomes what each updates from.

Contributions are summed, and divided once by the sum of their weights: never a mean of means.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.rounds import weighting as weighting_lib
from hetjax.rounds.forms import Form
from hetjax.topology import reducers


class Reduced(NamedTuple):
    """What a worker updates from: `sums / weight`."""

    sums: types.PyTree
    weight: jax.Array  # f[]; 0 where there is nothing to update from
    own: types.PyTree = ()  # of this worker alone; over the same weight


class How(NamedTuple):
    """How a run reduces."""

    reducer: reducers.Reduction
    num_workers: int
    nominal_examples: int  # of a full round
    weighting: str = "example"  # one of `weighting.WEIGHTINGS`: what is minimised
    totals: Any = None
    """`(contributed, metrics) -> (sums, weight)` where the sums have met before: see
    `shared_sums`."""


def reduce(
    how: How,
    form: Form,
    contributed: types.Contribution,
    shares: jax.Array,
    metrics: types.SyncMetrics | tuple[()] = (),
) -> tuple[Reduced, types.SyncMetrics]:
    """The sums and the weight from which each worker updates, and the metrics of all workers.

    The ratio is `sum_j sums_j / sum_j weight_j`, of what `weighting.summands` makes of each
    worker's. With a reducer that gossips it is worker j's `sums_j / divisor_j` by
    `weighting.own_divisor`, so that the mean of the replicas descends the same objective, to first
    order in the step.

    Args:
        how: the reducer and what is minimised.
        form: collective or array; leaves of all but `shares` and `metrics` are this form's.
        contributed: what the workers contributed.
        shares: f[W], each shard's share of the examples.
        metrics: of all workers, where the caller knows them.
    """
    metrics = metrics or form.each(_metrics_of_all, (0,), None)(contributed)
    if how.totals is not None:  # by weight of example
        sums, weight = how.totals(contributed, metrics)
        return Reduced(sums, weight, contributed.own), metrics

    def counted(contributed: types.Contribution) -> tuple[tuple, jax.Array]:
        """`((sums, own), weight)`."""
        both = contributed.sums, contributed.own
        share = shares.astype(contributed.weight.dtype)[jax.lax.axis_index(mesh_lib.WORKER_AXIS)]
        if how.reducer.mixing is None:
            return weighting_lib.summands(how.weighting, contributed._replace(sums=both), share)
        divisor = weighting_lib.own_divisor(
            how.weighting,
            contributed,
            share,
            mean_weight=weighting_lib.mean_weight(
                how.weighting, metrics, shares.astype(contributed.weight.dtype)
            ),
            num_workers=how.num_workers,
            nominal_examples=how.nominal_examples,
        )
        return both, divisor

    with jax.named_scope("reduce"):
        (sums, own), weight = form.each(counted)(contributed)
        sums, weight = form.sum((sums, weight))
        return Reduced(sums, weight, own), metrics


def _metrics_of_all(contributed: types.Contribution) -> types.SyncMetrics:
    """The metrics of all workers, alike on each, by one `psum` of one short vector.

    Counts travel as floating point, exact below 2**24.
    """
    axis = mesh_lib.WORKER_AXIS
    num_workers = jax.lax.axis_size(axis)
    dtype, tally = contributed.loss_sum.dtype, contributed.tally
    numbers = [
        contributed.weight,
        tally.example_count,
        tally.microbatches_done,
        tally.nonfinite_microbatch,
    ]
    is_mine = jnp.arange(num_workers, dtype=jnp.int32) == jax.lax.axis_index(axis)
    mine = jnp.stack([jnp.where(is_mine, number.astype(dtype), 0) for number in numbers])
    metrics, treedef = jax.tree.flatten(contributed.metric_sums)
    own = [contributed.loss_sum, contributed.weight, *(leaf.astype(dtype) for leaf in metrics)]
    total = jax.lax.psum(jnp.concatenate([jnp.stack(own), mine.reshape(-1)]), axis)
    weights, *counts = total[len(own) :].reshape(4, num_workers)
    examples, done, nonfinite = (count.astype(jnp.int32) for count in counts)
    return types.SyncMetrics(
        total[0],
        total[1],
        examples,
        done,
        nonfinite,
        weights,
        jax.tree.unflatten(treedef, list(total[2 : len(own)])),
    )
