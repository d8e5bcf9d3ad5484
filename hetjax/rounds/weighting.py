"""What is minimised: how much the sums of each worker count in an update.

With `weighting` one of

- `shard`: the mean over all the weight of the data set, `sum_i w_i loss_i / sum_i w_i`, whoever is
  fast. Worker j did `count_j` examples of a shard that holds `share_j` of all: its sums times
  `share_j / count_j` estimate what the whole shard would add, to the numerator and the denominator.
- `example`: the same ratio over the examples that were done, so that the shards of fast workers
  count for more.
- `shard_mean`: the mean of the shards' own means, `sum_j share_j (sum_i w_i loss_i / sum_i w_i over
  shard j)`: each shard counts by its number of examples, however much weight these have.

Without weights `shard` and `shard_mean` are the same to the bit. An update takes these ratios over
its round, and rounds count alike: so they are exact where the mean weight of an example is the same
in each round, and else the nearer the more examples a round has.
"""

import jax
import jax.numpy as jnp

from hetjax import types

WEIGHTINGS = ("shard", "example", "shard_mean")


def check(weighting: str) -> None:
    """Refuses a weighting that there is not.

    Raises:
        ValueError: it is none of `WEIGHTINGS`.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting: got {weighting!r}, must be one of {', '.join(WEIGHTINGS)}.")


def summands(
    weighting: str, contributed: types.Contribution, share: jax.Array
) -> tuple[types.PyTree, jax.Array]:
    """`(sums, weight)` of a worker, to be summed over the workers and divided once.

    Args:
        weighting: one of `WEIGHTINGS`.
        contributed: of the worker.
        share: f[], its shard's share of the examples.
    """
    sums, weight = contributed.sums, contributed.weight
    if weighting == "example":
        return sums, weight
    amount = weight
    if weighting == "shard":
        amount = contributed.tally.example_count.astype(weight.dtype)
    share, amount = jnp.where(amount > 0, share, 0), jnp.where(amount > 0, amount, 1)
    scale = (share / amount).astype(weight.dtype)
    in_unit = weight / amount  # 1 to the bit where the examples have no weights
    sums = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), sums)
    return sums, (share * in_unit).astype(weight.dtype)


def own_divisor(
    weighting: str,
    contributed: types.Contribution,
    share: jax.Array,
    *,
    mean_weight: jax.Array,
    num_workers: int,
    nominal_examples: int,
) -> jax.Array:
    """What a worker that updates alone divides its `sums` by; 0 where it did nothing.

    The mean of the replicas then descends what `weighting` says: with `shard` worker j takes
    `n share_j sums_j / count_j`, with `example` `n sums_j / nominal_examples`, both over
    the mean weight of an example of the round, and with `shard_mean`
    `n share_j sums_j / weight_j`. To divide by the weight of the worker's own examples
    would be a mean of means.

    Args:
        weighting: one of `WEIGHTINGS`.
        contributed: of the worker.
        share: f[], its shard's share of the examples.
        mean_weight: f[], from `mean_weight`.
        num_workers: n.
        nominal_examples: of a full round.
    """
    weight, count = contributed.weight, contributed.tally.example_count
    if weighting != "shard_mean":
        weight = count.astype(weight.dtype) * mean_weight
    if weighting == "example":
        factor = count.astype(jnp.result_type(float)) / (nominal_examples / num_workers)
        factor = factor.astype(weight.dtype)
    else:
        factor = share * num_workers
    return jnp.where(weight > 0, weight / factor, 0).astype(contributed.weight.dtype)


def mean_weight(weighting: str, metrics: types.SyncMetrics, shares: jax.Array) -> jax.Array:
    """The mean weight of an example of the round, f[]: over the shards, or as they were done.

    1 to the bit where the examples have no weights.

    Args:
        weighting: one of `WEIGHTINGS`.
        metrics: of all workers.
        shares: f[W], each shard's share of the examples.
    """
    weights = metrics.worker_weights
    counts = metrics.example_count.astype(weights.dtype)
    if weighting != "example":  # of the workers that did something
        weights = shares * (weights / jnp.where(counts > 0, counts, 1))
        counts = jnp.where(counts > 0, shares, 0)
    total = jnp.sum(counts)
    return jnp.sum(weights) / jnp.where(total > 0, total, 1)
