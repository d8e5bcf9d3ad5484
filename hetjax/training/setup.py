"""Builds the parts of a run by name: no loop, nothing is computed yet."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import config as config_lib
from hetjax import mesh as mesh_lib
from hetjax import ordering, quota, trees, types
from hetjax.cluster import beacons as beacons_lib
from hetjax.cluster import emulate, processes
from hetjax.data import feed as feed_lib
from hetjax.data import rounds as rounds_lib
from hetjax.data import sources
from hetjax.topology import reducers
from hetjax.training import (
    agreement,
    fused,
    gate,
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
from hetjax.training.local import Pace
from hetjax.training.virtual import Virtual


@dataclasses.dataclass
class RunParts:
    """Everything that a loop of rounds needs."""

    config: config_lib.ExperimentConfig
    mesh: Mesh | None  # None: all workers on one device
    devices: list[jax.Device]  # of each worker
    workers: list[int]  # those of this process
    rng: jax.Array
    stream: rounds_lib.Rounds
    policy: quota.QuotaPolicy
    cluster: emulate.EmulatedCluster | None
    emulated: bool  # the cluster's speeds are those of this run
    virtual_clock: bool
    trace: list[replay.TracedRound] | None
    feed: feed_lib.Feed
    local: local.LocalPhase
    begin: Callable  # (state, given=()) -> carried
    sync: sync.SyncFn
    method: ordering.Ordering
    second_pass: str  # why the method takes one more backward pass with this loss; '' = it does not
    new_pass: Callable | None
    loss_fn: losses_lib.LossFn
    per_example_rng: bool
    state: types.TrainState
    shares: jax.Array  # f[W]: each shard's share of the examples, on every device
    reducer: reducers.Reducer
    pace: Pace
    agree: agreement.Agreement
    solved: solutions.Solutions
    sums: shared_sums.Sums
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
    def lead_is_own(self) -> bool:
        """Whether what a process needs between two local phases, by real clocks, is its own."""
        observer = self.method.observer
        coordinates = observer is not None and observer.coordinated  # by collectives
        return self.sums.meet_before and not coordinates and not self.virtual_clock

    def active(self, round_index: int) -> Any:
        """What the sync phase of a round is told of the exchanges: bool[M], or ()."""
        mixing = self.reducer.mixing
        return () if mixing is None else mixing.gossip.active(round_index)

    def close(self) -> None:
        """Frees threads."""
        self.local.close()
        self.feed.close()


def build(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    config: config_lib.ExperimentConfig,
    per_example_rng: bool,
    rule: rules.LocalRule | None = None,
    beacons: beacons_lib.Beacons | None = None,
    solved: solutions.Solutions | None = None,
) -> RunParts:
    """Checks what only the data and the devices can tell, and makes the parts.

    `rule` is what a worker does with its microbatches; None adds up gradients.

    Raises:
        ValueError: more workers than devices, a loss that is not one number an example, a trace
            that does not fit, an order that needs gradients with a rule that computes something
            else, or data that cannot be read.
    """
    beacons = beacons or beacons_lib.Beacons()
    num_workers = config.cluster.num_workers
    mesh = None if config.local == "virtual" else mesh_lib.make_worker_mesh(num_workers)
    devices = [jax.devices()[0]] * num_workers if mesh is None else list(mesh.devices)
    workers = list(range(num_workers)) if mesh is None else mesh_lib.own_workers(mesh)
    alone = len(workers) == num_workers
    trace = replay.read_trace(config.replay, num_workers) if config.replay else None
    rng = jax.random.key(config.seed)
    first = sources.fetch(source, np.arange(config.microbatch_size) % len(source))
    keys = jax.random.split(rng, config.microbatch_size) if per_example_rng else rng
    losses_lib.check_loss(loss_fn, params, first, keys)

    options = ordering.Options(
        num_workers=num_workers,
        microbatch_size=config.microbatch_size,
        max_microbatches=_most_microbatches(config),
        block_pairs=config.ordering.block_pairs,
        freeze_after=config.ordering.freeze_after,
    )
    method, refusal = order.make(config.ordering.method, options, loss_fn, params, first, keys)
    if refusal and workers[0] == 0:
        print(order.dearer(config.ordering.method, refusal), file=sys.stderr)
    if method.reducers is not None and config.reducer.name not in method.reducers:
        raise ValueError(
            f"ordering.method: {config.ordering.method!r} does not work with reducer.name="
            f"{config.reducer.name!r}; it works with {', '.join(method.reducers)}"
        )
    stream = _make_stream(config, len(source), method)
    cluster = make_cluster(config)
    emulated = bool(config.cluster.secs_per_microbatch)
    virtual_clock = mesh is None or config.cluster.clock == "virtual"
    feed = feed_lib.FEEDS[config.data.feed](source, devices)
    nominal_examples = config.budget * config.microbatch_size
    rule = rule or gradients.gradient_sums(loss_fn, per_example_rng=per_example_rng)
    steps = rules.with_observer(rule, method.observer)
    _check_first(config)
    solved = solved or solutions.Solutions()
    reducer = _make_reducer(config, solved)
    gossips = reducer.mixing is not None
    has_parts = gossips or config.data.sharing == "private"  # else all examples are in one sum
    weighting = config.data.weighting if has_parts else "example"
    agree = agreement.Agreement(
        mesh,
        most_signs=0
        if method.observer is None
        else config.microbatch_size * _most_microbatches(config),
        microbatch_size=config.microbatch_size,
    )
    sums = shared_sums.Sums()
    sums_up = config.reducer.name == "all_reduce" and weighting == "example"
    if mesh is not None and agree.on_one_machine and sums_up:
        sums = shared_sums.make(mesh, rules.contribution_shapes(rule, params))
    pace = _make_pace(config, cluster if emulated else None, virtual_clock=virtual_clock)
    synchronise = sync.make_sync(
        optimizer,
        steps=steps,
        reducer=reducer,
        num_workers=num_workers,
        nominal_examples=nominal_examples,
        mesh=mesh,
        observer=method.observer,
        weighting=weighting,
        totals=sums.totals,
        stop_on_nonfinite=config.nonfinite == "stop",
    )
    return RunParts(
        config=config,
        mesh=mesh,
        devices=devices,
        workers=workers,
        rng=rng,
        stream=stream,
        policy=make_policy(config, math.ceil(len(source) / nominal_examples)),
        cluster=cluster,
        emulated=emulated,
        virtual_clock=virtual_clock,
        trace=trace,
        feed=feed,
        local=_make_local(
            config,
            steps,
            feed,
            mesh,
            replicas_equal=reducer.keeps_replicas_equal,
            observer=method.observer,
            beacons=beacons,
            pace=pace,
        ),
        begin=jax.jit(
            sync.make_begin(steps, mesh),
            out_shardings=None if mesh is None else mesh_lib.worker_sharding(mesh),
        ),
        sync=_jit_sync(synchronise, mesh, may_donate=not sums.meet_before, alone=alone),
        method=method,
        loss_fn=loss_fn,
        per_example_rng=per_example_rng,
        second_pass=refusal,
        new_pass=None
        if method.observer is None
        else jax.jit(
            sync.make_new_pass(method.observer),
            donate_argnums=(0, 1),
            out_shardings=None if mesh is None else mesh_lib.worker_sharding(mesh),
        ),
        state=state.make_train_state(
            params,
            optimizer,
            num_workers=num_workers,
            mesh=mesh,
            observer=method.observer,
            rule=rule,
        ),
        shares=_place_shares(stream.shares, mesh),
        reducer=reducer,
        pace=pace,
        agree=agree,
        solved=solved,
        sums=sums,
        beacons=beacons,
    )


def _jit_sync(
    synchronise: sync.SyncFn, mesh: Mesh | None, *, may_donate: bool, alone: bool
) -> sync.SyncFn:
    """Jitted; what the workers contributed is used up, unless all devices read it in one place."""
    options: dict[str, Any] = {}
    if mesh is not None and not alone:
        rows, whole = mesh_lib.worker_sharding(mesh), mesh_lib.everywhere(mesh)
        placed: Any = rows, rows, whole, whole, rows
        options["out_shardings"] = sync.Synchronised(*placed)
    if may_donate:
        return trees.jit_in_place(synchronise, 1, **options)
    return jax.jit(synchronise, **options)


def _place_shares(shares: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """On every device, as wide as JAX's numbers are; the sync phase takes the run's type."""
    shares = shares.astype(jax.numpy.result_type(float))
    if mesh is None:
        return jax.device_put(shares)
    whole = mesh_lib.everywhere(mesh)
    return jax.make_array_from_callback(shares.shape, whole, lambda index: shares[index])


def _make_reducer(
    config: config_lib.ExperimentConfig, solved: solutions.Solutions
) -> reducers.Reducer:
    options = reducers.Options(
        num_workers=config.cluster.num_workers,
        graph=config.reducer.graph,
        degree=config.reducer.degree,
        graph_seed=config.reducer.graph_seed,
        budget=config.reducer.budget,
        seed=config.seed,
        solve_once=solved,
    )
    return reducers.REDUCERS[config.reducer.name](options)


def _check_first(config: config_lib.ExperimentConfig) -> None:
    """`first` waits for a worker to finish its quota: which one, where a quota is 0?"""
    if config.gate.trigger != "first" or config.quota.policy != "static":
        return
    quotas = quota.largest_remainder(config.quota.proportions, config.budget)
    if (idle := np.flatnonzero(quotas == 0)).size:
        raise ValueError(
            f"gate.trigger: got 'first', but worker {idle[0]} has a quota of 0 of "
            f"budget={config.budget} by quota.proportions={config.quota.proportions}, and would "
            "be the first in every round. Give it a larger part, raise budget, leave it out of "
            "cluster.num_workers, or set gate.trigger='quorum'"
        )


def _make_gate(
    config: config_lib.ExperimentConfig, board: processes.Board | None = None
) -> gate.Gate:
    options = gate.Options(
        quorum=config.gate.quorum, deadline_secs=config.gate.deadline_secs, board=board
    )
    return gate.GATES[config.gate.trigger](options)


def _make_pace(
    config: config_lib.ExperimentConfig,
    cluster: emulate.EmulatedCluster | None,
    *,
    virtual_clock: bool,
) -> Pace:
    closes = virtual_clock and config.gate.trigger != "none"
    return Pace(
        cluster,
        virtual=virtual_clock,
        num_workers=config.cluster.num_workers,
        gate=_make_gate(config) if closes else None,
        drop=config.gate.in_flight == "drop",
    )


def _most_microbatches(config: config_lib.ExperimentConfig) -> int:
    """That one worker can be given in a round."""
    return min(config.quota.max_microbatches or config.budget, config.budget)


def _make_stream(
    config: config_lib.ExperimentConfig, num_examples: int, method: ordering.Ordering
) -> rounds_lib.Rounds:
    common: dict[str, Any] = {
        "microbatch_size": config.microbatch_size,
        "method": method,
        "seed": config.seed,
    }
    num_workers = config.cluster.num_workers
    if config.data.sharing == "shared":
        return rounds_lib.SharedRounds(num_examples, num_workers, **common)
    static = config.quota.policy == "static"
    proportions = config.quota.proportions if static else None
    return rounds_lib.PrivateRounds(num_examples, num_workers, proportions=proportions, **common)


def _make_local(
    config: config_lib.ExperimentConfig,
    steps: rules.LocalSteps,
    feed: feed_lib.Feed,
    mesh: Mesh | None,
    *,
    replicas_equal: bool,
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
            same_evidence=observer is not None and observer.coordinated,
            replicas_equal=replicas_equal,
        )
    if config.local == "fused":
        most = _most_microbatches(config)
        return fused.Fused(steps, feed, mesh, pace=pace, max_microbatches=most)
    asked = not config.replay and not pace.virtual
    alone = len(mesh_lib.own_workers(mesh)) == mesh.size
    board = None if alone else processes.Board()
    by_threads = _make_gate(config, board) if asked else gate.none(gate.Options())
    return local.Stepped(
        steps, feed, mesh, pace=pace, gate=by_threads, beacons=beacons, signed=signed
    )


def make_policy(config: config_lib.ExperimentConfig, rounds_per_epoch: int) -> quota.QuotaPolicy:
    """The configured quota policy, with those of its options that it has."""
    options: dict[str, dict[str, Any]] = {
        "static": {"proportions": config.quota.proportions},
        "proportional": {"period_rounds": config.quota.period_rounds or rounds_per_epoch},
        "dead_band": {"band": config.quota.band},
    }
    return quota.POLICIES[config.quota.policy](**options.get(config.quota.policy, {}))


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
        seed=config.seed,
    )
