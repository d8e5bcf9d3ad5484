"""Builds what a run needs from its parts: no loop, nothing is computed yet."""

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
from hetjax import gates, kinds, ordering, quota, topology, trees, types
from hetjax import mesh as mesh_lib
from hetjax.cluster import beacons as beacons_lib
from hetjax.cluster import emulate, processes
from hetjax.data import feed as feed_lib
from hetjax.data import rounds as rounds_lib
from hetjax.data import sources
from hetjax.topology import reducers
from hetjax.training import accumulate as accumulate_lib
from hetjax.training import (
    agreement,
    fused,
    local,
    order,
    replay,
    shared_sums,
    solutions,
    state,
    sync,
)
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
    stream: rounds_lib.Stream
    policy: quota.QuotaPolicy
    cluster: emulate.EmulatedCluster | None
    emulated: bool  # the cluster's speeds are those of this run
    virtual_clock: bool
    trace: list[replay.TracedRound] | None
    feed: feed_lib.Feed
    local: local.LocalPhase
    sync: sync.SyncFn
    method: ordering.Ordering
    signs: ordering.Signs | None  # the method's part on the devices
    gate: gates.Gate
    second_pass: str  # why the method takes one more backward pass with this loss; '' = it does not
    new_pass: Callable | None
    loss_fn: accumulate_lib.LossFn
    per_example_rng: bool
    state: types.TrainState
    shares: jax.Array  # f[W]: each shard's share of the examples, on every device
    reducer: reducers.Reduction
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
        meets = not isinstance(self.sums, shared_sums.SharedSums)
        meets |= self.method.coordinated  # by collectives in the sync phase
        return not meets and not self.virtual_clock

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
        self.local.close()
        self.feed.close()


def build(
    loss_fn: accumulate_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    config: config_lib.ExperimentConfig,
    chosen: kinds.Parts | None = None,
    per_example_rng: bool,
    beacons: beacons_lib.Beacons | None = None,
    solved: solutions.Solutions | None = None,
) -> RunParts:
    """Checks what only the data and the devices can tell, and makes what the parts need of them.

    `chosen` are the parts; None: those that the configuration names.

    Raises:
        ValueError: more workers than devices, a loss that is not one number an example, a trace
            that does not fit, or data that cannot be read.
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
    accumulate_lib.check_loss(loss_fn, params, first, keys)

    chosen = kinds.of_config(config, {}) if chosen is None else chosen
    method = chosen.ordering
    sizes = ordering.Sizes(num_workers, config.microbatch_size, _most_microbatches(config))
    signs, refusal = order.make(method, sizes, loss_fn, params, first, keys)
    if refusal and workers[0] == 0:
        print(order.dearer(config.ordering.method, refusal), file=sys.stderr)
    stream = _make_stream(config, len(source), chosen)
    cluster = make_cluster(config)
    emulated = bool(config.cluster.secs_per_microbatch)
    virtual_clock = mesh is None or config.cluster.clock == "virtual"
    feed = feed_lib.FEEDS[config.data.feed](source, devices)
    nominal_examples = config.budget * config.microbatch_size
    accumulate = accumulate_lib.make_accumulate(
        loss_fn, signs=signs, per_example_rng=per_example_rng
    )
    solved = solved or solutions.Solutions()
    reducer = chosen.reducer.for_run(topology.Facts(num_workers, config.seed, solved))
    gossips = reducer.mixing is not None
    has_parts = gossips or config.data.sharing == "private"  # else all examples are in one sum
    weighting = config.data.weighting if has_parts else "example"
    agree = agreement.Agreement(
        mesh,
        most_signs=0 if signs is None else config.microbatch_size * sizes.max_microbatches,
        microbatch_size=config.microbatch_size,
    )
    sums = shared_sums.Sums()
    sums_up = chosen.reducer.is_plain_sum and weighting == "example"
    if mesh is not None and agree.on_one_machine and sums_up:
        sums = shared_sums.make(mesh, trees.accumulator_zeros(params))
    pace = Pace(
        cluster if emulated else None,
        virtual=virtual_clock,
        num_workers=num_workers,
        gate=chosen.gate if virtual_clock and chosen.gate.closes else None,
        drop=config.gate.in_flight == "drop",
    )
    totals = isinstance(sums, shared_sums.SharedSums)
    synchronise = sync.make_sync(
        optimizer,
        reducer=reducer,
        num_workers=num_workers,
        nominal_examples=nominal_examples,
        mesh=mesh,
        signs=signs,
        weighting=weighting,
        totals=totals,
        stop_on_nonfinite=config.nonfinite == "stop",
    )
    return RunParts(
        config=config,
        mesh=mesh,
        devices=devices,
        workers=workers,
        rng=rng,
        stream=stream,
        policy=_for_epochs(chosen.quota, math.ceil(len(source) / nominal_examples)),
        cluster=cluster,
        emulated=emulated,
        virtual_clock=virtual_clock,
        trace=trace,
        feed=feed,
        local=_make_local(
            config,
            accumulate,
            feed,
            mesh,
            replicas_equal=reducer.keeps_replicas_equal,
            beacons=beacons,
            gate=chosen.gate,
            params=params,
            pace=pace,
            signs=signs,
        ),
        sync=jax.jit(synchronise, donate_argnums=(1,))
        if alone or mesh is None
        else jax.jit(
            synchronise,
            donate_argnums=() if totals else (1,),  # all devices may read them in one place
            out_shardings=(*[mesh_lib.worker_sharding(mesh)] * 2, *[mesh_lib.everywhere(mesh)] * 2),
        ),
        method=method,
        signs=signs,
        gate=chosen.gate,
        loss_fn=loss_fn,
        per_example_rng=per_example_rng,
        second_pass=refusal,
        new_pass=None
        if signs is None
        else jax.jit(
            sync.make_new_pass(signs),
            donate_argnums=(0, 1),
            out_shardings=None if mesh is None else mesh_lib.worker_sharding(mesh),
        ),
        state=state.make_train_state(
            params, optimizer, num_workers=num_workers, mesh=mesh, signs=signs
        ),
        shares=_place_shares(stream.shares, mesh),
        reducer=reducer,
        pace=pace,
        agree=agree,
        solved=solved,
        sums=sums,
        beacons=beacons,
    )


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
    accumulate: accumulate_lib.AccumulateFn,
    feed: feed_lib.Feed,
    mesh: Mesh | None,
    *,
    replicas_equal: bool,
    beacons: beacons_lib.Beacons,
    gate: gates.Gate,
    **common: Any,
) -> local.LocalPhase:
    if mesh is None:
        num_workers = config.cluster.num_workers
        return Virtual(accumulate, feed, num_workers, replicas_equal=replicas_equal, **common)
    if config.local == "fused":
        most = _most_microbatches(config)
        return fused.Fused(accumulate, feed, mesh, max_microbatches=most, **common)
    asked = not config.replay and not common["pace"].virtual
    alone = len(mesh_lib.own_workers(mesh)) == mesh.size
    board = None if alone else processes.Board()
    by_threads = gates.begin(gate, board) if asked else gates.AlwaysOpen()
    return local.Stepped(accumulate, feed, mesh, gate=by_threads, beacons=beacons, **common)


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
