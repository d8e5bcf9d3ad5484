"""What a synchronisation does with the workers' sums.

Each reducer has two forms that agree: `collective`, inside `shard_map` over the worker axis,
and `array`, on leaves with a leading worker axis on one device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Reducer(NamedTuple):
    """How `(grad_sum, weight_sum)` of the workers become those that each one updates from."""

    collective: Callable[[PyTree, str], PyTree]
    """`(sums, axis_name) -> sums`, leaves without worker axis."""

    array: Callable[[PyTree], PyTree]
    """`sums -> sums`, leaves `[num_workers, ...]`."""

    keeps_replicas_equal: bool


def all_reduce() -> Reducer:
    """The sum over all workers, by `psum`: one global gradient, replicas stay equal."""

    def collective(sums: PyTree, axis_name: str) -> PyTree:
        return jax.lax.psum(sums, axis_name)

    def array(sums: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), sums
        )

    return Reducer(collective, array, keeps_replicas_equal=True)


REDUCERS: dict[str, Callable[..., Reducer]] = {"all_reduce": all_reduce}
