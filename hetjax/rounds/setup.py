"""Builds what a run needs from its parts: no loop, nothing is computed yet."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import (
    debugging,
    gates,
    kinds,
    messages,
    ordering,
    quota,
    starting,
    stateful,
    topology,
    trees,
    types,
)
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.checkpoints import leaves
from hetjax.cluster import emulate
from hetjax.config import experiment as config_lib
from hetjax.data import feed as feed_lib
from hetjax.data import sources
from hetjax.data import stream as stream_lib
from hetjax.processes import beacons as beacons_lib
from hetjax.processes import meeting as meeting_lib
from hetjax.processes import solutions
from hetjax.quota import asking
from hetjax.rounds import (
    embeddings,
    feeding,
    gathering,
    gradients,
    order,
    replay,
    rule_identity,
    rules,
    second_moments,
    state,
    sync,
)
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import programs as programs_lib
from hetjax.rounds.local import WorkerClock
from hetjax.topology import reducers


@dataclasses.dataclass
class RunParts:
    """Everything that a loop of rounds needs."""

    config: config_lib.ExperimentConfig
    mesh: Mesh | None  # None: what workers share lies on the first device
    devices: list[jax.Device]  # of each worker
    workers: list[int]  # those of this process
    rng: jax.Array
    stream: stream_lib.Stream
    policy: quota.QuotaPolicy
    cluster: emulate.EmulatedCluster | None
    emulated: bool  # the cluster's speeds are those of this run
    trace: list[replay.TracedRound] | None
    feed: feed_lib.Feed
    programs: dict[str, programs_lib.Programs]  # of each kind of round
    unsigned: programs_lib.Programs | None  # of the main kind, in passes that need no signs
    embedding: embeddings.Embedding | None  # before the main kind, where the loss is over a round
    method: ordering.Ordering
    observer: ordering.Observer | None  # the order's part on the devices
    gate: gates.Gate
    second_pass: str  # why the method takes one more backward pass with this loss; '' = it does not
    loss_fn: losses_lib.LossFn
    per_example_rng: bool
    state: types.TrainState
    shares: jax.Array  # f[W]: each shard's share of the examples, on every device
    optimizer: optax.GradientTransformation | None
    reducer: reducers.Reduction
    clock: WorkerClock
    meeting: meeting_lib.Meeting
    gather: gathering.Gathering | None  # None: there is one process
    solved: solutions.Solutions
    beacons: beacons_lib.Beacons
    notes: tuple[str, ...]  # of the source, for the report

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.workers[0] == 0

    @property
    def own_device(self) -> jax.Device:
        """Of this process's first worker."""
        return self.devices[self.workers[0]]

    @property
    def is_stateful(self) -> bool:
        """Whether the model keeps state beside its parameters."""
        return isinstance(self.loss_fn, stateful.StatefulLoss)

    @functools.cached_property
    def new_pass(self) -> Callable | None:
        """Jitted; None where the order observes nothing."""
        if self.observer is None:
            return None
        of_rows = None if self.mesh is None else mesh_lib.worker_sharding(self.mesh)
        made = sync.make_new_pass(self.observer)
        jitted = jax.jit(made, donate_argnums=(0, 1), out_shardings=of_rows)
        return debugging.compiled(jitted)

    @property
    def kept_rows(self) -> dict[str, int]:
        """How many rows have the parts of the state that workers may have each for itself."""
        memory_rows = programs_lib.memory_rows(self.config, self.observer)
        return {"memory": memory_rows, "worker": len(self.devices)}

    @property
    def virtual_clock(self) -> bool:
        return self.clock.virtual

    @property
    def main(self) -> programs_lib.Programs:
        """Of the kind of round that every engine has."""
        return self.programs[programs_lib.MAIN]

    def check_kind(self, kind: str) -> None:
        """Refuses a kind of round that this run has not."""
        if kind not in self.programs:
            raise ValueError(
                f"Run.round: kind is {kind!r}; this run has {', '.join(self.programs)}. Give more "
                "as Run(..., rules={name: rule})"
            )

    @property
    def host_is_own(self) -> bool:
        """Whether what a process needs between two local phases is its own, by real clocks, where
        the sums have met before the synchronisation."""
        waits = self.method.coordinated or self.meeting.across  # by collectives
        return not waits and not self.virtual_clock

    @functools.cached_property
    def policy_name(self) -> str:
        """Of its quota policy, where a message begins."""
        return f"quota: the policy {parts_lib.named(self.policy)}: "

    @functools.cached_property
    def policy_form(self) -> leaves.Signature | None:
        """Of the state of a user's policy, as its `init` makes it; None of one of hetjax's own."""
        if parts_lib.is_ours(self.policy):
            return None
        return leaves.signature(self.policy.init(len(self.devices), self.config.budget))

    @functools.cached_property
    def read_moments(self) -> second_moments.Reader | None:
        """`opt_state -> second moments`; None where the optimiser keeps none."""
        params = self.state.params
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        try:
            return second_moments.reader(self.optimizer, row)
        except ValueError:
            return None

    @functools.cached_property
    def copy_bytes(self) -> int:
        """Of what one worker sends of its parameters, and of embeddings; asked for every round."""
        params = self.state.params
        if self.reducer.mixing is None:  # sums are sent, wider than some parameters
            params = jax.eval_shape(trees.accumulator_zeros, params)
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
        return sum(sizes) // len(self.devices) + embeddings.num_bytes(self.embedding)

    def close(self) -> None:
        """Frees threads."""
        first = self.embedding and self.embedding.programs
        for programs in filter(None, (*self.programs.values(), self.unsigned, first)):
            programs.local.close()
        self.feed.close()


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
    more_rules: Mapping[str, rules.LocalRule] = MappingProxyType({}),
    beacons: beacons_lib.Beacons | None = None,
    solved: solutions.Solutions | None = None,
    begins: starting.Starting | None = None,
    meeting: meeting_lib.Meeting | None = None,
) -> RunParts:
    """Checks what only the data and the devices can tell, and makes what the parts need of them.

    `chosen` are the parts; None: those that the configuration names. `rule` is what a worker does
    with its microbatches; None adds up gradients. Without an optimiser rounds have no update.
    `more_rules` are those of further kinds of rounds, by name, which have none either. `begins` is
    told of what takes long. `meeting` is another run's, where they are of the same processes.

    Raises:
        ValueError: more workers than devices, a loss that is not one number an example, a trace
            that does not fit, an order that needs gradients with a rule that computes something
            else, or data that cannot be read.
    """
    beacons, solved = beacons or beacons_lib.Beacons(), solved or solutions.Solutions()
    begins, chosen = begins or starting.Starting(), chosen or kinds.of_config(config, {})
    num_workers, where = config.cluster.num_workers, programs_lib.place_workers(config)
    trace = replay.read_trace(config.replay, num_workers) if config.replay else None
    feeding.check(config, source, chosen)
    first, keys = first_examples(config, source, per_example_rng=per_example_rng)
    model_state = _state_of(loss_fn, chosen.reducer)
    with debugging.eager(config.debug):
        traced = losses_lib.check_loss(loss_fn, params, first, keys)
        like = loss_fn, params, first
        passes, rule = embeddings.passes_of(*like, keys, config, chosen, rule)
        rule_identity.check(rule, *like, optimizer, per_example_rng=per_example_rng)
        rule = gradients.rule_of(rule, loss_fn, traced, per_example_rng=per_example_rng)
        so: Any = {"leads": where.leads, "changes_state": traced.changes_state}
        observer, refusal = order.make(config, chosen.ordering, rule, *like, keys, optimizer, **so)
    programs_lib.check(more_rules, observer)
    reducer = chosen.reducer.for_run(topology.Facts(num_workers, config.seed, solved))
    last = _last_of_pass(config, loss_fn, changes_state=traced.changes_state)
    stream = feeding.make_stream(config, source, chosen, last=last, leads=where.leads)
    cluster, emulated = make_cluster(config), bool(config.cluster.secs_per_microbatch)
    feed = feeding.make_feed(config, source, where, progress=begins.shown)
    meeting = meeting or _meet(where, chosen.reducer)
    gather = _make_gathering(meeting, config, observer, [rule, *more_rules.values()])
    clock = programs_lib.make_clock(config, chosen.gate, cluster if emulated else None)
    common = programs_lib.Common(
        config, chosen, reducer, feed, where, meeting, beacons, clock, params, model_state, begins
    )
    programs = {programs_lib.MAIN: common.make(rule, observer, optimizer, one_pass=not passes)}
    programs |= {kind: common.make(more) for kind, more in more_rules.items()}
    of_state: Any = {"observer": observer, "rule": rule, "model_state": model_state}
    of_state |= {"num_workers": num_workers, "averages": config.ema > 0}
    of_state["memory_rows"] = programs_lib.memory_rows(config, observer)
    return RunParts(
        config=config,
        mesh=where.mesh,
        devices=where.devices,
        workers=where.own,
        rng=jax.random.key(config.seed),
        stream=stream,
        policy=asking.of_epochs(chosen.quota, programs_lib.rounds_of(config, len(source))),
        cluster=cluster,
        emulated=emulated,
        trace=trace,
        feed=feed,
        programs=programs,
        unsigned=common.make_unsigned(rule, observer, optimizer),
        embedding=embeddings.Embedding.of(passes, common),
        method=chosen.ordering,
        observer=observer,
        gate=chosen.gate,
        loss_fn=loss_fn,
        per_example_rng=per_example_rng,
        second_pass=refusal,
        state=state.make_train_state(params, optimizer, **of_state, mesh=where.mesh),
        shares=mesh_lib.put_everywhere(stream.shares, where.mesh),
        optimizer=optimizer,
        reducer=reducer,
        clock=clock,
        meeting=meeting,
        gather=gather,
        solved=solved,
        beacons=beacons,
        notes=tuple(getattr(source, "notes", ())),
    )


def _meet(where: programs_lib.Workers, reducer: topology.Reducer) -> meeting_lib.Meeting:
    """How the processes meet; says which devices are idle, and that one worker gossips alone."""
    num_workers, num_devices = len(where.devices), jax.device_count()
    if where.mesh is not None and jax.default_backend() == "cpu" and num_workers < num_devices:
        messages.say(
            f"{num_workers} worker(s) on {num_devices} CPU devices: the others are idle, and make "
            f"rounds slower. Call hetjax.use_cpu_workers({num_workers}) before JAX is first used"
        )
    reducer.tell_if_alone(num_workers)
    return meeting_lib.make(where.mesh, num_workers)


def _last_of_pass(
    config: config_lib.ExperimentConfig, loss_fn: losses_lib.LossFn, *, changes_state: bool
) -> str:
    """What becomes of a pass's last microbatch that is not full.

    Raises:
        ValueError: padding would be part of what the model's state is made of.
    """
    is_told = isinstance(loss_fn, stateful.StatefulLoss) and loss_fn.takes_mask
    if config.data.last == "auto":
        return "fill" if changes_state and not is_told else "pad"
    if config.data.last == "pad" and changes_state and not is_told:
        raise ValueError(
            "data.last: got 'pad', and the model's state would be made of padding, too. Take "
            "'fill' or 'drop', or a loss with a fifth argument mask f32[B] (of nnx_loss and "
            "linen_loss a third one), for the statistics to leave padding out"
        )
    return config.data.last


def _state_of(loss_fn: losses_lib.LossFn, reducer: topology.Reducer) -> types.PyTree:
    """The model's, before the first round; () where it keeps none.

    Raises:
        ValueError: it has sums, and the reducer gossips.
    """
    if not isinstance(loss_fn, stateful.StatefulLoss):
        return ()
    if reducer.gossips and stateful.SUM in loss_fn.modes:
        raise ValueError(
            "state_reduce: 'sum' with a reducer that gossips: each worker would add up its own "
            "count, and mixing takes means. Take reducer='all_reduce', or leave counters out of "
            "the state"
        )
    return loss_fn.model_state


def first_examples(
    config: config_lib.ExperimentConfig, source: Any, *, per_example_rng: bool
) -> tuple[types.PyTree, jax.Array]:
    """A microbatch, by which the loss and the order are tried, and its key or keys."""
    rng = jax.random.key(config.seed)
    ids = np.arange(config.microbatch_size) % len(source)
    first = sources.fetch(source, ids)
    feed_lib.check_narrow(first, ids)
    return first, jax.random.split(rng, config.microbatch_size) if per_example_rng else rng


def _make_gathering(
    meeting: meeting_lib.Meeting,
    config: config_lib.ExperimentConfig,
    observer: ordering.Observer | None,
    all_rules: list[rules.LocalRule],
) -> gathering.Gathering | None:
    if meeting.alone:
        return None
    sizes = programs_lib.sizes(config)
    return gathering.Gathering(
        meeting,
        most_signs=0 if observer is None else sizes.microbatch_size * sizes.max_microbatches,
        microbatch_size=sizes.microbatch_size,
        most_metrics=max(len(rule.metrics) for rule in all_rules),
    )


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
