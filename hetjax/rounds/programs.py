"""What a kind of round runs on the workers: the local phase and the synchronisation of one rule.

Each kind has programs of its own, made of the parts that all kinds share.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import debugging, gates, kinds, ordering, starting, types
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.cluster import emulate
from hetjax.config import experiment as config_lib
from hetjax.data import feed as feed_lib
from hetjax.processes import beacons as beacons_lib
from hetjax.processes import board as board_lib
from hetjax.processes import meeting as meeting_lib
from hetjax.processes import shared_sums
from hetjax.rounds import calls, fused, jitted, local, rates, rules, sync, update
from hetjax.rounds.local import WorkerClock
from hetjax.rounds.virtual import Virtual
from hetjax.topology import reducers

MAIN = "main"  # the kind of round of the rule that every engine has; it may update


class Programs(NamedTuple):
    """What a kind of round runs: a local rule, and what follows from it."""

    rule: rules.LocalRule
    updates: bool  # the parameters, by what is added up
    local: local.LocalPhase
    begin: Callable  # (params, kept, given=()) -> carried
    sync: sync.SyncFn
    sums: shared_sums.Sums
    steps: rules.LocalSteps
    finishes_late: bool  # what the workers carry is finished in the synchronisation

    def compile_sync_ahead(
        self, before: Any, params: types.PyTree, carried: Any, *others: Any
    ) -> None:
        """Begins to compile the synchronisation, while `add` compiles.

        Where each worker has a device of this process; in other places it is compiled when called.

        Args:
            before: what the synchronisation takes first.
            params, carried: before the round, leaves `[W, ...]`.
            *others: what the synchronisation takes after what the workers contribute.
        """
        leaf = jax.tree.leaves(params)[0]
        if not isinstance(self.sync, jitted.InPlace) or len(leaf.devices()) < leaf.shape[0]:
            return
        if not leaf.is_fully_addressable:
            return
        if not self.finishes_late:
            carried = self.contribution_shapes(params, before.model_state, carried, others[-1])
        self.sync.compile_ahead(before, carried, *others)

    def contribution_shapes(
        self, params: types.PyTree, model_state: types.PyTree, carried: Any, given: types.PyTree
    ) -> types.PyTree:
        """Of what all workers contribute, as the synchronisation takes it; `[W, ...]`."""
        all_shared = types.Shared(params, model_state=model_state)
        shared, own = jax.tree.map(_one_row, (all_shared, carried))
        shared = shared._replace(given=given)
        contributed = jax.eval_shape(functools.partial(calls.finish, self.steps), shared, own)
        leaf = jax.tree.leaves(params)[0]
        all_rows = functools.partial(_all_rows, leaf.shape[0], leaf.sharding)
        return jax.tree.map(all_rows, contributed)


def _one_row(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)


def _all_rows(num_rows: int, sharding: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    shape = num_rows, *leaf.shape[1:]
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


class Workers(NamedTuple):
    """Where the workers are."""

    mesh: Mesh | None  # None: what they share lies on the first device
    devices: list[jax.Device]  # of each worker
    own: list[int]  # those of this process

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.own[0] == 0


def place_workers(config: config_lib.ExperimentConfig) -> Workers:
    num_workers = config.cluster.num_workers
    if config.local == "virtual":
        return Workers(None, [jax.devices()[0]] * num_workers, list(range(num_workers)))
    if platforms := config.cluster.platforms:
        devices = mesh_lib.devices_of(platforms, num_workers)
        return Workers(None, devices, list(range(num_workers)))
    mesh = mesh_lib.make_worker_mesh(num_workers)
    return Workers(mesh, list(mesh.devices), mesh_lib.own_workers(mesh))


def check(more_rules: Mapping[str, rules.LocalRule], observer: ordering.Observer | None) -> None:
    """Refuses kinds of rounds that an order or a checkpoint cannot have."""
    if MAIN in more_rules:
        raise ValueError(f"rules: {MAIN!r} is the name of the run's own rule; give it as rule=")
    if more_rules and observer is not None:
        raise ValueError(
            f"rules: {', '.join(more_rules)}: rounds of these kinds take examples from the order "
            "and find no signs for them, which this order needs of each example. Take an order "
            "without signs, such as ordering='random_reshuffling'"
        )
    for kind, rule in more_rules.items():
        rules.check(rule)
        if rule.keeps_worker:
            raise ValueError(
                f"rules: the rule of {kind!r} keeps something for each worker from round to round, "
                "which only the run's own rule may; give it as rule="
            )


class Common(NamedTuple):
    """What the programs of all kinds of rounds of a run are made of."""

    config: config_lib.ExperimentConfig
    chosen: kinds.Parts
    reducer: reducers.Reduction
    feed: feed_lib.Feed
    where: Workers
    meeting: meeting_lib.Meeting
    beacons: beacons_lib.Beacons
    clock: WorkerClock
    params: types.PyTree
    model_state: types.PyTree
    begins: starting.Starting

    def make(
        self,
        rule: rules.LocalRule,
        observer: ordering.Observer | None = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        one_pass: bool = True,
    ) -> Programs:
        """The programs of one kind; without an optimiser its rounds have no update. A round may be
        of several passes, of which the last is given what the others found."""
        steps = rules.with_observer(rule, observer, updates=optimizer is not None)
        mesh = self.where.mesh
        sums = _make_sums(self, rule)
        has_more = observer is not None or rule.keeps_worker or jax.tree.leaves(self.model_state)
        if self.meeting.shares_gpu and (has_more or not sums.meet_before):
            raise ValueError(self._refusal(rule))
        if mesh is None:  # as `mesh_lib.place`
            of_rows: Any = jax.sharding.SingleDeviceSharding(self.where.devices[0])
        else:
            of_rows = mesh_lib.worker_sharding(mesh)
        # The gathering and the sums of several processes take contributions as they are.
        packed = self.config.local == "stepped" and self.meeting.alone and not self.config.debug
        begin = sync.make_begin(steps, mesh, packed=packed)
        # In one program with the update, where nothing stands between them. Gossip has no sum over
        # the workers there, and XLA would round in another way.
        late = packed and mesh is not None and optimizer is not None and one_pass
        late = late and steps.moments is None and self.reducer.mixing is None
        return Programs(
            rule=rule,
            updates=optimizer is not None,
            local=_make_local(self, steps, signed=observer is not None, finishes=not late),
            begin=debugging.compiled(jax.jit(begin, out_shardings=of_rows)),
            sync=_make_sync(self, steps, observer, optimizer, sums, finishes=late),
            sums=sums,
            steps=steps,
            finishes_late=late,
        )

    def _refusal(self, rule: rules.LocalRule) -> str:
        """Of what processes that share a GPU cannot do together."""
        shapes = rules.contribution_shapes(rule, self.params, self.model_state)
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(shapes)})
        dtypes = dtypes or ["arrays whose shapes depend on what a round is given"]
        chosen, weighted = self.chosen, weighting(self.config, gossips=False)
        return meeting_lib.NO_COLLECTIVES + (
            "They can add up gradients in memory: with reducer='all_reduce', an order that looks "
            "at no gradients, such as 'random_reshuffling', data.weighting='example' where shards "
            "are private, a model without state (BatchNorm has some), a rule that keeps nothing of "
            "a worker, and sums of one type, float32 or float64, of 1 GiB at most over all of "
            f"them. This run has the reducer {parts_lib.named(chosen.reducer)}, the order "
            f"{parts_lib.named(chosen.ordering)}, examples weighted by {weighted}, sums in "
            f"{', '.join(dtypes)}, {len(jax.tree.leaves(self.model_state))} arrays of a model's "
            f"state, a rule that keeps {'something' if rule.keeps_worker else 'nothing'}. Or start "
            "one process, whose workers local='virtual' plays"
        )

    def make_unsigned(
        self,
        rule: rules.LocalRule,
        observer: ordering.Observer | None,
        optimizer: optax.GradientTransformation | None,
    ) -> Programs | None:
        """Those of passes of which the order needs no signs; None where it has no such passes."""
        if observer is None or self.chosen.ordering.balances is None:
            return None
        return self.make(rule, None, optimizer)


def memory_rows(config: config_lib.ExperimentConfig, observer: ordering.Observer | None) -> int:
    """Of the order's memory: on one device what is the same on all workers is kept once."""
    is_once = config.local == "virtual" and not config.debug
    is_once = is_once and observer is not None and observer.same_memory
    return 1 if is_once else config.cluster.num_workers


def nominal_examples(config: config_lib.ExperimentConfig) -> int:
    """Of a full round."""
    return config.budget * config.microbatch_size


def rounds_of(config: config_lib.ExperimentConfig, num_examples: int) -> int:
    """Full rounds of an epoch, rounded up."""
    return math.ceil(num_examples / nominal_examples(config))


def weighting(config: config_lib.ExperimentConfig, *, gossips: bool) -> str:
    """What is minimised; without shards and gossip all examples are in one sum."""
    has_parts = gossips or config.data.sharing == "private"
    return config.data.weighting if has_parts else "example"


def make_clock(
    config: config_lib.ExperimentConfig, gate: gates.Gate, cluster: emulate.EmulatedCluster | None
) -> WorkerClock:
    """The workers' clock; a gate whose two forms disagree has no place on any."""
    gates.check(gate, config.cluster.num_workers, config.budget)
    virtual = config.local == "virtual" or config.cluster.clock == "virtual"
    return WorkerClock(
        cluster,
        virtual=virtual,
        num_workers=config.cluster.num_workers,
        gate=gate if virtual and gate.closes else None,
        drop=config.gate.in_flight == "drop",
    )


def _make_sums(common: Common, rule: rules.LocalRule) -> shared_sums.Sums:
    """How the sums meet: before the sync program where they are one plain sum."""
    is_plain, meeting = common.chosen.reducer.is_plain_sum, common.meeting
    in_one_unit = rule.weight_grads is None and weighting(common.config, gossips=False) == "example"
    if is_plain and in_one_unit and not meeting.alone:
        shapes = rules.contribution_shapes(rule, common.params, common.model_state)
        return meeting.sums(shapes)
    return shared_sums.Sums()


def _make_sync(
    common: Common,
    steps: rules.LocalSteps,
    observer: ordering.Observer | None,
    optimizer: optax.GradientTransformation | None,
    sums: shared_sums.Sums,
    *,
    finishes: bool,
) -> sync.SyncFn:
    """Jitted; what the workers contributed is used up, unless all devices read it in one place."""
    config, reducer, where = common.config, common.reducer, common.where
    known = np.zeros(0)
    if optimizer is not None:
        known = rates.of_update(update.with_extra_arguments(optimizer), common.params)
    always = {"rates": mesh_lib.put_everywhere(known, where.mesh)} if known.size else {}
    synchronise = sync.make_sync(
        optimizer,
        steps=steps,
        reducer=reducer,
        num_workers=config.cluster.num_workers,
        nominal_examples=nominal_examples(config),
        mesh=where.mesh,
        observer=observer,
        weighting=weighting(config, gossips=reducer.mixing is not None),
        totals=sums.totals,
        finishes=finishes,
        stop_on_nonfinite=config.nonfinite == "stop",
        ema=config.ema,
        rates=known if always else None,
    )
    options: dict[str, Any] = {}
    if where.mesh is not None and len(where.own) < where.mesh.size:
        rows, whole = mesh_lib.worker_sharding(where.mesh), mesh_lib.everywhere(where.mesh)
        placed: Any = rows, rows, whole, whole, rows, rows, rows
        options["out_shardings"] = sync.Synchronised(*placed)
    if sums.meet_before:
        synchronise = functools.partial(jax.jit(synchronise, **options), **always)
        return debugging.compiled(synchronise)
    return jitted.InPlace(synchronise, 1, always=always, **options)


def _make_local(
    common: Common, steps: rules.LocalSteps, *, signed: bool, finishes: bool
) -> local.LocalPhase:
    config, chosen, feed, clock = common.config, common.chosen, common.feed, common.clock
    mesh, devices = common.where.mesh, common.where.devices
    if config.local == "virtual" and not config.debug:
        return Virtual(
            steps,
            feed,
            config.cluster.num_workers,
            clock=clock,
            signed=signed,
            same_evidence=chosen.ordering.coordinated,
            replicas_equal=chosen.reducer.keeps_replicas_equal,
        )
    if config.local == "fused" and mesh is not None and not config.debug:
        most = most_microbatches(config)
        return fused.Fused(steps, feed, mesh, clock=clock, max_microbatches=most)
    gate = None
    if chosen.gate.closes and not config.replay and not clock.virtual:
        alone = len(common.where.own) == len(devices)
        gate = gates.begin(chosen.gate, None if alone else board_lib.Board("gate"))
    return local.Stepped(
        steps,
        feed,
        mesh,
        devices=devices,
        workers=common.where.own,
        clock=clock,
        gate=gate,
        beacons=common.beacons,
        begins=common.begins,
        signed=signed,
        depth=config.dispatch_depth,
        finishes=finishes,
        eager=config.debug,
    )


def sizes(config: config_lib.ExperimentConfig) -> ordering.Sizes:
    """For which an order's observer is made."""
    most = most_microbatches(config)
    return ordering.Sizes(config.cluster.num_workers, config.microbatch_size, most)


def most_microbatches(config: config_lib.ExperimentConfig) -> int:
    """That one worker can be given in a round."""
    return min(config.quota.max_microbatches or config.budget, config.budget)
