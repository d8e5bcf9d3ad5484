"""What an ordering is: the permutation of the examples, and how signs change it.

An ordering knows neither quotas nor data. Shared data has one state for the whole set,
private data one state a shard. `place` runs on the host at the end of a round; `signs` runs on
the devices, inside the local and the sync phase.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

PyTree = Any


class OrderState(Protocol):
    """What every ordering's state shows; methods add fields of their own."""

    @property
    def order(self) -> np.ndarray:
        """i32[num_units]: the order of the pass that is being worked through."""


class Signs(NamedTuple):
    """The part of a balancing order that runs on the devices; all pure, traceable functions."""

    init: Callable[[PyTree], PyTree]
    """`params -> running_sum` of zeros; also the shape of a worker's signed sum."""

    local: Callable[..., tuple[Any, PyTree, PyTree, Any]]
    """`(weighted_losses, worker_state, signed_sum, microbatch) -> ((loss_sum, weight_sum),
    grad_sum, signed_sum, pair_signs i8[microbatch_size / 2])`, for one microbatch:
    `weighted_losses(params) -> (weight * loss f32[B], weights f32[B])`, masked already;
    `signed_sum` is what this worker has added up in this round so far, and is returned with
    the microbatch's part added."""

    sync: Callable[[PyTree, PyTree, str], tuple[PyTree, Any]]
    """`(running_sum, signed_sum, axis_name) -> (running_sum, worker_sign i8[])`: the
    coordination of the workers, by collectives over `axis_name`. A worker sign of -1 turns
    round all pair signs of this worker's round."""


class Ordering(NamedTuple):
    """A method of ordering examples: `state = init(num_units, seed)`, then `place` each round."""

    init: Callable[[int, tuple[int, ...]], Any]
    """`(num_units, seed) -> state`; `seed` is a tuple of ints that names the stream."""

    place: Callable[[Any, np.ndarray, np.ndarray | None], Any]
    """`(state, realised_units i32[k], pair_signs i8[k / 2] or None) -> state`: the units that
    were committed in this round, in (worker, position) order, without padding. The call that
    completes a pass returns a state whose `order` is the next pass's."""

    signs: Signs | None = None
    reducers: tuple[str, ...] | None = None
    """The reducers it works with; None = all."""
