"""Builds what a run needs from its parts: no loop, nothing is computed yet."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import config as config_lib
from hetjax import gates, kinds, ordering, quota, topology, trees, types
from hetjax import mesh as mesh_lib
from hetjax.cluster import beacons as beacons_lib
from hetjax.cluster import emulate, processes
from hetjax.data import feed as feed_lib
from hetjax.data import rounds as rounds_lib
from hetjax.data import sources
from hetjax.topology import reducers
from hetjax.training import (
    agreement,
    fused,
    gradients,
    local,
    order,
    replay,
    rules,
    shared_sums,
    solutions,
    state,
    sync,
)
from hetjax.training import losses as losses_lib
from hetjax.training import meeting as meeting_lib
from hetjax.training.local import Pace
from hetjax.training.virtual import Virtual

MAIN = "main"  # the kind of round that updates, and that every run has


class Programs(NamedTuple):
    """What a kind of round runs: a local rule, and what follows from it."""

    rule: rules.LocalRule
    local: local.LocalPhase
    begin: Callable  # (state, given=()) -> carried
    sync: sync.SyncFn
    sums: shared_sums.Sums


@dataclasses.dataclass
class RunParts:
    """Everything that a loop of rounds needs."""

    config: config_lib.ExperimentConfig
    mesh: Mesh | None  # None: all workers on one device
    devices: list[jax.Device]  # of each worker
    workers: list[int]  # those of this process
    rng: jax.Array
    stream: rounds_lib.Stream
    policy: quota.QuotaPolicy
    cluster: emulate.EmulatedCluster | None
    emulated: bool  # the cluster's speeds are those of this run
    virtual_clock: bool
    trace: list[replay.TracedRound] | None
    feed: feed_lib.Feed
    programs: dict[str, Programs]  # of each kind of round
    method: ordering.Ordering
    observer: ordering.Observer | None  # the order's part on the devices
    gate: gates.Gate
    second_pass: str  # why the method takes one more backward pass with this loss; '' = it does not
    new_pass: Callable | None
    loss_fn: losses_lib.LossFn
    per_example_rng: bool
    state: types.TrainState
    shares: jax.Array  # f[W]: each shard's share of the examples, on every device
    reducer: reducers.Reduction
    pace: Pace
    meeting: meeting_lib.Meeting
    agree: agreement.Agreement
    solved: solutions.Solutions
    beacons: beacons_lib.Beacons

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.workers[0] == 0

    @property
    def own_device(self) -> jax.Device:
        """Of this process's first worker."""
        return self.devices[self.workers[0]]

    @property
    def main(self) -> Programs:
        """Of the kind of round that every run has."""
        return self.programs[MAIN]

    def lead_is_own(self, kind: str) -> bool:
        """Whether what a process needs between two local phases, by real clocks, is its own."""
        coordinates = self.method.coordinated  # by collectives in the sync phase
        meet_before = self.programs[kind].sums.meet_before
        return meet_before and not coordinates and not self.virtual_clock

    def active(self, round_index: int) -> Any:
        """What the sync phase of a round is told of the exchanges: bool[M], or ()."""
        mixing = self.reducer.mixing
        return () if mixing is None else mixing.gossip.active(round_index)

    @property
    def copy_bytes(self) -> int:
        """Of what one worker sends of its parameters."""
        of_worker = jax.tree.map(lambda x: x[0], self.state.params)
        if self.reducer.mixing is None:  # sums are sent, wider than some parameters
            of_worker = trees.accumulator_zeros(of_worker)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(of_worker))

    def close(self) -> None:
        """Frees threads."""
        for programs in self.programs.values():
            programs.local.close()
        self.feed.close()


class _Workers(NamedTuple):
    """Where the workers are."""

    mesh: Mesh | None  # None: all on one device
    devices: list[jax.Device]  # of each worker
    own: list[int]  # those of this process


def build(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    source: Any,
    *,
    config: config_lib.ExperimentConfig,
    chosen: kinds.Parts | None = None,
    per_example_rng: bool,
    rule: rules.LocalRule | None = None,
    more_rules: Mapping[str, rules.LocalRule] | None = None,
    beacons: beacons_lib.Beacons | None = None,
    solved: solutions.Solutions | None = None,
) -> RunParts:
    """Checks what only the data and the devices can tell, and makes what the parts need of them.

    `chosen` are the parts; None: those that the configuration names. `rule` is what a worker does
    with its microbatches; None adds up gradients. Without an optimiser rounds have no update.
    `more_rules` are those of further kinds of rounds, by name, which have none either.

    Raises:
        ValueError: more workers than devices, a loss that is not one number an example, a trace
            that does not fit, an order that needs gradients with a rule that computes something
            else, or data that cannot be read.
    """
    beacons, solved = beacons or beacons_lib.Beacons(), solved or solutions.Solutions()
    chosen = kinds.of_config(config, {}) if chosen is None else chosen
    num_workers = config.cluster.num_workers
    where = _place_workers(config)
    trace = replay.read_trace(config.replay, num_workers) if config.replay else None
    rng = jax.random.key(config.seed)
    first = sources.fetch(source, np.arange(config.microbatch_size) % len(source))
    keys = jax.random.split(rng, config.microbatch_size) if per_example_rng else rng
    losses_lib.check_loss(loss_fn, params, first, keys)
    sizes = ordering.Sizes(num_workers, config.microbatch_size, _most_microbatches(config))
    rule = rule or gradients.gradient_sums(loss_fn, per_example_rng=per_example_rng)
    observer, refusal = order.make(chosen.ordering, sizes, rule, loss_fn, params, first, keys)
    if refusal and where.own[0] == 0:
        print(order.dearer(config.ordering.method, refusal), file=sys.stderr)
    more_rules = more_rules or {}
    _check_kinds(more_rules, observer)
    reducer = chosen.reducer.for_run(topology.Facts(num_workers, config.seed, solved))
    stream = _make_stream(config, len(source), chosen)
    cluster, emulated = make_cluster(config), bool(config.cluster.secs_per_microbatch)
    feed = feed_lib.FEEDS[config.data.feed](source, where.devices)
    meeting = meeting_lib.make(where.mesh, num_workers)
    agree = agreement.Agreement(
        meeting,
        most_signs=0 if observer is None else config.microbatch_size * sizes.max_microbatches,
        microbatch_size=config.microbatch_size,
    )
    pace = _make_pace(config, chosen.gate, cluster if emulated else None)
    programs_of = functools.partial(
        _make_programs, config, chosen, reducer, feed, where, meeting, beacons, pace, params
    )
    programs = {MAIN: programs_of(rule, observer, optimizer)}
    programs |= {kind: programs_of(more, None, None) for kind, more in more_rules.items()}
    of_rows = None if where.mesh is None else mesh_lib.worker_sharding(where.mesh)
    return RunParts(
        config=config,
        mesh=where.mesh,
        devices=where.devices,
        workers=where.own,
        rng=rng,
        stream=stream,
        policy=_for_epochs(chosen.quota, math.ceil(len(source) / _nominal_examples(config))),
        cluster=cluster,
        emulated=emulated,
        virtual_clock=pace.virtual,
        trace=trace,
        feed=feed,
        programs=programs,
        method=chosen.ordering,
        observer=observer,
        gate=chosen.gate,
        loss_fn=loss_fn,
        per_example_rng=per_example_rng,
        second_pass=refusal,
        new_pass=None
        if observer is None
        else jax.jit(sync.make_new_pass(observer), donate_argnums=(0, 1), out_shardings=of_rows),
        state=state.make_train_state(
            params,
            optimizer,
            num_workers=num_workers,
            mesh=where.mesh,
            observer=observer,
            rule=rule,
        ),
        shares=_place_shares(stream.shares, where.mesh),
        reducer=reducer,
        pace=pace,
        meeting=meeting,
        agree=agree,
        solved=solved,
        beacons=beacons,
    )


def _check_kinds(
    more_rules: Mapping[str, rules.LocalRule], observer: ordering.Observer | None
) -> None:
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


def _make_programs(
    config: config_lib.ExperimentConfig,
    chosen: kinds.Parts,
    reducer: reducers.Reduction,
    feed: feed_lib.Feed,
    where: _Workers,
    meeting: meeting_lib.Meeting,
    beacons: beacons_lib.Beacons,
    pace: Pace,
    params: types.PyTree,
    rule: rules.LocalRule,
    observer: ordering.Observer | None,
    optimizer: optax.GradientTransformation | None,
) -> Programs:
    steps = rules.with_observer(rule, observer)
    sums = _make_sums(config, chosen.reducer, meeting, rule, params)
    of_rows = None if where.mesh is None else mesh_lib.worker_sharding(where.mesh)
    return Programs(
        rule=rule,
        local=_make_local(config, chosen, steps, feed, where.mesh, observer, beacons, pace),
        begin=jax.jit(sync.make_begin(steps, where.mesh), out_shardings=of_rows),
        sync=_make_sync(config, optimizer, steps, reducer, where, observer, sums),
        sums=sums,
    )


def _place_workers(config: config_lib.ExperimentConfig) -> _Workers:
    num_workers = config.cluster.num_workers
    if config.local == "virtual":
        return _Workers(None, [jax.devices()[0]] * num_workers, list(range(num_workers)))
    mesh = mesh_lib.make_worker_mesh(num_workers)
    return _Workers(mesh, list(mesh.devices), mesh_lib.own_workers(mesh))


def _nominal_examples(config: config_lib.ExperimentConfig) -> int:
    """Of a full round."""
    return config.budget * config.microbatch_size


def _weighting(config: config_lib.ExperimentConfig, *, gossips: bool) -> str:
    """What is minimised; without shards and gossip all examples are in one sum."""
    has_parts = gossips or config.data.sharing == "private"
    return config.data.weighting if has_parts else "example"


def _make_pace(
    config: config_lib.ExperimentConfig, gate: gates.Gate, cluster: emulate.EmulatedCluster | None
) -> Pace:
    virtual = config.local == "virtual" or config.cluster.clock == "virtual"
    return Pace(
        cluster,
        virtual=virtual,
        num_workers=config.cluster.num_workers,
        gate=gate if virtual and gate.closes else None,
        drop=config.gate.in_flight == "drop",
    )


def _make_sums(
    config: config_lib.ExperimentConfig,
    reducer: topology.Reducer,
    meeting: meeting_lib.Meeting,
    rule: rules.LocalRule,
    params: types.PyTree,
) -> shared_sums.Sums:
    """How the sums meet: before the sync program where they are one plain sum."""
    if reducer.is_plain_sum and _weighting(config, gossips=False) == "example":
        return meeting.sums(rules.contribution_shapes(rule, params))
    return shared_sums.Sums()


def _make_sync(
    config: config_lib.ExperimentConfig,
    optimizer: optax.GradientTransformation | None,
    steps: rules.LocalSteps,
    reducer: reducers.Reduction,
    where: _Workers,
    observer: ordering.Observer | None,
    sums: shared_sums.Sums,
) -> sync.SyncFn:
    """Jitted; what the workers contributed is used up, unless all devices read it in one place."""
    synchronise = sync.make_sync(
        optimizer,
        steps=steps,
        reducer=reducer,
        num_workers=config.cluster.num_workers,
        nominal_examples=_nominal_examples(config),
        mesh=where.mesh,
        observer=observer,
        weighting=_weighting(config, gossips=reducer.mixing is not None),
        totals=sums.totals,
        stop_on_nonfinite=config.nonfinite == "stop",
    )
    options: dict[str, Any] = {}
    if where.mesh is not None and len(where.own) < where.mesh.size:
        rows, whole = mesh_lib.worker_sharding(where.mesh), mesh_lib.everywhere(where.mesh)
        placed: Any = rows, rows, whole, whole, rows
        options["out_shardings"] = sync.Synchronised(*placed)
    if sums.meet_before:
        return jax.jit(synchronise, **options)
    return trees.jit_in_place(synchronise, 1, **options)


def _place_shares(shares: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """On every device, as wide as JAX's numbers are; the sync phase takes the run's type."""
    shares = shares.astype(jax.numpy.result_type(float))
    if mesh is None:
        return jax.device_put(shares)
    whole = mesh_lib.everywhere(mesh)
    return jax.make_array_from_callback(shares.shape, whole, lambda index: shares[index])


def _most_microbatches(config: config_lib.ExperimentConfig) -> int:
    """That one worker can be given in a round."""
    return min(config.quota.max_microbatches or config.budget, config.budget)


def _make_stream(
    config: config_lib.ExperimentConfig, num_examples: int, chosen: kinds.Parts
) -> rounds_lib.Stream:
    common: dict[str, Any] = {
        "microbatch_size": config.microbatch_size,
        "ordering": chosen.ordering,
        "seed": config.seed,
    }
    num_workers = config.cluster.num_workers
    if config.data.sharing == "shared":
        return rounds_lib.SharedStream(num_examples, num_workers, **common)
    proportions = chosen.quota.proportions
    return rounds_lib.PrivateStream(num_examples, num_workers, proportions=proportions, **common)


def _make_local(
    config: config_lib.ExperimentConfig,
    chosen: kinds.Parts,
    steps: rules.LocalSteps,
    feed: feed_lib.Feed,
    mesh: Mesh | None,
    observer: ordering.Observer | None,
    beacons: beacons_lib.Beacons,
    pace: Pace,
) -> local.LocalPhase:
    signed = observer is not None
    if mesh is None:
        return Virtual(
            steps,
            feed,
            config.cluster.num_workers,
            pace=pace,
            signed=signed,
            same_evidence=chosen.ordering.coordinated,
            replicas_equal=chosen.reducer.keeps_replicas_equal,
        )
    if config.local == "fused":
        most = _most_microbatches(config)
        return fused.Fused(steps, feed, mesh, pace=pace, max_microbatches=most)
    asked = not config.replay and not pace.virtual
    alone = len(mesh_lib.own_workers(mesh)) == mesh.size
    board = None if alone else processes.Board()
    by_threads = gates.begin(chosen.gate, board) if asked else gates.AlwaysOpen()
    return local.Stepped(
        steps, feed, mesh, pace=pace, gate=by_threads, beacons=beacons, signed=signed
    )


def _for_epochs(policy: quota.QuotaPolicy, rounds_per_epoch: int) -> quota.QuotaPolicy:
    """The policy of a run whose epochs have so many rounds."""
    return policy if policy.of_epochs is None else policy.of_epochs(rounds_per_epoch)


def make_cluster(config: config_lib.ExperimentConfig) -> emulate.EmulatedCluster | None:
    """The emulated speeds and who is present, if the configuration says either.

    Without speeds the cluster tells presence alone; its times are arbitrary.
    """
    cluster = config.cluster
    if not cluster.secs_per_microbatch and not cluster.changes:
        return None
    changes = tuple(emulate.Change(**dataclasses.asdict(c)) for c in cluster.changes)
    return emulate.EmulatedCluster(
        cluster.secs_per_microbatch or (1.0,) * cluster.num_workers,
        cluster.overhead_secs,
        delay=cluster.delay,
        delay_cv=cluster.delay_cv,
        delay_per=cluster.delay_per,
        changes=changes,
        seed=config.seed if cluster.seed < 0 else cluster.seed,
    )
