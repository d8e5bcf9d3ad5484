"""The fields of a configuration with their defaults and units, in groups.

The fields of the parts' options come from their factories (`hetjax.kinds`), those of data sets by
name, reference models and their optimisers are in `hetjax.zoo.config`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hetjax import kinds
from hetjax.config import fields as fields

_ARGUMENTS = fields.arguments()
LINE_SEARCH = (
    "L-BFGS and line searches try several points in an update and need the loss and the gradient "
    "at each; an update has the gradient of a round, at one point"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How the examples reach the workers."""

    feed: str = fields.choice(
        "auto",
        "auto",
        "resident",
        "streamed",
        says="all data on each device, or read ahead; auto: ahead where a source changes",
    )
    readers: int = fields.integer(0, says="threads that read a source; 0: several where they help")
    sharing: str = fields.choice(
        "shared", "shared", "private", says="one order over all examples, or a shard a worker"
    )
    weighting: str = fields.choice(
        "shard",
        "shard",
        "example",
        "shard_mean",
        says="whose examples count how much, of private data, and of all data with gossip",
    )


@fields.with_options("quota")
class QuotaConfig:
    """How many microbatches each worker computes in a round."""

    policy: str = fields.text("adaptive", says="who finds the quotas")
    max_microbatches: int = fields.integer(0, says="cap of every worker; 0: the budget")


@fields.with_options("ordering")
class OrderingConfig:
    """The order of the examples."""

    method: str = fields.text("random_reshuffling", says="who finds each epoch's order")
    herding_every: int = fields.integer(
        0,
        at_least=-1,
        says="epochs between two measurements of the herding bound, three passes over the data "
        "each; -1: after the first and the last epoch, where the order takes signs; 0: none, and "
        "the cost of a microbatch is not measured either",
    )


@fields.with_options("reducer")
class ReducerConfig:
    """What a synchronisation does."""

    name: str = fields.text("all_reduce", says="what a synchronisation does")


@fields.with_options("gate")
class GateConfig:
    """What closes a round before all quotas are done."""

    trigger: str = fields.text("none", says="what closes a round early")
    in_flight: str = fields.choice(
        "finish", "finish", "drop", says="microbatches of a closed round; 'drop': virtual clock"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """What a worker does with its microbatches."""

    name: str = fields.text(
        kinds.DEFAULT_RULE, says="or the import path 'module:function' of a factory"
    )
    arguments: Any = _ARGUMENTS  # of that factory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What is different with one worker from the beginning of a round on; None: as before."""

    round: int = fields.required(fields.integer(0))
    worker: int = fields.required(fields.integer(0))
    secs_per_microbatch: float | None = fields.optional(fields.number(1.0, above=0.0))
    overhead_secs: float | None = fields.optional(fields.number(0.0, at_least=0.0))
    present: bool | None = fields.optional(fields.flag(True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The workers, and the speeds that are emulated."""

    num_workers: int = fields.integer(4, at_least=1, says="of the run, those that join later too")
    secs_per_microbatch: tuple[float, ...] = fields.numbers(
        (), above=0.0, says="emulated, one for each worker; (): real speeds"
    )
    overhead_secs: float | tuple[float, ...] = fields.number_or_numbers(
        0.0, at_least=0.0, says="emulated, of a round, beside the microbatches"
    )
    delay: str = fields.choice(
        "constant",
        "constant",
        "exponential",
        "gamma",
        "shifted_exponential",
        says="of the emulated times, about their means",
    )
    delay_cv: float = fields.number(
        0.1, above=0.0, says="standard deviation / mean, of delay 'gamma'"
    )
    delay_per: str = fields.choice(
        "microbatch", "microbatch", "round", says="what a delay is drawn for"
    )
    changes: tuple[Change, ...] = fields.records(
        Change, says="of workers' speeds and presence, by round"
    )
    clock: str = fields.choice(
        "wall", "wall", "virtual", says="'virtual': emulated times are added up, nobody sleeps"
    )
    seed: int = fields.integer(-1, at_least=-1, says="of the emulated times; -1: that of the run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run with a workdir is saved; at its end it always is."""

    every_secs: float = fields.number(60.0, at_least=0.0, says="0: not by the clock")
    every_rounds: int = fields.integer(0, says="0: not by rounds")
    keep: int = fields.integer(2, at_least=1, says="how many of the newest ones stay")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One run, checked. Make it with `experiment.validate`."""

    seed: int = fields.integer(0, says="of order, random keys and emulated noise")
    epochs: int = fields.integer(20, at_least=1, says="passes over the data")
    microbatch_size: int = fields.integer(16, at_least=2, even=True, says="examples")
    budget: int = fields.integer(
        20,
        at_least=1,
        says="microbatches a round, over all workers: the batch is budget * microbatch_size",
    )
    max_rounds: int = fields.integer(0, says="after which the run ends at the latest; 0: no limit")
    eval_every: int = fields.integer(1, at_least=1, says="epochs between evaluations")
    eval_every_rounds: int = fields.integer(0, says="rounds between more of them; 0: none")
    best_by: str = fields.text(
        "", may_be_empty=True, says="metric of the best parameters; '': the loss, if there is one"
    )
    best_mode: str = fields.choice("min", "min", "max", says="which of its values is the best")
    local: str = fields.choice(
        "stepped", "stepped", "fused", "virtual", says="who calls the workers' function"
    )
    replay: str = fields.text(
        "", may_be_empty=True, says="a metrics.jsonl, whose quotas are taken instead of clocks"
    )
    nonfinite: str = fields.choice(
        "stop", "stop", "skip", says="what is done about a loss or gradient that is not finite"
    )
    compilation_cache: str = fields.text(
        "auto", says="directory of compiled programs; auto: the user's cache; off: none"
    )
    examples_apart: str = fields.choice(
        "check", "check", "assert", "skip", says="whether an example's loss may depend on others"
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    quota: QuotaConfig = dataclasses.field(default_factory=QuotaConfig)
    ordering: OrderingConfig = dataclasses.field(default_factory=OrderingConfig)
    reducer: ReducerConfig = dataclasses.field(default_factory=ReducerConfig)
    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    rule: RuleConfig = dataclasses.field(default_factory=RuleConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
