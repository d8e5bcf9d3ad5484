"""The fields of a configuration with their defaults and units, in groups.

The fields of the parts' options come from their factories (`hetjax.kinds`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hetjax import kinds
from hetjax.config import fields as fields

_ARGUMENTS = fields.arguments()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the examples are and how they reach the workers."""

    name: str = fields.text("digits")  # a builder of ours, or any prepared TFDS data set
    dir: str = fields.text("", may_be_empty=True)  # '': the default directory
    feed: str = fields.choice("auto", "auto", "resident", "streamed")
    readers: int = fields.integer(0)  # threads that read a source; 0: several where they help
    sharing: str = fields.choice("shared", "shared", "private")
    weighting: str = fields.choice(  # of private data, and of all data with gossip
        "shard", "shard", "example", "shard_mean"
    )
    num_train: int = fields.integer(0)  # use only the first num_train examples; 0: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which of the reference models is trained."""

    name: str = fields.choice("small_cnn", "logistic", "mlp", "lenet", "small_cnn")
    hidden: tuple[int, ...] = fields.integers((128,), at_least=1)  # widths of the mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update, and its learning rate over time (in nominal epochs)."""

    name: str = fields.choice("sgd", "sgd", "adam", "adamw")
    learning_rate: float = fields.number(0.05, above=0.0)  # the highest of the schedule
    momentum: float = fields.number(0.9, at_least=0.0, below=1.0)  # sgd
    nesterov: bool = fields.flag(False)  # sgd
    weight_decay: float = fields.number(0.0, at_least=0.0)
    clip_norm: float = fields.number(0.0, at_least=0.0)  # of the reduced gradient; 0: none
    schedule: str = fields.choice("constant", "constant", "cosine", "linear", "step")
    warmup_epochs: float = fields.number(0.0, at_least=0.0)
    decay_every_epochs: float = fields.number(0.0, at_least=0.0)  # 'step'
    decay_factor: float = fields.number(0.1, above=0.0, at_most=1.0)  # 'step'


@fields.with_options("quota")
class QuotaConfig:
    """How many microbatches each worker computes in a round."""

    policy: str = fields.text("adaptive")
    max_microbatches: int = fields.integer(0)  # cap of every worker; 0: the budget


@fields.with_options("ordering")
class OrderingConfig:
    """The order of the examples."""

    method: str = fields.text("random_reshuffling")
    # Epochs between two measurements of the herding bound, three passes over the data each;
    # -1: after the first and the last epoch, where the order takes signs; 0: none, and the cost
    # of a microbatch is not measured either.
    herding_every: int = fields.integer(-1, at_least=-1)


@fields.with_options("reducer")
class ReducerConfig:
    """What a synchronisation does."""

    name: str = fields.text("all_reduce")


@fields.with_options("gate")
class GateConfig:
    """What closes a round before all quotas are done."""

    trigger: str = fields.text("none")
    in_flight: str = fields.choice("finish", "finish", "drop")  # 'drop': virtual clock alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """What a worker does with its microbatches."""

    name: str = fields.text(kinds.DEFAULT_RULE)  # or the import path 'module:function' of a factory
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

    num_workers: int = fields.integer(4, at_least=1)
    secs_per_microbatch: tuple[float, ...] = fields.numbers((), above=0.0)  # (): no emulation
    overhead_secs: float | tuple[float, ...] = fields.number_or_numbers(0.0, at_least=0.0)
    delay: str = fields.choice(
        "constant", "constant", "exponential", "gamma", "shifted_exponential"
    )
    delay_cv: float = fields.number(0.1, above=0.0)  # standard deviation / mean; 'gamma'
    delay_per: str = fields.choice("microbatch", "microbatch", "round")
    changes: tuple[Change, ...] = fields.records(Change)
    clock: str = fields.choice("wall", "wall", "virtual")
    seed: int = fields.integer(-1, at_least=-1)  # of the emulated times; -1: that of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run with a workdir is saved; at its end it always is."""

    every_secs: float = fields.number(60.0, at_least=0.0)  # 0: not by the clock
    every_rounds: int = fields.integer(0)  # 0: not by rounds
    keep: int = fields.integer(2, at_least=1)  # the newest ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One run, checked. Make it with `validate` or `from_json`."""

    seed: int = fields.integer(0)
    epochs: int = fields.integer(20, at_least=1)
    microbatch_size: int = fields.integer(16, at_least=2, even=True)  # examples
    budget: int = fields.integer(20, at_least=1)  # microbatches a round, over all workers
    max_rounds: int = fields.integer(0)  # the run ends after so many, if not before; 0: no limit
    eval_every: int = fields.integer(1, at_least=1)  # epochs
    eval_every_rounds: int = fields.integer(0)  # and after so many rounds; 0: not by rounds
    best_by: str = fields.text("", may_be_empty=True)  # a metric; '': the loss, if there is one
    best_mode: str = fields.choice("min", "min", "max")  # of that metric
    local: str = fields.choice("stepped", "stepped", "fused", "virtual")
    replay: str = fields.text("", may_be_empty=True)  # a metrics.jsonl instead of clocks
    nonfinite: str = fields.choice("stop", "stop", "skip")
    compilation_cache: str = fields.text("auto")  # a directory; 'auto': the user's; or 'off'
    examples_apart: str = fields.choice("check", "check", "assert", "skip")
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
