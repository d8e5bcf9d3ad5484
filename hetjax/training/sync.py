"""The sync phase: the reducer, the order's coordination, and the optimiser update.

One program a round, apart from the local phase, so that each worker's own compute can be timed
and a synchronisation that fails leaves the state as it was. Sums are reduced, and divided once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import flatten_util
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.ordering import ordering
from hetjax.topology import reducers
from hetjax.training import weighting as weighting_lib

SyncFn = Callable[..., tuple[types.TrainState, Any, types.SyncMetrics, Any]]


def _update_worker(
    state: types.TrainState,
    base: types.PyTree,
    sums: tuple[types.PyTree, jax.Array],
    running_sum: types.PyTree,
    *,
    rounds_done: jax.Array,
    mean_loss: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    alone: bool,
) -> types.TrainState:
    """One worker's optimiser update, leaves without worker axis.

    The update, computed at the worker's parameters, is added to `base`. A worker that updates
    alone and did nothing has no update, and its optimiser's state stays.
    """
    grad_sum, weight = sums
    scale = 1 / jnp.where(weight > 0, weight, 1)  # XLA computes a product twice, not a quotient
    grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grad_sum, state.params)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, value=mean_loss, progress=state.progress_rounds
    )
    params = optax.apply_updates(base, updates)
    if alone:
        params, opt_state = trees.select(weight > 0, (params, opt_state), (base, state.opt_state))
    return types.TrainState(params, opt_state, running_sum, state.progress_rounds + rounds_done)


def make_sync(
    optimizer: optax.GradientTransformation,
    *,
    reducer: reducers.Reduction,
    num_workers: int,
    nominal_examples: int,
    mesh: Mesh | None = None,
    signs: ordering.Signs | None = None,
    weighting: str = "example",
    stop_on_nonfinite: bool = True,
    totals: bool = False,
) -> SyncFn:
    """Builds the sync phase: the workers' sums become a new state.

    The optimiser sees `sum_j gradient_j / sum_j weight_j`, of the sums that `weighting.summands`
    makes of each worker's. With a reducer that gossips, worker j's optimiser sees
    `gradient_j / divisor_j` by `weighting.own_divisor`, so that the mean of the replicas descends
    the same objective, to first order in the step.

    Args:
        optimizer: any optax optimiser that updates from one gradient (not L-BFGS or SAM, which
            call the loss again); clipping in its chain acts on the reduced gradient. It is given
            the round's mean loss as `value`, and `progress`.
        reducer: what is done with the workers' sums.
        num_workers: W.
        nominal_examples: examples of a full round; the unit in which schedules count.
        mesh: the worker mesh for the collective form; None for the array form, on one device.
        signs: the ordering's device part, if it takes signs.
        weighting: one of `weighting.WEIGHTINGS`: what is minimised.
        stop_on_nonfinite: leave the state as it was where any microbatch was not finite.
        totals: every worker comes with the `grad_sum` of all of them, as one vector `[P]` of its
            leaves, and the reducer, which must be one that sums, is not asked; in the collective
            form alone, with `weighting='example'`.

    Returns:
        A pure function of (state, accumulated, shares, active, metrics=()), whose results are
        (state, fresh, metrics, turns). `accumulated` has leaves `[W, ...]`; `shares` is
        f32[W], each shard's share of the examples; `active` says which exchanges of a reducer
        that gossips are, bool[M], and is () for others;
        `metrics` are those of all workers, where the caller knows them; `fresh` are the sums
        before the first microbatch of the next round; `turns`, i8[W, ...], turn round the unit
        signs of each worker, () without an order's signs.
    """
    weighting_lib.check(weighting)
    axis, mixing = mesh_lib.WORKER_AXIS, reducer.mixing
    made_for = None if signs is None else signs.made_for
    if made_for is not None and made_for.num_workers != num_workers:
        raise ValueError(
            f"the ordering's signs are made for {made_for.num_workers} worker(s), and here are "
            f"{num_workers}: make them with Sizes(num_workers={num_workers}, …)"
        )
    if isinstance(optimizer, optax.MultiSteps):  # takes extra arguments without saying so
        update = optimizer.update
    else:
        update = optax.with_extra_args_support(optimizer).update
    optimizer = optax.GradientTransformationExtraArgs(optimizer.init, update)

    def reduced(
        accumulated: types.Accumulated,
        share: jax.Array,
        metrics: types.SyncMetrics,
        shares: jax.Array,
        reduce: Callable,
    ) -> tuple[types.PyTree, jax.Array]:
        if mixing is None:
            return reduce(weighting_lib.summands(weighting, accumulated, share))
        divisor = weighting_lib.own_divisor(
            weighting,
            accumulated,
            share,
            mean_weight=weighting_lib.mean_weight(weighting, metrics, shares),
            num_workers=num_workers,
            nominal_examples=nominal_examples,
        )
        return accumulated.grad_sum, divisor

    def update_worker(
        state: types.TrainState,
        base: types.PyTree,
        sums: tuple,
        running_sum: types.PyTree,
        metrics: types.SyncMetrics,
    ) -> types.TrainState:
        examples = jnp.sum(metrics.example_count).astype(state.progress_rounds.dtype)
        return _update_worker(
            state,
            base,
            sums,
            running_sum,
            rounds_done=examples / nominal_examples,
            mean_loss=metrics.loss_sum / jnp.where(metrics.weight_sum > 0, metrics.weight_sum, 1),
            optimizer=optimizer,
            alone=mixing is not None,
        )

    def unless_blocked(
        new: types.TrainState, old: types.TrainState, metrics: types.SyncMetrics
    ) -> types.TrainState:
        """A round of weight 0 leaves everything as it was, and so may one that is not finite."""
        nonfinite = jnp.any(metrics.nonfinite_microbatch >= 0)
        blocked = (metrics.weight_sum <= 0) | (nonfinite if stop_on_nonfinite else False)
        return trees.select(~blocked, new, old)

    def collective_body(
        state: types.TrainState,
        accumulated: types.Accumulated,
        shares: jax.Array,
        active: Any,
        metrics: types.SyncMetrics | tuple[()],
    ) -> tuple:
        state, accumulated = map(trees.first_row, (state, accumulated))
        shares = shares.astype(accumulated.weight_sum.dtype)
        if totals:
            _, unravel = flatten_util.ravel_pytree(trees.accumulator_zeros(state.params))
            accumulated = accumulated._replace(grad_sum=unravel(accumulated.grad_sum))
        with jax.named_scope("reduce"):
            metrics = metrics or _gathered_metrics(accumulated, num_workers)
            if totals:
                sums = accumulated.grad_sum, metrics.weight_sum
            else:
                share = shares[jax.lax.axis_index(axis)]
                sums = reduced(
                    accumulated, share, metrics, shares, lambda s: reducer.collective(s, axis)
                )
        running_sum, turns = state.running_sum, ()
        if signs is not None:
            with jax.named_scope("coordinate_order"):
                running_sum, turns = signs.sync(running_sum, accumulated.signed_sum, axis)

        def mix(params: types.PyTree) -> types.PyTree:
            with jax.named_scope("mix"):
                return params if mixing is None else mixing.collective(params, active, axis)

        first = mixing is not None and mixing.before_update
        with jax.named_scope("update"):
            base = mix(state.params) if first else state.params
            new = update_worker(state, base, sums, running_sum, metrics)
            if not first:
                new = new._replace(params=mix(new.params))
            state = unless_blocked(new, state, metrics)
        fresh = fresh_sums(accumulated, state.running_sum, signs)
        return (
            trees.add_row_axis(state),
            trees.add_row_axis(fresh),
            metrics,
            trees.add_row_axis(turns),
        )

    def array_body(
        state: types.TrainState,
        accumulated: types.Accumulated,
        shares: jax.Array,
        active: Any,
        metrics: types.SyncMetrics | tuple[()] = (),
    ) -> tuple:
        shares = shares.astype(accumulated.weight_sum.dtype)
        metrics = metrics or types.SyncMetrics(
            loss_sum=jnp.sum(accumulated.loss_sum),
            weight_sum=jnp.sum(accumulated.weight_sum),
            example_count=accumulated.example_count,
            microbatches_done=accumulated.microbatches_done,
            nonfinite_microbatch=accumulated.nonfinite_microbatch,
            worker_weights=accumulated.weight_sum,
        )
        sums = reduced(accumulated, shares, metrics, shares, reducer.array)
        running_sum, turns = state.running_sum, ()
        if signs is not None:
            running_sum, turns = signs.sync_array(running_sum, accumulated.signed_sum)

        def mix(params: types.PyTree) -> types.PyTree:
            return params if mixing is None else mixing.array(params, active)

        first = mixing is not None and mixing.before_update
        base = mix(state.params) if first else state.params
        new = jax.vmap(update_worker, in_axes=(0, 0, 0, 0, None))(
            state, base, sums, running_sum, metrics
        )
        if not first:
            new = new._replace(params=mix(new.params))
        state = unless_blocked(new, state, metrics)
        fresh = jax.vmap(functools.partial(fresh_sums, signs=signs))(accumulated, state.running_sum)
        return state, fresh, metrics, turns

    if mesh is None:
        return array_body
    rows, replicated = P(axis), P()
    on_mesh = jax.shard_map(
        collective_body,
        mesh=mesh,
        in_specs=(rows, rows, replicated, replicated, replicated),
        out_specs=(rows, rows, replicated, rows),
        check_vma=False,  # an optimiser's own `cond` may mix constants with what varies by worker
    )

    def synchronise(
        state: types.TrainState,
        accumulated: types.Accumulated,
        shares: jax.Array,
        active: Any,
        metrics: types.SyncMetrics | tuple[()] = (),
    ) -> tuple:
        return on_mesh(state, accumulated, shares, active, metrics)

    return synchronise


def make_new_pass(signs: ordering.Signs) -> Callable:
    """`(state, accumulated, begins) -> (state, accumulated)`: new passes of the order begin.

    Between two rounds, for the workers where `begins` bool[W] is true; leaves `[W, ...]`.
    """

    def renewed(begins: jax.Array, running_sum: types.PyTree) -> types.PyTree:
        return trees.select(begins, signs.new_pass(running_sum), running_sum)

    def new_pass(
        state: types.TrainState, accumulated: types.Accumulated, begins: jax.Array
    ) -> tuple[types.TrainState, types.Accumulated]:
        running_sum = jax.vmap(renewed)(begins, state.running_sum)
        signed_sum = jax.vmap(signs.begin_round)(running_sum)
        return (
            state._replace(running_sum=running_sum),
            accumulated._replace(signed_sum=signed_sum),
        )

    return new_pass


def _gathered_metrics(accumulated: types.Accumulated, num_workers: int) -> types.SyncMetrics:
    """The metrics of all workers, alike on each, by one `psum` of one short vector.

    Counts travel as floating point, exact below 2**24.
    """
    axis = mesh_lib.WORKER_AXIS
    dtype = accumulated.loss_sum.dtype
    numbers = [
        accumulated.weight_sum,
        accumulated.example_count,
        accumulated.microbatches_done,
        accumulated.nonfinite_microbatch,
    ]
    is_mine = jnp.arange(num_workers) == jax.lax.axis_index(axis)
    mine = jnp.stack([jnp.where(is_mine, number.astype(dtype), 0) for number in numbers])
    sums = jnp.stack([accumulated.loss_sum, accumulated.weight_sum])
    total = jax.lax.psum(jnp.concatenate([sums, mine.reshape(-1)]), axis)
    weights, *counts = total[2:].reshape(4, num_workers)
    of_workers = [*(count.astype(jnp.int32) for count in counts), weights]
    return types.SyncMetrics(total[0], total[1], *of_workers)


def fresh_sums(
    accumulated: types.Accumulated, running_sum: types.PyTree, signs: ordering.Signs | None
) -> types.Accumulated:
    """A worker's sums before the first microbatch of the next round; leaves without its axis."""
    zeros = jax.tree.map(jnp.zeros_like, accumulated._replace(signed_sum=()))
    return zeros._replace(
        signed_sum=() if signs is None else signs.begin_round(running_sum),
        nonfinite_microbatch=jnp.full_like(accumulated.nonfinite_microbatch, -1),
    )
