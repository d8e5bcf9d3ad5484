"""The local phase of all workers as one program: a `while_loop` whose trip count differs by worker.

Workers with small quotas leave their loop early and meet the others at the synchronisation.
No collective is inside the loop (it would hang as soon as quotas differ), and no shape depends
on a quota, so a change of quotas never compiles.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.data import feed as feed_lib
from hetjax.data import stream
from hetjax.liveness import blocking_waits
from hetjax.local import calls, clocks, jitted, rules, stepped


def _run_microbatches(
    steps: rules.LocalSteps,
    shared: types.Shared,
    carried: types.Carried,
    microbatches: types.Microbatch,
    count: jax.Array,
    rng: jax.Array,
) -> tuple[types.Contribution, Any]:
    """One worker's loop over the first `count` of `[M, B, ...]`, leaves without worker axis."""
    max_count = microbatches.example_ids.shape[0]
    first = trees.first_row(microbatches)
    _, sign_shapes = jax.eval_shape(steps.add, shared, carried, first, rng)
    all_signs = jax.tree.map(lambda s: jnp.zeros((max_count, *s.shape), s.dtype), sign_shapes)

    def body(carry: tuple) -> tuple:
        position, carried, all_signs = carry
        microbatch = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, position, keepdims=False), microbatches
        )
        carried, signs = steps.add(shared, carried, microbatch, rng)
        all_signs = jax.tree.map(
            lambda a, s: jax.lax.dynamic_update_index_in_dim(a, s, position, 0), all_signs, signs
        )
        return position + 1, carried, all_signs

    zero = jnp.zeros_like(count)
    carry = (zero, carried, jax.tree.map(lambda s: s + zero.astype(s.dtype), all_signs))
    _, carried, all_signs = jax.lax.while_loop(lambda c: c[0] < count, body, carry)
    return steps.finish(shared, carried), all_signs


def make_fused_local(steps: rules.LocalSteps, mesh: Mesh) -> Callable:
    """The local phase of all workers as one function without any collective.

    Returns:
        `(shared, carried, microbatches, counts, rngs) -> (contributed, example_signs)`; all leaves
        but those of `shared.given` and `shared.named.frozen` `[W, ...]`, those of `microbatches`
        `[W, M, B, ...]`, `counts` i32[W] ≤ M, `rngs` key[W].
    """

    def body(shared: types.Shared, *others: types.PyTree) -> tuple[types.Contribution, Any]:
        own = calls.without_row_axis(shared)
        return trees.add_row_axis(_run_microbatches(steps, own, *trees.first_row(others)))

    rows = P(mesh_lib.WORKER_AXIS)
    # Unchecked: users' scans mix constants with what varies by worker, and nothing here is
    # replicated that `grad` could sum over the workers.
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(types.Shared(rows, P(), rows, types.Named(P(), rows)), rows, rows, rows, rows),
        out_specs=(rows, rows),
        check_vma=False,
    )


class Fused:
    """The fused local phase in the training loop: one program for all workers, no gate.

    A worker's time is taken from when its part of the result is ready, so single microbatches
    cannot be told apart. Arguments as `stepped.Stepped`, and

    Args:
        max_microbatches: M, the largest quota of any worker in the run.
    """

    def __init__(
        self,
        steps: rules.LocalSteps,
        mesh: Mesh,
        *,
        clock: clocks.WorkerClock,
        max_microbatches: int,
    ) -> None:
        self._mesh, self._clock = mesh, clock
        self._workers = mesh_lib.own_workers(mesh)
        self._max_microbatches = max_microbatches
        self._run = jitted.InPlace(make_fused_local(steps, mesh), 1)
        self._threads = stepped.worker_threads(len(self._workers))

    def _load(self, plan: stream.Assignment, feed: feed_lib.Feed) -> types.Microbatch:
        """The plan's microbatches, padded to M for each worker, `[W, M, B, ...]` on the mesh."""
        shape = (1, self._max_microbatches, plan.example_ids.shape[-1])
        parts = []
        for worker in self._workers:
            rows = plan.microbatches(worker)
            example_ids = np.full(shape, stream.PADDING, np.int32)
            example_ids[0, : len(rows)] = rows
            parts.append(feed.load(worker, example_ids, plan.passes[worker]))
        return mesh_lib.join_rows(parts, self._mesh)

    def run(
        self,
        plan: stepped.LocalPlan,
        shared: types.Shared,
        carried: types.Carried,
        rngs: Sequence[jax.Array],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[types.Contribution, Callable[[], types.Work]]:
        round_index, assigned, limits, feed, _ = plan  # there is no gate
        microbatches = jax.block_until_ready(self._load(assigned, feed))
        with blocking_waits.Wait("synchronise"):
            jax.block_until_ready((shared, carried))
        start = time.perf_counter()
        contributed, signs = self._run.call(
            shared,
            carried,
            microbatches,
            mesh_lib.place(np.asarray(limits, np.int32), self._mesh),
            mesh_lib.join_rows([jnp.expand_dims(rng, 0) for rng in rngs], self._mesh),
        )
        meanwhile()
        parts = mesh_lib.worker_rows(contributed.loss_sum)
        counts = np.asarray(limits)[self._workers]
        wait = functools.partial(self._wait, round_index, start)
        times = list(self._threads.map(wait, self._workers, parts, counts))
        compute_secs, overruns = zip(*times, strict=True)
        example_signs = None
        if jax.tree.leaves(signs):  # cut on the host: on the device each quota would compile
            of_workers = mesh_lib.worker_rows(signs)
            example_signs = [np.asarray(s)[0, :n] for s, n in zip(of_workers, counts, strict=True)]
        work = types.Work(
            microbatches_done=counts,
            first_secs=np.full(len(counts), np.nan),
            compute_secs=np.asarray(compute_secs),
            overruns=np.asarray(overruns),
            example_signs=example_signs,
        )
        return contributed, lambda: work

    def _wait(
        self, round_index: int | None, start: float, worker: int, part: jax.Array, count: int
    ) -> tuple[float, int]:
        """Until a worker's part is ready and, emulated, until it would be: (seconds, overruns)."""
        jax.block_until_ready(part)
        if count == 0:
            return 0.0, 0
        if (ends := self._clock.ends(round_index, worker, int(count))) is None:
            return time.perf_counter() - start, 0
        if self._clock.virtual:
            return float(ends[-1]), 0
        late = time.perf_counter() - start - ends[-1]
        if late < 0:
            time.sleep(-late)
        return time.perf_counter() - start, count if late >= 0 else 0

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
