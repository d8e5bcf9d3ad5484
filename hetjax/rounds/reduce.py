"""The first step of a synchronisation: what the workers contributed becomes what each updates from.

Contributions are summed, and divided once by the sum of their weights: never a mean of means. Where
weights depend on the parameters, the quotient is differentiated as a whole.

A step of the synchronisation is written once, for one worker and the axis of all workers. In its
collective form it runs inside `shard_map`; in the array form, all workers on one device, it is
`jax.vmap` of the same function over the same axis. Where that was measured to be slow, a part
brings a form of its own for arrays: the mixing of gossip, and the coordination of orders.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.losses import named as named_lib
from hetjax.losses import weighting as weighting_lib
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

    mix: Any
    """`(params, active) -> params`, a gossiping reducer's; None where none gossips."""

    coordinate: Callable[[types.PyTree, types.PyTree], tuple[types.PyTree, Any]]
    """`(memory, evidence) -> (memory, flips)`, the observer's; `flips` is () without one."""


def collective(reducer: reducers.Reduction, observer: ordering.Observer | None) -> Form:
    """Inside `shard_map` over `WORKER_AXIS`, leaves without worker axis."""
    mixing = reducer.mixing
    return Form(
        each=lambda function, in_axes=0, out_axes=0: function,
        sum=lambda sums: reducer.collective(sums, _AXIS),
        mix=None if mixing is None else lambda p, active: mixing.collective(p, active, _AXIS),
        coordinate=(lambda memory, evidence: (memory, ()))
        if observer is None
        else lambda memory, evidence: observer.coordinate(memory, evidence, _AXIS),
    )


def array(reducer: reducers.Reduction, observer: ordering.Observer | None) -> Form:
    """On one device, leaves `[num_workers, ...]`."""
    of_one, mixing = collective(reducer, observer), reducer.mixing
    coordinate = of_one.coordinate
    if observer is not None:
        coordinate = _of_shared(observer.coordinate_array or _each_row(of_one.coordinate))
    mix = None if mixing is None else mixing.array
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


class Reduced(NamedTuple):
    """What a worker updates from: `sums / weight`."""

    sums: types.PyTree
    weight: jax.Array  # f[]; 0 or less where there is nothing to update from
    own: types.PyTree = ()  # of this worker only; over the same weight
    state_change: types.PyTree = ()  # of the model's state, over all whose sums these are
    num_examples: Any = ()  # f[]: of these


class How(NamedTuple):
    """How a run reduces, and updates."""

    reducer: reducers.Reduction
    num_workers: int
    nominal_examples: int  # of a full round, the unit in which schedules count
    weighting: str = "example"  # one of `weighting.WEIGHTINGS`: what is minimised
    by_share: bool = False  # of a rule that weighs itself: its weights are times the shares
    totals: Any = None
    """`contributed -> sums` where the sums have met before: see `shared_sums`. In the collective
    form alone."""

    optimizer: Any = None
    """Any optax optimiser that updates from one gradient (not L-BFGS, which calls the loss again);
    clipping in its chain acts on the reduced gradient. Where it takes them it is given the round's
    mean loss as `value`, and `progress`. None: a round without update."""

    nonfinite: str = "stop"
    """What is left as it was where a microbatch was not finite: 'stop' the whole state, 'skip' the
    microbatch's part, 'skip_update' all but `values`."""

    ema: float = 0.0  # decay of the average of parameters and model's state; 0: there is none
    values: named_lib.Values = named_lib.NO_VALUES  # how what losses are given as such goes on
    rounds_an_epoch: float = 1.0  # nominal ones, the unit of their progress


def reduce(
    how: How,
    form: Form,
    contributed: types.Contribution,
    shares: jax.Array,
    metrics: types.SyncMetrics | tuple[()] = (),
) -> tuple[Reduced, types.SyncMetrics, jax.Array]:
    """The sums and the weight from which each worker updates, and the metrics of all workers.

    The third is bool[], whether no worker has anything to update from.

    `weighting.counting` says how the sums of each worker count, and what divides them: this is of
    the metrics, so the reducer is given sums alone. Where the weights depend on the parameters,
    each worker first takes the mean loss times the derivative of its weights off its sums.

    Args:
        how: the reducer and what is minimised.
        form: collective or array; leaves of all but `shares` and `metrics` are this form's.
        contributed: what the workers contributed.
        shares: f[W], each shard's share of the examples.
        metrics: of all workers, where the caller knows them.

    Raises:
        ValueError: the reducer made other shapes or types of the sums.
    """
    metrics = metrics or form.each(_metrics_of_all, (0,), None)(contributed)
    changed = functools.partial(_state_change, gossips=how.reducer.mixing is not None)
    each = form.each(changed, (0, None), (0, 0, None))(contributed, metrics)
    change, num_examples, metrics = each[0], each[1], metrics._replace(unlike=each[2])
    counting = weighting_lib.counting(
        how.weighting,
        metrics,
        shares,
        added_up=how.reducer.mixing is None,
        nominal=how.nominal_examples / how.num_workers,
        by_share=how.by_share,
    )
    if how.totals is not None:  # of all workers, which count alike in each
        sums, divisor = how.totals(contributed), counting.divisor[0]
        if counting.scale is not None:
            scale = counting.scale[0]
            sums = jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)
        reduced = Reduced(sums, divisor, contributed.own, change, num_examples)
        return reduced, metrics, ~(divisor > 0)

    def counted(contributed: types.Contribution) -> tuple[types.PyTree, types.PyTree, jax.Array]:
        """`(sums, own, divisor)`."""
        rank = jax.lax.axis_index(mesh_lib.WORKER_AXIS)
        sums, own = contributed.sums, contributed.own
        if jax.tree.leaves(contributed.weight_grads):
            mean, grads = counting.mean_loss[rank], contributed.weight_grads
            sums = jax.tree.map(lambda a, b: a - mean.astype(a.dtype) * b, sums, grads)
        if counting.scale is not None:
            scale = counting.scale[rank]
            sums, own = jax.tree.map(lambda x: x * scale.astype(x.dtype), (sums, own))
        return sums, own, counting.divisor[rank]

    with jax.named_scope("reduce"):
        sums, own, divisor = form.each(counted)(contributed)
        added_up = form.sum(sums)
        how.reducer.check(sums, added_up)
        reduced = Reduced(added_up, divisor, own, change, num_examples)
        return reduced, metrics, ~jnp.any(counting.divisor > 0)


def _state_change(
    contributed: types.Contribution, metrics: types.SyncMetrics, *, gossips: bool
) -> tuple[types.PyTree, Any, Any]:
    """`(changes of the model's state, number of examples)`, of all workers, or only of this one.

    They are never compressed, whatever the reducer does with gradients. Integers that all change
    alike are those of all workers, so that replicas keep them alike; the third says which do not.
    """
    change = contributed.state_change
    if not isinstance(change, types.StateChange):
        return (), (), {}
    count = contributed.tally.example_count if gossips else jnp.sum(metrics.example_count)
    if not gossips:
        change = jax.lax.psum(change, mesh_lib.WORKER_AXIS)
    elif change.alike:
        change = change._replace(alike=jax.lax.psum(change.alike, mesh_lib.WORKER_AXIS))
    unlike = {x: jnp.any((n[:-1] > 0) & (n[:-1] < n[-1])) for x, n in change.alike.items()}
    return change, count.astype(metrics.weight_sum.dtype), unlike


def _metrics_of_all(contributed: types.Contribution) -> types.SyncMetrics:
    """The metrics of all workers, alike on each, by one `psum` of one short vector.

    Counts travel as floating point, exact below 2**24.
    """
    axis = mesh_lib.WORKER_AXIS
    num_workers = jax.lax.axis_size(axis)
    dtype, tally = contributed.loss_sum.dtype, contributed.tally
    numbers = [
        contributed.loss_sum,
        contributed.weight,
        tally.example_count,
        tally.microbatches_done,
        tally.nonfinite_microbatch,
    ]
    numbers += contributed.counts
    is_mine = jnp.arange(num_workers, dtype=jnp.int32) == jax.lax.axis_index(axis)
    mine = jnp.stack([jnp.where(is_mine, number.astype(dtype), 0) for number in numbers])
    metrics, treedef = jax.tree.flatten(contributed.metric_sums)
    own = [contributed.loss_sum, contributed.weight, *(leaf.astype(dtype) for leaf in metrics)]
    total = jax.lax.psum(jnp.concatenate([jnp.stack(own), mine.reshape(-1)]), axis)
    losses, weights, *others = total[len(own) :].reshape(len(numbers), num_workers)
    examples, done, nonfinite = (count.astype(jnp.int32) for count in others[:3])
    return types.SyncMetrics(
        total[0],
        total[1],
        examples,
        done,
        nonfinite,
        losses,
        weights,
        jax.tree.unflatten(treedef, list(total[2 : len(own)])),
        counts=types.Counts(*others[3:]) if contributed.counts else (),
    )
