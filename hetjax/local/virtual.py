"""All workers of a round on one device, their times those of the emulated cluster."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import executor, trees, types
from hetjax.data import stream
from hetjax.local import calls, clocks, jitted, rules, stepped


class Virtual:
    """All workers on one device, their k-th microbatches together: 64 workers on a laptop.

    It is also the oracle of the collective form. Times are the emulated cluster's.

    Args:
        steps: the local rule; jitted here, over an array axis of workers.
        num_workers: W.
        clock: the emulated clocks.
        signed: whether the order takes signs.
        same_evidence: all workers begin a round with the same evidence, which then is not
            multiplied; it may be one row.
        replicas_equal: all workers have the same parameters and model's state, likewise.
    """

    def __init__(
        self,
        steps: rules.LocalSteps,
        num_workers: int,
        *,
        clock: clocks.WorkerClock,
        signed: bool = False,
        same_evidence: bool = False,
        replicas_equal: bool,
    ) -> None:
        self._num_workers, self._clock, self._signed = num_workers, clock, signed
        self._same_evidence = same_evidence
        self._keys: tuple[Any, jax.Array] | None = None
        own = None if replicas_equal else 0
        shared_axes: Any = types.Shared(own, None, own, types.Named(None, own))

        def common(shared: types.Shared) -> types.Shared:
            return calls.without_row_axis(shared) if replicas_equal else shared

        def add(
            shared: types.Shared,
            carried: types.Carried,
            begun: types.PyTree,
            microbatches: types.Microbatch,
            active: jax.Array,
            rngs: jax.Array,
            *,
            is_first: bool,
        ) -> tuple[types.Carried, Any]:
            axes = jax.tree.map(lambda _: 0, carried)
            if is_first and same_evidence:
                evidence = trees.first_row(begun[0] if begun else carried.evidence)
                carried = carried._replace(evidence=evidence)
                axes = axes._replace(evidence=None)
            add_all = jax.vmap(steps.add, in_axes=(shared_axes, axes, 0, 0, 0))
            return add_all(common(shared), carried, microbatches, rngs, active)

        def finish(shared: types.Shared, carried: types.Carried) -> types.Contribution:
            return jax.vmap(steps.finish, in_axes=(shared_axes, 0))(common(shared), carried)

        self._add = executor.compiled(jax.jit(add, donate_argnums=(1,), static_argnames="is_first"))
        self._finish = jitted.InPlace(finish, 1)

    def run(
        self,
        plan: stepped.LocalPlan,
        shared: types.Shared,
        carried: types.Carried,
        rngs: Sequence[jax.Array],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[types.Contribution, Callable[[], types.Work]]:
        round_index, assigned, limits, feed, _ = plan  # `limits` are what the gate leaves done
        if self._keys is None or self._keys[0] is not rngs:
            self._keys = rngs, jnp.stack(rngs)
        signs: list[Any] = []
        meanwhile()
        # A second position too, where that is another program, so that it is compiled.
        warm_up = round_index is None and self._same_evidence
        for position in range(int(limits.max()) + warm_up):
            active = position < limits
            shape = (self._num_workers, assigned.example_ids.shape[1])
            ids = np.full(shape, stream.PADDING, np.int32)
            ids[active] = assigned.example_ids[assigned.starts[:-1][active] + position]
            begun: types.PyTree = ()
            if self._signed and trees.is_shared_row(carried.evidence, carried.tally):
                begun, carried = (carried.evidence,), carried._replace(evidence=())
            carried, example_signs = self._add(
                shared,
                carried,
                begun,
                feed.load(0, ids, assigned.passes),
                active,
                self._keys[1],
                is_first=position == 0 and self._same_evidence,
            )
            signs.append(example_signs)
        first_secs = np.full(self._num_workers, np.nan)
        compute_secs = np.zeros(self._num_workers)
        for worker in np.flatnonzero(limits).tolist():
            ends = self._clock.ends(round_index or 0, worker, int(limits[worker]))
            assert ends is not None  # the clock is virtual
            first_secs[worker], compute_secs[worker] = ends[0], ends[-1]
        example_signs = None
        if self._signed:
            # Not `jax.device_get`, which takes ten times as long for something so small.
            on_host = np.array([np.asarray(s) for s in signs], np.int8)  # by position
            on_host = on_host.reshape(-1, self._num_workers, assigned.example_ids.shape[1])
            example_signs = [on_host[:count, w] for w, count in enumerate(limits)]
        # Where no worker has added to it.
        if self._signed and trees.is_shared_row(carried.evidence, carried.tally):
            spread = functools.partial(jnp.repeat, repeats=self._num_workers, axis=0)
            carried = carried._replace(evidence=jax.tree.map(spread, carried.evidence))
        work = types.Work(
            microbatches_done=np.asarray(limits),
            first_secs=first_secs,
            compute_secs=compute_secs,
            overruns=np.zeros(self._num_workers, np.int64),
            example_signs=example_signs,
        )
        return self._finish.call(shared, carried), lambda: work

    def close(self) -> None:
        pass
