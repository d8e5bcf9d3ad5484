"""The fields of a configuration with their defaults and units, in groups.

The fields of the parts' options come from their factories (`hetjax.kinds`).
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
_LINE_SEARCHES = ("lbfgs", "lbfgsb", "bfgs", "newton", "newtoncg", "cg", "linesearch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the examples are and how they reach the workers."""

    name: str = fields.text("digits", says="a builder of ours, or any prepared TFDS data set")
    dir: str = fields.text("", may_be_empty=True, says="of the data; '': the default directory")
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
    num_train: int = fields.integer(0, says="use only the first num_train examples; 0: all")
    vocabulary: int = fields.integer(
        10_000, says="of wikitext2: the most frequent words that are kept; 0: all"
    )
    length: int = fields.integer(35, at_least=1, says="of wikitext2: words of a chunk")
    features: str = fields.choice(
        "hashed", "hashed", "svd", says="of sst2, cola, rte: what a sentence's words become"
    )
    num_features: int = fields.integer(
        0, says="of sst2, cola, rte: how many; 0: 65536 hashed, 768 svd"
    )
    past: int = fields.integer(20, at_least=1, says="of m4_weekly: weeks that a model sees")
    future: int = fields.integer(6, at_least=1, says="of m4_weekly: weeks that it tells at once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which of the reference models is trained."""

    name: str = fields.choice(
        "small_cnn",
        "logistic",
        "mlp",
        "lenet",
        "small_cnn",
        "resnet8",
        "bag_of_words",
        "lstm",
        "transformer",
        "forecaster",
    )
    hidden: tuple[int, ...] = fields.integers(
        (128,), at_least=1, says="widths of the layers of mlp, lstm, forecaster"
    )
    width: int = fields.integer(0, says="of transformer (0: 128) and resnet8 (0: 16)")
    blocks: int = fields.integer(2, at_least=1, says="of the transformer")
    heads: int = fields.integer(2, at_least=1, says="of the transformer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update, and its learning rate over time (in nominal epochs)."""

    name: str = fields.choice(
        "sgd", "sgd", "adam", "adamw", why=dict.fromkeys(_LINE_SEARCHES, LINE_SEARCH)
    )
    learning_rate: float = fields.number(0.05, above=0.0, says="the highest of the schedule")
    momentum: float = fields.number(0.9, at_least=0.0, below=1.0, says="of sgd")
    nesterov: bool = fields.flag(False, says="of sgd: momentum looks ahead")
    weight_decay: float = fields.number(
        0.0, at_least=0.0, says="added to the gradient; with adamw apart from it"
    )
    clip_norm: float = fields.number(0.0, at_least=0.0, says="of the reduced gradient; 0: none")
    schedule: str = fields.choice(
        "constant", "constant", "cosine", "linear", "step", says="of the learning rate"
    )
    warmup_epochs: float = fields.number(
        0.0, at_least=0.0, says="in which the learning rate rises from 0"
    )
    decay_every_epochs: float = fields.number(0.0, at_least=0.0, says="of schedule 'step'")
    decay_factor: float = fields.number(
        0.1, above=0.0, at_most=1.0, says="of schedule 'step', each time"
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
    """One run, checked. Make it with `validate` or `from_json`."""

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
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    quota: QuotaConfig = dataclasses.field(default_factory=QuotaConfig)
    ordering: OrderingConfig = dataclasses.field(default_factory=OrderingConfig)
    reducer: ReducerConfig = dataclasses.field(default_factory=ReducerConfig)
    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    rule: RuleConfig = dataclasses.field(default_factory=RuleConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
