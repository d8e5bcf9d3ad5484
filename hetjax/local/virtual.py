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

_EIGHTHS = 1, 2, 4, 6, 8  # of the workers: how many a call has


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
        self._sizes = sorted({-(-num_workers * k // 8) for k in _EIGHTHS})
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

        def add_some(
            shared: types.Shared,
            carried: types.Carried,
            rows: jax.Array,
            microbatches: types.Microbatch,
            active: jax.Array,
            rngs: jax.Array,
        ) -> tuple[types.Carried, Any]:
            """Of the workers `rows` alone; the others stay as they are."""
            take = functools.partial(jax.tree.map, lambda leaf: leaf[rows])
            own = common(shared)
            if not replicas_equal:
                named = own.named._replace(values=take(own.named.values))
                params, model_state = take((own.params, own.model_state))
                own = own._replace(params=params, model_state=model_state, named=named)
            add_all = jax.vmap(steps.add, in_axes=(shared_axes, 0, 0, 0, 0))
            after, signs = add_all(own, take(carried), microbatches, rngs, active)
            return jax.tree.map(lambda x, new: x.at[rows].set(new), carried, after), signs

        def finish(shared: types.Shared, carried: types.Carried) -> types.Contribution:
            return jax.vmap(steps.finish, in_axes=(shared_axes, 0))(common(shared), carried)

        self._add = executor.compiled(jax.jit(add, donate_argnums=(1,), static_argnames="is_first"))
        self._add_some = executor.compiled(jax.jit(add_some, donate_argnums=(1,)))
        self._finish = jitted.InPlace(finish, 1)

    def _rows(self, active: np.ndarray, least: int) -> np.ndarray:
        """The workers of a call: those that are active, and others up to one of a few numbers, so
        that quotas make no more programs than these."""
        size = next(size for size in self._sizes if size >= max(active.sum(), least))
        return np.argsort(~active, kind="stable")[:size].astype(np.int32)

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
        # A warm-up has a position for each program, so that it is compiled.
        sizes = self._sizes if round_index is None else []
        for position in range(int(limits.max()) + len(sizes)):
            active = position < limits
            shape = (self._num_workers, assigned.example_ids.shape[1])
            ids = np.full(shape, stream.PADDING, np.int32)
            ids[active] = assigned.example_ids[assigned.starts[:-1][active] + position]
            is_first = position == 0 and self._same_evidence
            least = sizes[position % len(sizes)] if sizes else 0
            rows = np.arange(self._num_workers) if is_first else self._rows(active, least)
            if len(rows) < self._num_workers:
                given = feed.load(0, ids[rows], assigned.passes[rows]), active[rows]
                keys = self._keys[1][rows]
                carried, example_signs = self._add_some(shared, carried, rows, *given, keys)
                signs.append((rows, example_signs))
                continue
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
                is_first=is_first,
            )
            signs.append((rows, example_signs))
        first_secs = np.full(self._num_workers, np.nan)
        compute_secs = np.zeros(self._num_workers)
        for worker in np.flatnonzero(limits).tolist():
            ends = self._clock.ends(round_index or 0, worker, int(limits[worker]))
            assert ends is not None  # the clock is virtual
            first_secs[worker], compute_secs[worker] = ends[0], ends[-1]
        example_signs = None
        if self._signed:
            # Not `jax.device_get`, which takes ten times as long for something so small.
            size = assigned.example_ids.shape[1]
            on_host = np.zeros((len(signs), self._num_workers, size), np.int8)
            for by_position, (rows, found) in zip(on_host, signs, strict=True):
                by_position[rows] = np.asarray(found)
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
