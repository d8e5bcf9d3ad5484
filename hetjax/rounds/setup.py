"""What never changes in a run: where its workers are, its methods, data, programs and company.

`build` makes it. Each function takes what it uses of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from hetjax import executor, gates, ordering, placement, quota, trees, types, wires
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.checkpoints import leaves
from hetjax.cluster import emulate
from hetjax.comm import allgather_work, broadcast_once
from hetjax.comm import communicator as communicator_lib
from hetjax.config import experiment as config_lib
from hetjax.data import feed as feed_lib
from hetjax.data import stream as stream_lib
from hetjax.inputs import replay
from hetjax.liveness import heartbeats as heartbeats_lib
from hetjax.local import clocks, embeddings, fused, jitted, rules, stepped, virtual
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.losses import stateful
from hetjax.rounds import sync
from hetjax.topology import reducers

MAIN = "main"  # the kind of round of the rule that every engine has; it may update


@dataclasses.dataclass(frozen=True)
class Methods:
    """What decides how much each worker does, in which order, and what becomes of it."""

    policy: quota.QuotaPolicy
    order: ordering.Ordering
    observer: ordering.Observer | None  # the order's part on the devices
    reducer: reducers.Reduction
    gate: gates.Gate


@dataclasses.dataclass(frozen=True)
class Speeds:
    """By which clock the workers are timed, and what is known of them before."""

    clock: clocks.WorkerClock
    cluster: emulate.EmulatedCluster | None  # which workers are present when
    emulated: bool  # the cluster's speeds are those of this run
    trace: list[replay.TracedRound] | None  # that is replayed


@dataclasses.dataclass(frozen=True)
class Company:
    """The processes of a run, and what they tell each other."""

    communicator: communicator_lib.Communicator
    gather: allgather_work.WorkAllGather | None  # None: there is one process
    heartbeats: heartbeats_lib.Heartbeats
    solved: broadcast_once.BroadcastOnce


class Programs(NamedTuple):
    """What a kind of round runs: a local rule, and what follows from it."""

    kind: str
    rule: rules.LocalRule
    updates: bool  # the parameters, by what is added up
    local: stepped.Stepped | fused.Fused | virtual.Virtual
    begin: Callable  # (params, kept, given=()) -> carried
    sync: jitted.InPlace
    sums: communicator_lib.Sums
    steps: rules.LocalSteps
    finishes_late: bool  # what the workers carry is finished in the synchronisation


class Embedding(NamedTuple):
    """What comes before the main pass, where the loss is over a round."""

    passes: embeddings.Passes
    programs: Programs  # of the first one


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The programs of all kinds of rounds."""

    of_kind: dict[str, Programs]
    unsigned: Programs | None  # of the main kind, in passes that need no signs
    embedding: Embedding | None
    plain: Programs | None = None  # gradients, by which examples are seen to be apart; or main's

    @property
    def main(self) -> Programs:
        """Of the kind of round that every engine has."""
        return self.of_kind[MAIN]

    def of(self, kind: str, *, signed: bool) -> Programs:
        """What a round of a kind runs, which finds signs or none."""
        if kind not in self.of_kind:
            raise ValueError(f"Run.round: kind is {kind!r}; this run has {', '.join(self.of_kind)}")
        if self.unsigned is not None and kind == MAIN and not signed:
            return self.unsigned
        return self.of_kind[kind]

    def close(self) -> None:
        """Frees threads."""
        first = self.embedding and self.embedding.programs
        for programs in filter(None, (*self.of_kind.values(), self.unsigned, first, self.plain)):
            programs.local.close()


_NO_PROGRAMS = Kinds({}, None, None)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What never changes in a run."""

    config: config_lib.ExperimentConfig
    loss_fn: losses_lib.LossFn
    per_example_rng: bool
    where: placement.Placement
    methods: Methods
    speeds: Speeds
    stream: stream_lib.Stream
    feed: feed_lib.Feed
    company: Company
    begun: types.TrainState  # before the first round
    by_name: named_lib.Beside  # what the loss may ask for
    notes: tuple[str, ...]  # of the source, for the report
    looks_at: Any  # (source, first examples), to see whether examples are apart; None: they are
    programs: Kinds = _NO_PROGRAMS  # made of all the rest

    @property
    def is_stateful(self) -> bool:
        """Whether the model keeps state beside its parameters."""
        return isinstance(self.loss_fn, stateful.StatefulLoss)

    @functools.cached_property
    def frozen(self) -> types.PyTree:
        """What losses are given as such, on the devices."""
        return mesh_lib.place_once(self.by_name.frozen, self.where.mesh, self.where.layout)

    @property
    def own_named(self) -> types.Named:
        """What losses may ask for before the first round, on this process's first worker."""
        (frozen,) = mesh_lib.copies(self.frozen, [self.where.own_place])
        return types.Named(frozen, self.by_name.values.begun)

    @property
    def rounds_an_epoch(self) -> float:
        """Nominal ones."""
        return self.stream.examples_per_epoch / (self.config.budget * self.config.microbatch_size)

    @functools.cached_property
    def rng(self) -> jax.Array:
        """The key of the run."""
        return jax.random.key(self.config.seed)

    @functools.cached_property
    def shares(self) -> jax.Array:
        """f[W]: each shard's share of the examples, on every device."""
        return mesh_lib.put_everywhere(self.stream.shares, self.where.mesh)

    @functools.cached_property
    def new_pass(self) -> Callable | None:
        """Jitted; None where the order observes nothing."""
        if self.methods.observer is None:
            return None
        of_rows = mesh_lib.worker_sharding(self.where.mesh)
        made = sync.make_new_pass(self.methods.observer)
        return executor.compiled(jax.jit(made, donate_argnums=(0, 1), out_shardings=of_rows))

    @property
    def kept_rows(self) -> dict[str, int]:
        """How many rows have the parts of the state that workers may have each for itself."""
        return {
            "memory": memory_rows(self.config, self.methods.observer),
            "worker": self.where.num_rows,
        }

    @property
    def host_is_own(self) -> bool:
        """Whether what a process needs between two local phases is its own, by real clocks, where
        the sums have met before the synchronisation."""
        waits = self.methods.order.coordinated or self.company.communicator.across  # by collectives
        return not waits and not self.speeds.clock.virtual

    @functools.cached_property
    def asks_policy(self) -> bool:
        """Whether a round has a choice of quotas: a trace has none, nor have hetjax's own policies
        for one worker. A user's may have other reasons to be asked."""
        has_choice = len(self.where.devices) > 1 or self.policy_form is not None
        return self.speeds.trace is None and has_choice

    @functools.cached_property
    def policy_name(self) -> str:
        """Of its quota policy, where a message begins."""
        return f"quota: the policy {parts_lib.named(self.methods.policy)}: "

    @functools.cached_property
    def policy_form(self) -> leaves.Signature | None:
        """Of the state of a user's policy, as its `init` makes it; None of one of hetjax's own."""
        policy = self.methods.policy
        if parts_lib.is_ours(policy):
            return None
        return leaves.signature(policy.init(len(self.where.devices), self.config.budget))

    @functools.cached_property
    def bytes_sent(self) -> tuple[int, int]:
        """Of what one worker sends of its parameters and of embeddings, as a contribution is on the
        wire, and as a sum; asked for every round."""
        params, embedding = self.begun.params, self.programs.embedding
        reducer, rows = self.methods.reducer, self.where.num_rows
        if reducer.mixing is None:  # sums are sent, wider than some parameters
            params = jax.eval_shape(trees.accumulator_zeros, params)
        of_one = of_sum = trees.num_bytes(params) // rows
        if reducer.wire != wires.FLOAT32:
            of_one = wires.num_bytes(trees.size(params) // rows, reducer.wire)
        of_round = 0 if embedding is None else trees.num_bytes(embedding.passes.gathered)
        return of_one + of_round, of_sum + of_round

    def close(self) -> None:
        """Frees threads."""
        self.programs.close()
        self.feed.close()


def memory_rows(config: config_lib.ExperimentConfig, observer: ordering.Observer | None) -> int:
    """Of the order's memory: on one device what is the same on all workers is kept once."""
    is_once = config.form == "virtual" and observer is not None and observer.same_memory
    return 1 if is_once else config.cluster.num_workers
