"""What is minimised: how much the sums of each worker count in an update.

With `weighting` one of

- `shard`: the mean over all the weight of the data set, `sum_i w_i loss_i / sum_i w_i`, whoever is
  fast. Worker j did `count_j` examples of a shard that holds `share_j` of all. Its sums times
  `share_j / count_j` estimate what the whole shard would add to the numerator and the denominator.
- `example`: the same ratio over the examples that were done, so that the shards of fast workers
  count for more.
- `shard_mean`: the mean of the shards' own means, `sum_j share_j (sum_i w_i loss_i / sum_i w_i over
  shard j)`. Each shard counts by its number of examples, however much weight these have.

Without weights `shard` and `shard_mean` are the same to the bit. An update takes these ratios over
its round, and rounds count alike. They are exact where the mean weight of an example is the same in
each round. Elsewhere they are the nearer the more examples a round has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import trees, types

WEIGHTINGS = ("shard", "example", "shard_mean")


class Counting(NamedTuple):
    """How the workers' sums count in an update; f[W] each, the same on every worker."""

    scale: jax.Array | None
    """What the sums of each are multiplied by before they are added up; None: as they are."""

    divisor: jax.Array
    """What each divides by: all of them by one number where the sums are added up, and by their own
    where each updates alone. 0 or less: no update."""

    mean_loss: jax.Array
    """The mean loss of which the update takes the derivative. Where weights depend on the
    parameters, each worker takes it times the derivative of its weights off its sums: that is the
    quotient rule."""


def counting(
    weighting: str,
    metrics: types.SyncMetrics,
    shares: jax.Array,
    *,
    added_up: bool,
    nominal: float,
    by_share: bool = False,
) -> Counting:
    """How the sums of each worker count, from what the round's metrics say of all.

    Where sums are added up, the ratio is `sum_j scale_j sums_j / sum_j scale_j weight_j`.

    Where each worker updates alone, the mean of the replicas descends what `weighting` says. With
    `shard` worker j takes `n share_j sums_j / count_j`, with `example` `sums_j / nominal`; both are
    divided by the mean weight of an example of the round. With `shard_mean` it takes
    `n share_j sums_j / weight_j`. To divide by the weight of the worker's own examples would be a
    mean of means.

    The workers of a rule that weighs itself count by its weight alone, or times their share.

    Args:
        weighting: one of `WEIGHTINGS`.
        metrics: of all workers.
        shares: f[W], each shard's share of the examples.
        added_up: whether sums are added up over the workers, or each updates alone.
        nominal: examples of a full round of one worker.
        by_share: of a rule that weighs itself: its weights are times the shares.
    """
    if metrics.counts:
        return _of_rule(metrics.counts, shares * len(shares) if by_share else 1, added_up)
    weights, losses = metrics.worker_weights, metrics.worker_losses
    counts = metrics.example_count.astype(weights.dtype)
    shares = shares.astype(weights.dtype)
    mean_loss = trees.over(metrics.loss_sum, metrics.weight_sum)
    if added_up and weighting == "example":
        each = metrics.weight_sum, mean_loss
        return Counting(None, *(jnp.broadcast_to(x, weights.shape) for x in each))
    amounts = weights if weighting == "shard_mean" else counts
    did = amounts > 0
    present, amounts = jnp.where(did, shares, 0), jnp.where(did, amounts, 1)
    scale = present / amounts
    in_unit = weights / amounts  # 1 to the bit where the examples have no weights
    if weighting == "shard_mean":
        mean_loss = trees.over(losses, weights)
    elif weighting == "shard":
        mean_loss = trees.over(jnp.sum(scale * losses), jnp.sum(present * in_unit))
    mean_loss = jnp.broadcast_to(mean_loss, weights.shape)
    if added_up:
        divisor = jnp.sum(present * in_unit)
        return Counting(scale, jnp.broadcast_to(divisor, weights.shape), mean_loss)
    # Of "shard" and "example", times the mean weight of an example: 1 to the bit without weights.
    factor = shares * len(shares)
    if weighting == "shard":
        weights = counts * trees.over(jnp.sum(present * in_unit), jnp.sum(present))
    elif weighting == "example":
        weights = counts * trees.over(jnp.sum(weights), jnp.sum(counts))
        factor = metrics.example_count.astype(jnp.result_type(float)) / nominal
    divisor = jnp.where(weights > 0, weights / factor.astype(weights.dtype), 0)
    return Counting(None, divisor, mean_loss)


def _of_rule(counts: types.Counts, factor: Any, added_up: bool) -> Counting:
    factor = jnp.broadcast_to(factor, counts.weight.shape).astype(counts.weight.dtype)
    own = counts.weight * factor
    scale = factor * trees.over(jnp.sum(own * counts.scale), jnp.sum(own))
    divisor = jnp.broadcast_to(jnp.sum(own), own.shape) if added_up else own
    return Counting(scale, divisor, jnp.zeros_like(own))
