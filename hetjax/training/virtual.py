"""All workers of a round on one device, their times those of the emulated cluster."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.data import feed as feed_lib
from hetjax.data import rounds
from hetjax.training import accumulate as accumulate_lib
from hetjax.training import local


class Virtual:
    """All workers on one device, their k-th microbatches together: 64 workers on a laptop.

    It is also the oracle of the collective form. Times are the emulated cluster's.

    Args:
        accumulate: the pure function; jitted here, over an array axis of workers.
        feed: brings the examples.
        num_workers: W.
        params: a pytree of the parameters' shapes, for the sums.
        pace: the emulated clocks.
        signs: the ordering's device part.
        replicas_equal: all workers have the same parameters, which then are not multiplied.
    """

    def __init__(
        self,
        accumulate: accumulate_lib.AccumulateFn,
        feed: feed_lib.Feed,
        num_workers: int,
        *,
        params: types.PyTree,
        pace: local.Pace,
        signs: Any = None,
        replicas_equal: bool,
    ) -> None:
        self._feed, self._num_workers = feed, num_workers
        self._pace = pace
        self._empty = accumulate_lib.empty_accumulated(params, signs)
        self._signed = signs is not None
        self._keys: tuple[Any, jax.Array] | None = None

        def step(
            state: types.WorkerState,
            sums: types.Accumulated,
            microbatches: types.Microbatch,
            active: jax.Array,
            rngs: jax.Array,
            *,
            is_first: bool,
        ) -> tuple[types.Accumulated, Any]:
            state_axes, sum_axes = types.WorkerState(0, 0), jax.tree.map(lambda _: 0, sums)
            if replicas_equal:
                state = state._replace(params=trees.first_row(state.params))
                state_axes = state_axes._replace(params=None)
            given = sums
            if is_first and signs is not None and signs.coordinated:  # the same for all as yet
                given = sums._replace(signed_sum=trees.first_row(sums.signed_sum))
                sum_axes = sum_axes._replace(signed_sum=None)
            after, unit_signs = jax.vmap(accumulate, in_axes=(state_axes, sum_axes, 0, 0))(
                state, given, microbatches, rngs
            )
            # Others were given padding, which adds nothing, finite or not.
            done = sums.microbatches_done + active
            bad = jnp.where(active, after.nonfinite_microbatch, sums.nonfinite_microbatch)
            return after._replace(microbatches_done=done, nonfinite_microbatch=bad), unit_signs

        self._step = jax.jit(step, donate_argnums=(1,), static_argnames="is_first")

    def fresh(self) -> types.Accumulated:
        return jax.device_put(mesh_lib.add_worker_axis(self._empty, self._num_workers))

    def run(
        self,
        round_index: int | None,
        state: types.TrainState,
        accumulated: types.Accumulated,
        plan: rounds.RoundPlan,
        *,
        rngs: Sequence[jax.Array],
        limits: np.ndarray,
        may_close: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> local.LocalResult:
        del may_close  # `limits` are what the gate leaves done
        worker_state = types.WorkerState(state.params, state.running_sum)
        if self._keys is None or self._keys[0] is not rngs:
            self._keys = rngs, jnp.stack(rngs)
        signs: list[Any] = []
        meanwhile()
        warm_up = round_index is None  # a second position too, so that it is compiled
        for position in range(int(limits.max()) + warm_up):
            active = position < limits
            shape = (self._num_workers, plan.example_ids.shape[1])
            ids = np.full(shape, rounds.PADDING, np.int32)
            ids[active] = plan.example_ids[plan.starts[:-1][active] + position]
            accumulated, unit_signs = self._step(
                worker_state,
                accumulated,
                self._feed.load(0, ids),
                active,
                self._keys[1],
                is_first=position == 0,
            )
            signs.append(unit_signs)
        first_secs = np.full(self._num_workers, np.nan)
        compute_secs = np.zeros(self._num_workers)
        for worker in np.flatnonzero(limits).tolist():
            ends = self._pace.ends(round_index or 0, worker, int(limits[worker]))
            assert ends is not None  # the clock is virtual
            first_secs[worker], compute_secs[worker] = ends[0], ends[-1]
        unit_signs = None
        if self._signed:
            on_host = jax.device_get(signs)  # by position, each i8[W, B]
            of_worker = [[s[w] for s in on_host[:count]] for w, count in enumerate(limits)]
            unit_signs = local.stack_signs(of_worker, plan.example_ids.shape[1])
        return local.LocalResult(
            accumulated=accumulated,
            microbatches_done=np.asarray(limits),
            first_secs=first_secs,
            compute_secs=compute_secs,
            overruns=np.zeros(self._num_workers, np.int64),
            unit_signs=unit_signs,
        )

    def close(self) -> None:
        pass
