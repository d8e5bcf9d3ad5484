"""The records that flow through one round. Pure data: no behaviour, no host state."""

from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class Microbatch(NamedTuple):
    """A block of examples of fixed shape: the unit of a quota.

    Leading axes may be added (`[num_workers, max_microbatches]` in the fused form).
    """

    example_ids: jax.Array | np.ndarray  # i32[microbatch_size], -1 = padding
    example_mask: jax.Array | np.ndarray  # f32[microbatch_size], 1 = example, 0 = padding
    examples: PyTree  # leaves [microbatch_size, ...]; padding is any finite example


class WorkerState(NamedTuple):
    """What the local phase reads of a worker."""

    params: PyTree
    running_sum: PyTree  # of the order's balancing; () where the order takes no signs


class Accumulated(NamedTuple):
    """The sums of one worker over its microbatches of a round.

    No shape depends on the quota. Sums are in float32 or wider.
    """

    grad_sum: PyTree  # like params: sum of weight * gradient
    loss_sum: jax.Array  # f32[]: sum of weight * loss
    weight_sum: jax.Array  # f32[]
    example_count: jax.Array  # i32[]: examples that entered the sums
    microbatches_done: jax.Array  # i32[]
    signed_sum: PyTree  # like running_sum
    nonfinite_microbatch: jax.Array  # i32[]: position of the first one in the round, -1 = none


class TrainState(NamedTuple):
    """The training state. Every leaf has a leading axis `num_workers` over the worker axis."""

    params: PyTree
    opt_state: PyTree
    running_sum: PyTree
    progress_rounds: (
        jax.Array | np.ndarray
    )  # f32[W]: examples processed over the nominal examples a round


class SyncMetrics(NamedTuple):
    """What a synchronisation tells the host, the same on every worker."""

    loss_sum: jax.Array  # f32[]
    weight_sum: jax.Array  # f32[]
    example_count: jax.Array  # i32[W]: examples that entered the sums
    microbatches_done: jax.Array  # i32[W]
    nonfinite_microbatch: jax.Array  # i32[W], -1 = none
    worker_weights: jax.Array  # f32[W]: weight of what each worker did
