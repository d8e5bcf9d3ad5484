"""The sync phase: reduce, coordinate the order, update.

One program a round, apart from the local phase, so that each worker's own compute can be timed
and a synchronisation that fails leaves the state as it was.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import extra_arguments, parts, trees, types
from hetjax import mesh as mesh_lib
from hetjax.local import packing, rules
from hetjax.losses import weighting as weighting_lib
from hetjax.ordering import ordering
from hetjax.rounds import reduce as reduce_lib
from hetjax.rounds import update as update_lib

SyncFn = Callable[..., "Synchronised"]


class Synchronised(NamedTuple):
    """What a synchronisation leaves; leaves `[W, ...]` but for `metrics`."""

    state: types.TrainState | types.Kept  # `Kept` of a round without update
    carried: types.Carried | tuple[()]  # into the next round; () of a round without update
    metrics: types.SyncMetrics
    flips: Any  # i8[W, ...]: multiply the example signs of each worker; () without an observer
    mean: types.PyTree = ()  # the mean contribution of a round without update
    own: types.PyTree = ()  # of a round without update: what each worker kept of its sums
    step: types.UpdateSize | tuple[()] = ()  # of a round with an update


def make_sync(
    how: reduce_lib.How,
    steps: rules.LocalSteps,
    *,
    mesh: Mesh | None = None,
    observer: ordering.Observer | None = None,
    finishes: bool = False,
) -> SyncFn:
    """Builds the sync phase: what the workers contributed becomes a new state.

    Args:
        how: what the run does with the workers' sums.
        steps: the local rule, for what the workers begin the next round with.
        mesh: the worker mesh for the collective form; None for the array form, on one device.
        observer: the ordering's device part, if it needs evidence.
        finishes: it is given what the workers carry, and finishes it; in the collective form alone.

    Returns:
        A pure function `(state, contributed, shares, active, metrics=(), given=()) ->
        Synchronised`; `state` is a `TrainState`, or without an optimiser what workers have `Kept`;
        leaves of the first two are `[W, ...]`; `shares` is
        f32[W], each shard's share of the examples; `active` says which exchanges of a reducer
        that gossips are, bool[M], and is () for others; `metrics` are those of all workers,
        where the caller knows them; `given` are the values that this
        round and the next one hand out.
    """
    parts.choice(*weighting_lib.WEIGHTINGS).check("weighting", how.weighting)
    made_for = None if observer is None else observer.sizes
    if made_for is not None and made_for.num_workers != how.num_workers:
        raise ValueError(
            f"the ordering's observer is made for {made_for.num_workers} worker(s), and here are "
            f"{how.num_workers}"
        )
    if how.optimizer is not None:
        how = how._replace(optimizer=extra_arguments.with_extra_arguments(how.optimizer))

    def body(
        form: reduce_lib.Form,
        begin: Callable,
        state: Any,
        contributed: types.Contribution,
        shares: jax.Array,
        active: types.Exchanges,
        metrics: types.SyncMetrics | tuple[()],
        given: types.PyTree,
    ) -> Synchronised:
        reduced, metrics, is_empty = reduce_lib.reduce(how, form, contributed, shares, metrics)
        with jax.named_scope("coordinate_order"):
            memory, flips = form.coordinate(state.memory, contributed.evidence)
        kept = types.Kept(memory, contributed.worker)
        outcome = update_lib.Outcome(reduced, kept, metrics, is_empty, active)
        if how.optimizer is None:
            left, mean, own = update_lib.mean(how, form, state, outcome)
            return Synchronised(left, (), metrics, flips, mean, own)
        state, step = update_lib.update(how, form, state, outcome)
        carried = begin(state.params, state.kept, given)
        return Synchronised(state, carried, metrics, flips, step=step)

    form = (reduce_lib.array if mesh is None else reduce_lib.collective)(how.reducer, observer)
    if mesh is None:
        return functools.partial(body, form, _begin_rows(steps))
    of_one = functools.partial(body, form, _begin_row(steps))
    return _on_mesh(of_one, mesh, steps.finish if finishes else None)


def _on_mesh(body: SyncFn, mesh: Mesh, finish: Callable | None) -> SyncFn:
    """The collective form: the body on each device, for the one row that is there."""

    def synchronise(
        state: Any, contributed: Any, shares: Any, active: types.Exchanges, metrics: Any, given: Any
    ) -> Synchronised:
        own, opened = trees.first_row((state, packing.unpack(contributed)))
        if finish is not None:
            shared = types.shared(own.params, given, own)
            # Apart from the rest, so that XLA rounds as in a program of its own.
            opened = jax.lax.optimization_barrier(finish(shared, opened))
        done = body(own, opened, shares, active, metrics, given)
        of_rows = done.state, done.carried, done.flips, done.mean, done.own, done.step
        state, carried, flips, mean, own, step = trees.add_row_axis(of_rows)
        carried = packing.pack_like(contributed, carried)
        step = packing.pack_like(contributed, step)
        metrics = packing.pack_like(contributed, done.metrics, row_axes=0)
        return Synchronised(state, carried, metrics, flips, mean, own, step)

    rows, whole = P(mesh_lib.WORKER_AXIS), P()
    placed: Any = rows, rows, whole, rows, rows, rows, rows
    in_specs = rows, rows, whole, whole, whole, whole
    return _on_workers(synchronise, mesh, in_specs, Synchronised(*placed))


def _on_workers(body: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """The body for each worker's row `[1, ...]`; within a worker, JAX finds how it is computed."""
    if mesh.shape[mesh_lib.WORKER_AXIS] == 1 and len(mesh.axis_names) > 1:
        # XLA cannot add up over an axis of size 1, beside others (JAX 0.10.2).
        @functools.wraps(body)
        def of_one(*given: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                of_rows = jax.vmap(body, None, axis_size=1, axis_name=mesh_lib.WORKER_AXIS)
                return trees.first_row(of_rows(*given))

        return of_one
    return jax.shard_map(
        body,
        mesh=mesh,
        axis_names={mesh_lib.WORKER_AXIS},
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # an optimiser's own `cond` may mix constants with what varies by worker
    )


def _begin_row(steps: rules.LocalSteps) -> Callable:
    def begin(params: types.PyTree, kept: types.Kept, given: types.PyTree) -> types.Carried:
        shared = types.shared(params, given, kept)._replace(progress=kept.progress_rounds)
        return steps.begin(shared, kept.worker, kept.memory)

    return begin


def _begin_rows(steps: rules.LocalSteps) -> Callable:
    """The same on one device, leaves `[W, ...]`. Of a memory that all workers share, the evidence
    is one row, too."""
    begin = _begin_row(steps)

    def begin_all(params: types.PyTree, kept: types.Kept, given: types.PyTree) -> types.Carried:
        if not trees.is_shared_row(kept.memory, params):
            return jax.vmap(begin, (0, 0, None))(params, kept, given)
        kept = kept._replace(memory=trees.first_row(kept.memory))
        shared: Any = types.Carried(0, 0, None, 0)  # type: ignore[arg-type]
        each = jax.vmap(begin, (0, types.Kept(None, 0, 0, 0, 0), None), shared)
        begun = each(params, kept, given)
        return begun._replace(evidence=trees.add_row_axis(begun.evidence))

    return begin_all


def make_begin(steps: rules.LocalSteps, mesh: Mesh | None, *, packed: bool = False) -> Callable:
    """`(params, kept, given) -> carried`: what the workers begin with; leaves `[W, ...]`.

    For the first round, and wherever the state or what is given is not what the synchronisation
    before knew. `packed`: as `Packed`, as everything is from then on that is made of it.
    """
    if mesh is None:
        return _begin_rows(steps)
    begin = _begin_row(steps)

    def body(params: types.PyTree, kept: types.Kept, given: types.PyTree) -> types.PyTree:
        carried = trees.add_row_axis(begin(*trees.first_row((params, kept)), given))
        return packing.pack(carried) if packed else carried

    rows = P(mesh_lib.WORKER_AXIS)
    return _on_workers(body, mesh, (rows, rows, P()), rows)


def make_new_pass(observer: ordering.Observer) -> Callable:
    """`(memory, carried, begins) -> (memory, carried)`: new passes of the order begin.

    Between two rounds, for the workers where `begins` bool[W] is true; leaves `[W, ...]`. Workers
    that share their memory begin together.
    """

    def renewed(begins: jax.Array, memory: types.PyTree) -> types.PyTree:
        return trees.select(begins, observer.new_pass(memory), memory)

    def new_pass(
        memory: types.PyTree, carried: types.Carried, begins: jax.Array
    ) -> tuple[types.PyTree, types.Carried]:
        num_rows = len(jax.tree.leaves(memory)[0])
        memory = jax.vmap(renewed)(begins[:num_rows], memory)
        evidence = jax.vmap(observer.begin_round)(memory)
        renewed_carried = packing.unpack(carried)._replace(evidence=evidence)
        return memory, packing.pack_like(carried, renewed_carried)

    return new_pass
