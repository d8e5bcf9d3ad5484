"""The two forms of a synchronisation: by collectives on the worker mesh, or on arrays.

A step of the synchronisation is written once, for one worker and the axis of all workers. In the
collective form it runs inside `shard_map`; in the array form, all workers on one device, it is
`jax.vmap` of the same function over the same axis. Where that was measured to be slow, a part
brings a form of its own for arrays: the mixing of gossip, and the coordination of orders.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.ordering import ordering
from hetjax.topology import reducers

_AXIS = mesh_lib.WORKER_AXIS


class Form(NamedTuple):
    """What differs between the collective and the array form."""

    each: Callable[..., Callable]
    """`(function, in_axes=0, out_axes=0) -> function` of one worker as one of this form's leaves;
    it may use collectives over `WORKER_AXIS`."""

    sum: Callable[[types.PyTree], types.PyTree]
    """The reducer's."""

    mix: Callable[[types.PyTree, Any], types.PyTree]
    """`(params, active) -> params`, a gossiping reducer's; as it is where none gossips."""

    coordinate: Callable[[types.PyTree, types.PyTree], tuple[types.PyTree, Any]]
    """`(memory, evidence) -> (memory, flips)`, the observer's; `flips` is () without one."""


def collective(reducer: reducers.Reduction, observer: ordering.Observer | None) -> Form:
    """Inside `shard_map` over `WORKER_AXIS`, leaves without worker axis."""
    mixing = reducer.mixing
    return Form(
        each=lambda function, in_axes=0, out_axes=0: function,
        sum=lambda sums: reducer.collective(sums, _AXIS),
        mix=_nothing if mixing is None else lambda p, active: mixing.collective(p, active, _AXIS),
        coordinate=_no_order
        if observer is None
        else lambda memory, evidence: observer.coordinate(memory, evidence, _AXIS),
    )


def array(reducer: reducers.Reduction, observer: ordering.Observer | None) -> Form:
    """On one device, leaves `[num_workers, ...]`."""
    of_one, mixing = collective(reducer, observer), reducer.mixing
    coordinate = of_one.coordinate
    if observer is not None:
        coordinate = _of_shared(observer.coordinate_array or _each_row(of_one.coordinate))
    mix = _nothing if mixing is None else mixing.array
    return Form(_each_row, reducer.array or _each_row(of_one.sum), mix, coordinate)


def _each_row(function: Callable, in_axes: Any = 0, out_axes: Any = 0) -> Callable:
    return jax.vmap(function, in_axes, out_axes, axis_name=_AXIS)


def _of_shared(coordinate: Callable) -> Callable:
    """The same where one row of the memory stands for all workers: so it does afterwards."""

    def of_rows(memory: types.PyTree, evidence: types.PyTree) -> tuple[types.PyTree, Any]:
        if not trees.is_shared_row(memory, evidence):
            return coordinate(memory, evidence)
        num_workers = len(jax.tree.leaves(evidence)[0])
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_workers, *x.shape[1:])), memory)
        rows, flips = coordinate(rows, evidence)
        return jax.tree.map(lambda x: x[:1], rows), flips

    return of_rows


def _nothing(params: types.PyTree, active: Any) -> types.PyTree:
    del active
    return params


def _no_order(memory: types.PyTree, evidence: types.PyTree) -> tuple[types.PyTree, tuple]:
    del evidence
    return memory, ()
