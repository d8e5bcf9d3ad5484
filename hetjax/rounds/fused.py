"""A whole round as one pure function: a `while_loop` whose trip count differs by worker.

Workers with small quotas leave their loop early and meet the others at the synchronisation.
No collective is inside the loop (it would hang as soon as quotas differ), and no shape depends
on a quota, so a change of quotas never compiles.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import kinds, topology, trees, types
from hetjax import mesh as mesh_lib
from hetjax.data import feed as feed_lib
from hetjax.data import stream
from hetjax.ordering import ordering as ordering_lib
from hetjax.processes import waits
from hetjax.rounds import calls, gradients, inputs, jitted, local, rules, second_moments, sync
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import rule_identity as identity_lib

StepFn = Callable[..., tuple]


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
    _, sign_shapes = jax.eval_shape(
        steps.add, shared, carried, jax.tree.map(lambda x: x[0], microbatches), rng
    )
    all_signs = jax.tree.map(lambda s: jnp.zeros((max_count, *s.shape), s.dtype), sign_shapes)

    def body(carry: tuple) -> tuple:
        position, carried, all_signs = carry
        microbatch = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, position, keepdims=False), microbatches
        )
        carried, signs = steps.add(shared, carried, microbatch, rng)
        all_signs = jax.tree.map(
            lambda a, s: jax.lax.dynamic_update_index_in_dim(a, s, position, 0),
            all_signs,
            signs,
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
        but those of `shared.given` `[W, ...]`, those of `microbatches` `[W, M, B, ...]`, `counts`
        i32[W] ≤ M, `rngs` key[W].
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
        in_specs=(types.Shared(rows, P(), rows, rows), rows, rows, rows, rows),
        out_specs=(rows, rows),
        check_vma=False,
    )


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A round as one pure function, and what a loop needs beside it."""

    function: StepFn
    observer: ordering_lib.Observer | None
    """The order's part on the devices; None where it needs none."""
    active: Callable[[int], Any]
    """`round -> bool[M]`: the exchanges of that round, () of a reducer that does not gossip."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`function` of the same arguments."""
        return self.function(*args, **kwargs)


def make_train_step(
    loss_fn: losses_lib.LossFn,
    optimizer: optax.GradientTransformation | None,
    mesh: Mesh,
    *,
    nominal_examples: int,
    rule: rules.LocalRule | None = None,
    reducer: Any = "all_reduce",
    weighting: str = "example",
    stop_on_nonfinite: bool = True,
    ordering: Any = "random_reshuffling",
    microbatch_size: int = 0,
    max_microbatches: int = 0,
    per_example_rng: bool = False,
) -> "TrainStep":
    """A round as one pure function, for training loops of your own.

    Args:
        loss_fn: `(params, examples, rng) -> losses f32[B]`, `(losses, weights)`, or a
            `hetjax.Losses`, whose metrics are in the `metric_sums` of the metrics.
        optimizer: any optax optimiser; None for a round without update.
        mesh: from `make_worker_mesh`.
        nominal_examples: examples of a full round, the unit of `scale_by_progress`.
        rule: what a worker does with its microbatches; default
            `gradients.gradient_sums(loss_fn)`.
        reducer: a `hetjax.topology.Reducer`, a name, or a dict of fields.
        weighting: what is minimised, one of `hetjax.rounds.weighting.WEIGHTINGS`; all but
            `example` go by `shares`.
        stop_on_nonfinite: a round with a microbatch that is not finite changes nothing.
        ordering: a `hetjax.ordering.Ordering`, a name, or a dict of fields. Placing the examples is
            yours (its `place`), and so is beginning new passes (`sync.make_new_pass` of the
            step's `observer`, which `make_train_state` takes too).
        microbatch_size: B; needed where the ordering has a part on the devices.
        max_microbatches: M, the same.
        per_example_rng: a key for each example in place of one a microbatch.

    Returns:
        `step(state, microbatches, counts, rng, shares=None, active=(), given=()) -> (state,
        metrics, example_signs)`, to be jitted by you.

        Leaves of `microbatches` are `[W, M, B, ...]`. Worker w does the first `counts[w]` of them
        (i32[W], 0 ≤ counts ≤ M). `rng` is one key. `shares` f32[W] are those of each worker's shard
        (equal ones by default). `active` is `step.active(round)`, who exchanges with whom, needed
        with a reducer that gossips. The rule finds `given`, values of the round, in `shared.given`.
        `example_signs` are i8[W, M, B], as an order's `place` takes them, or (). A round without
        update returns `(state, metrics, example_signs, mean)`: `mean`, leaves `[W, ...]`, is the
        sum of the contributions over that of their weights, and the parameters stay.

        M bounds the quotas and memory; a change of `counts` never compiles.

    Raises:
        ValueError: the loss cannot be called with three arguments; the reducer or the ordering is
            none, or they contradict each other or the rule; or (when traced) the loss is not one
            number an example.

    References:
        Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
        environment", 2021, arXiv 2111.08272, for unequal work between two synchronisations.
    """
    inputs.check_loss_fn(loss_fn, caller="make_train_step")
    reducer_part, order = kinds.resolve("reducer", reducer), kinds.resolve("ordering", ordering)
    if lines := list(kinds.of_two(order, reducer_part)):
        raise ValueError("\n".join(lines))
    observer = _observer_of(order, mesh.size, microbatch_size, max_microbatches)
    reducer_part.tell_if_alone(mesh.size)
    reduction = reducer_part.for_run(topology.Facts(mesh.size))

    @functools.cache
    def programs(
        observer: ordering_lib.Observer | None, *traced: Any
    ) -> tuple[rules.LocalSteps, Callable, Callable, sync.SyncFn]:
        own = gradients.rule_of(
            rule, loss_fn, losses_lib.Traced(*traced), per_example_rng=per_example_rng
        )
        steps = rules.with_observer(own, observer, updates=optimizer is not None)
        synchronise = sync.make_sync(
            optimizer,
            steps=steps,
            reducer=reduction,
            num_workers=mesh.size,
            nominal_examples=nominal_examples,
            mesh=mesh,
            observer=observer,
            weighting=weighting,
            stop_on_nonfinite=stop_on_nonfinite,
        )
        return steps, make_fused_local(steps, mesh), sync.make_begin(steps, mesh), synchronise

    programs(observer)  # refuses what does not fit, before the loss is traced

    def step(
        state: types.TrainState,
        microbatches: types.Microbatch,
        counts: jax.Array,
        rng: jax.Array,
        shares: jax.Array | None = None,
        active: Any = (),
        given: types.PyTree = (),
    ) -> tuple:
        _check_active(active, gossips=reducer_part.gossips)
        of_run = loss_fn, rule, optimizer, observer
        traced = _check_step(*of_run, state, microbatches, rng, per_example_rng=per_example_rng)
        reads = second_moments.attach(observer, optimizer, _row_shapes(state.params))
        steps, run_local, begin, synchronise = programs(reads, *traced)
        moments = steps.moments(state.opt_state) if steps.moments else ()
        shared = types.Shared(state.params, given, moments, state.model_state)
        rngs = jnp.broadcast_to(rng, (mesh.size, *rng.shape))
        shares = jnp.full(mesh.size, 1 / mesh.size) if shares is None else shares
        contributed, example_signs = run_local(
            shared, begin(state.params, state.kept, given), microbatches, counts, rngs
        )
        before = state.kept if optimizer is None else state
        done = synchronise(before, contributed, shares, active, (), given)
        told = _told(done.metrics, rule), _turned(example_signs, done.flips)
        if optimizer is None:
            return state._replace(**done.state._asdict()), *told, done.mean
        return done.state, *told

    def active(round_index: int) -> Any:
        mixing = reduction.mixing
        return () if mixing is None else mixing.gossip.active(round_index)

    return TrainStep(step, observer, active)


def _row_shapes(rows: types.PyTree) -> types.PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


def _check_active(active: Any, *, gossips: bool) -> None:
    if gossips and isinstance(active, tuple):
        raise ValueError(
            "this step's reducer gossips: give active=step.active(round), which says who "
            "exchanges with whom in this round"
        )


def _turned(example_signs: Any, flips: Any) -> Any:
    """Signs i8[W, M, B], of each worker by its `flips`, i8[W] or i8[W, M * B]; () as they are."""
    if isinstance(flips, tuple):
        return example_signs
    num_workers, count, size = example_signs.shape
    flips = flips.reshape(num_workers, *((-1, size) if flips.ndim == 2 else (1, 1)))
    return example_signs * flips[:, :count]


def _observer_of(
    order: ordering_lib.Ordering, num_workers: int, microbatch_size: int, max_microbatches: int
) -> ordering_lib.Observer | None:
    if order.make_observer is None:
        return None
    if not (microbatch_size and max_microbatches):
        raise ValueError(
            f"make_train_step: the ordering {kinds.name_of('ordering', order)!r} has a part on "
            "the devices; give microbatch_size and max_microbatches too, B and M of the "
            "microbatches [W, M, B]"
        )
    return order.observer(ordering_lib.Sizes(num_workers, microbatch_size, max_microbatches))


def _told(metrics: types.SyncMetrics, rule: rules.LocalRule | None) -> types.SyncMetrics:
    """The metrics as a caller gets them: without a loss where the rule adds up none."""
    if rule is None or rule.loss_sum is not None:
        return metrics
    return metrics._replace(loss_sum=jnp.full_like(metrics.loss_sum, jnp.nan))


def _check_step(
    loss_fn: losses_lib.LossFn,
    rule: rules.LocalRule | None,
    optimizer: optax.GradientTransformation | None,
    observer: ordering_lib.Observer | None,
    state: types.TrainState,
    microbatches: types.Microbatch,
    rng: jax.Array,
    *,
    per_example_rng: bool,
) -> losses_lib.Traced:
    """Refuses a loss that a round cannot use, a rule of another one, other sizes than observed."""
    params = jax.tree.map(lambda x: x[0], state.params)
    one = jax.tree.map(lambda x: x[0, 0], microbatches.examples)
    batch_size = microbatches.example_ids.shape[-1]
    keys = jax.random.split(rng, batch_size) if per_example_rng else rng
    traced = losses_lib.check_loss(loss_fn, params, one, keys)
    identity_lib.check(rule, loss_fn, params, one, optimizer, per_example_rng=per_example_rng)
    made_for = None if observer is None else observer.sizes
    sizes = microbatches.example_ids.shape[:0:-1]
    if made_for is not None and sizes != (made_for.microbatch_size, made_for.max_microbatches):
        raise ValueError(
            f"the ordering's observer is made for {made_for}, and microbatches here are "
            f"[W, M, B] = {list(microbatches.example_ids.shape)}: give make_train_step "
            "max_microbatches=M and microbatch_size=B"
        )
    return traced


class Fused:
    """The fused local phase in the training loop: one program for all workers, no gate.

    A worker's time is taken from when its part of the result is ready, so single microbatches
    cannot be told apart. Arguments as `local.Stepped`, and

    Args:
        max_microbatches: M, the largest quota of any worker in the run.
    """

    def __init__(
        self,
        steps: rules.LocalSteps,
        feed: feed_lib.Feed,
        mesh: Mesh,
        *,
        clock: local.WorkerClock,
        max_microbatches: int,
    ) -> None:
        self._feed, self._mesh, self._clock = feed, mesh, clock
        self._workers = mesh_lib.own_workers(mesh)
        self._max_microbatches = max_microbatches
        self._run = jitted.InPlace(make_fused_local(steps, mesh), 1)
        self._threads = local.worker_threads(len(self._workers))

    def _load(self, plan: stream.Assignment) -> types.Microbatch:
        """The plan's microbatches, padded to M for each worker, `[W, M, B, ...]` on the mesh."""
        shape = (1, self._max_microbatches, plan.example_ids.shape[-1])
        parts = []
        for worker in self._workers:
            rows = plan.microbatches(worker)
            example_ids = np.full(shape, stream.PADDING, np.int32)
            example_ids[0, : len(rows)] = rows
            parts.append(self._feed.load(worker, example_ids, plan.passes[worker]))
        return mesh_lib.join_rows(parts, self._mesh)

    def run(
        self,
        round_index: int | None,
        shared: types.Shared,
        carried: types.Carried,
        plan: stream.Assignment,
        *,
        rngs: Sequence[jax.Array],
        limits: np.ndarray,
        may_close: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[types.Contribution, local.Work]:
        del may_close  # there is no gate
        microbatches = jax.block_until_ready(self._load(plan))
        with waits.Wait("synchronise"):
            jax.block_until_ready((shared, carried))
        start = time.perf_counter()
        contributed, signs = self._run(
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
        return contributed, local.Work(
            microbatches_done=counts,
            first_secs=np.full(len(counts), np.nan),
            compute_secs=np.asarray(compute_secs),
            overruns=np.asarray(overruns),
            example_signs=example_signs,
        )

    def _wait(
        self, round_index: int | None, start: float, worker: int, part: jax.Array, count: int
    ) -> tuple[float, int]:
        """Until a worker's part is ready and, emulated, until it would be: (seconds, overruns)."""
        jax.block_until_ready(part)
        if count == 0:
            return 0.0, 0
        ends = self._clock.ends(round_index, worker, int(count))
        if ends is None:
            return time.perf_counter() - start, 0
        if self._clock.virtual:
            return float(ends[-1]), 0
        late = time.perf_counter() - start - ends[-1]
        if late < 0:
            time.sleep(-late)
        return time.perf_counter() - start, count if late >= 0 else 0

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
