"""A whole round as one pure function, for a loop of your own: the fused local phase and sync."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from hetjax import topology, types
from hetjax.config import kinds
from hetjax.inputs import refusals as inputs
from hetjax.inputs import rule_identity as identity_lib
from hetjax.local import fused, gradients, rules
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.ordering import ordering as ordering_lib
from hetjax.rounds import reduce, sync

_NAME = "make_train_step"


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A round as one pure function, and what a loop needs beside it."""

    function: Callable[..., tuple]
    observer: ordering_lib.Observer | None
    """The order's part on the devices; None where it needs none."""
    active: Callable[[int], Any]
    """`round -> bool[M]`: the exchanges of that round, () of a reducer that does not gossip."""
    frozen: types.PyTree = ()
    """What the function takes as `frozen`, on the host or one device."""

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
    frozen: types.PyTree | None = None,
    values: Any = None,
    examples_per_epoch: int = 0,
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
        weighting: what is minimised, one of `hetjax.losses.weighting.WEIGHTINGS`; all but
            `example` go by `shares`.
        stop_on_nonfinite: a round with a microbatch that is not finite changes nothing.
        ordering: a `hetjax.ordering.Ordering`, a name, or a dict of fields. Placing the examples is
            yours (its `place`), and so is beginning new passes (`sync.make_new_pass` of the
            step's `observer`, which `make_train_state` takes too).
        microbatch_size: B; needed where the ordering has a part on the devices.
        max_microbatches: M, the same.
        per_example_rng: a key for each example in place of one a microbatch.
        frozen, values: as for `fit`. Give `values` to `make_train_state`, too, as they begin.
        examples_per_epoch: the unit of the progress of `values`; 0: `nominal_examples`.

    Returns:
        `step(state, microbatches, counts, rng, shares=None, active=(), given=(), frozen=None) ->
        (state, metrics, example_signs)`, to be jitted by you. `frozen` is `step.frozen`, given as
        an argument, so that it is no constant of the program.

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
    loss_fn, is_own = named_lib.giving(loss_fn, 3), rule is not None
    beside = named_lib.beside(loss_fn, frozen, values, caller=_NAME, is_own=is_own)
    inputs.check_loss_fn(loss_fn, caller=_NAME)
    reducer_part, order = kinds.resolve("reducer", reducer), kinds.resolve("ordering", ordering)
    if lines := list(kinds.of_two(order, reducer_part)):
        raise ValueError("\n".join(lines))
    if len(mesh.axis_names) > 1:
        raise ValueError(f"mesh: got {dict(mesh.shape)}; {_NAME} has workers of one device each")
    observer = _observer_of(order, mesh.size, microbatch_size, max_microbatches)
    reducer_part.tell_if_alone(mesh.size)
    reduction = reducer_part.for_run(topology.RunFacts(mesh.size))

    @functools.cache
    def programs(*traced: Any) -> tuple[Callable, Callable, sync.SyncFn]:
        found = losses_lib.Traced(*traced)
        own = gradients.rule_of(rule, loss_fn, found, per_example_rng=per_example_rng)
        steps = rules.with_observer(own, observer, updates=optimizer is not None)
        how = reduce.How(
            reduction,
            mesh.size,
            nominal_examples,
            weighting,
            optimizer=optimizer,
            nonfinite="stop" if stop_on_nonfinite else "skip",
            values=beside.values,
            rounds_an_epoch=(examples_per_epoch or nominal_examples) / nominal_examples,
        )
        synchronise = sync.make_sync(how, steps, mesh=mesh, observer=observer)
        return fused.make_fused_local(steps, mesh), sync.make_begin(steps, mesh), synchronise

    programs()  # refuses what does not fit, before the loss is traced

    def step(
        state: types.TrainState,
        microbatches: types.Microbatch,
        counts: jax.Array,
        rng: jax.Array,
        shares: jax.Array | None = None,
        active: types.Exchanges = (),
        given: types.PyTree = (),
        frozen: types.PyTree | None = None,
    ) -> tuple:
        if reducer_part.gossips and isinstance(active, tuple):
            raise ValueError("active: missing, must be step.active(round) with this reducer")
        of_run = loss_fn, rule, optimizer, observer, state, microbatches, rng
        with named_lib.scope(beside.named):
            traced = _check_step(*of_run, per_example_rng=per_example_rng)
        run_local, begin, synchronise = programs(*traced)
        frozen = beside.frozen if frozen is None else frozen
        rngs = jnp.broadcast_to(rng, (mesh.size, *rng.shape))
        shares = jnp.full(mesh.size, 1 / mesh.size) if shares is None else shares
        own = state.params, state.kept
        begun = types.shared(own[0], given, own[1], frozen), begin(*own, given)
        contributed, example_signs = run_local(*begun, microbatches, counts, rngs)
        before = state.kept if optimizer is None else state
        done = synchronise(before, contributed, shares, active, (), given)
        told = _metrics(done, rule), _turned(example_signs, done.flips)
        if optimizer is None:
            return state._replace(**done.state._asdict()), *told, done.mean
        return done.state, *told

    return TrainStep(step, observer, reduction.active, beside.frozen)


def _metrics(done: sync.Synchronised, rule: rules.LocalRule | None) -> types.SyncMetrics:
    """Of a round; the loss of a rule that adds up none is NaN."""
    if rule is None or rule.reads.loss_sum is not None:
        return done.metrics
    return done.metrics._replace(loss_sum=jnp.full_like(done.metrics.loss_sum, jnp.nan))


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
    if order.make_observer is not None and not (microbatch_size and max_microbatches):
        raise ValueError(
            "make_train_step: microbatch_size and max_microbatches are needed by the ordering "
            f"{kinds.name_of('ordering', order)!r}"
        )
    return order.observer(ordering_lib.Sizes(num_workers, microbatch_size, max_microbatches))


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
    keys = jax.random.split(rng, microbatches.example_ids.shape[-1]) if per_example_rng else rng
    traced = losses_lib.check_loss(loss_fn, params, one, keys)
    identity_lib.check(rule, loss_fn, params, one, optimizer, per_example_rng=per_example_rng)
    made_for = None if observer is None else observer.sizes
    sizes = microbatches.example_ids.shape[:0:-1]
    if made_for is not None and sizes != (made_for.microbatch_size, made_for.max_microbatches):
        raise ValueError(
            f"microbatches: got [W, M, B] = {list(microbatches.example_ids.shape)}, but the "
            f"ordering's observer is made for {made_for}"
        )
    return traced
