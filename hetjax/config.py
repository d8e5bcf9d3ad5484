"""The configuration of a run: its fields with their defaults and units, and its validation.

`base` gives the defaults as an `ml_collections.ConfigDict`, which files in `configs/` change
and `--config.field=value` overrides. `validate` turns one into an `ExperimentConfig`, frozen
and checked, before anything is computed; everything after that reads the frozen one. A JSON
file holds the same fields and no code. Nothing here imports jax. The fields of the parts'
options come from their factories (`hetjax.kinds`); an option of a part that is not chosen is
ignored.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from hetjax import config_fields as fields
from hetjax import config_files, config_rules, kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the examples are and how they reach the workers."""

    name: str = fields.text("digits")  # a builder of ours, or any prepared TFDS data set
    dir: str = fields.text("", may_be_empty=True)  # '': the default directory
    feed: str = fields.choice("resident", "resident", "streamed")
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
    eval_every: int = fields.integer(1, at_least=1)  # epochs
    local: str = fields.choice("stepped", "stepped", "fused", "virtual")
    replay: str = fields.text("", may_be_empty=True)  # a metrics.jsonl instead of clocks
    nonfinite: str = fields.choice("stop", "stop", "skip")
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    quota: QuotaConfig = dataclasses.field(default_factory=QuotaConfig)
    ordering: OrderingConfig = dataclasses.field(default_factory=OrderingConfig)
    reducer: ReducerConfig = dataclasses.field(default_factory=ReducerConfig)
    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)


def base() -> ml_collections.ConfigDict:
    """Returns the defaults of every field, to be changed by a file in `configs/`."""
    return _config_dict(ExperimentConfig())


def validate(
    given: Mapping[str, Any] | ml_collections.ConfigDict,
    *,
    parts: Mapping[str, Any] | None = None,
) -> ExperimentConfig:
    """Checks a configuration and freezes it.

    Args:
      given: nested values; what is not given has its default.
      parts: the parts that were given as objects, by group (`quota`, `ordering`, `reducer`,
        `gate`). The configuration says of them what can be written down.

    Returns:
      the checked configuration.

    Raises:
      ValueError: a field is unknown, of a wrong type or out of range, or fields contradict each
        other. A line for each names the field, the value, what is allowed and how to mend it.
    """
    config = _parse(given)
    problems = config_rules.problems(config, parts or {})
    if problems:
        raise ValueError("\n".join(problems))
    return config


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the configuration as nested dicts that JSON can hold, tuples as lists."""
    plain = dataclasses.asdict(config)
    plain["cluster"]["changes"] = tuple(
        {name: value for name, value in change.items() if value is not None}
        for change in plain["cluster"]["changes"]
    )
    for group in kinds.KINDS:
        plain[group][kinds.ARGUMENTS] = dict(plain[group][kinds.ARGUMENTS])
    return json.loads(json.dumps(plain))


def from_json(path: str | pathlib.Path) -> ExperimentConfig:
    """Reads and checks a JSON configuration, such as the `config.json` of a run.

    Raises:
      ValueError: the file is missing or is not JSON, or as `validate`.
    """
    return validate(config_files.read_json(path))


def completed(recorded: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded configuration with the fields that were not there when it was written.

    Args:
      recorded: nested values, as a `config.json` has them.
      like: the same of today. A field that is only here has its default in the result.
    """
    return _completed(recorded, like, to_dict(ExperimentConfig()))


def _completed(recorded: Any, like: Any, defaults: Any) -> Any:
    if not all(isinstance(values, Mapping) for values in (recorded, like, defaults)):
        return recorded
    missing = {name: defaults[name] for name in like.keys() & defaults.keys() - recorded.keys()}
    return missing | {
        name: _completed(value, like.get(name), defaults.get(name))
        for name, value in recorded.items()
    }


def load(path: str | pathlib.Path) -> ml_collections.ConfigDict:
    """Reads a configuration file, `.py` with a `get_config()` or `.json`, to be overridden.

    Every field is there afterwards. Each one has been checked by itself; `validate` checks them
    together, after the overrides.

    Raises:
      ValueError: the file is missing, has another suffix, cannot be run or parsed, or a field
        is wrong.
    """
    return _config_dict(_parse(config_files.read(path)))


def _parse(given: Mapping[str, Any] | ml_collections.ConfigDict) -> ExperimentConfig:
    """Applies the rule of each field, without the rules between fields."""
    if isinstance(given, ml_collections.ConfigDict):
        given = given.to_dict()
    if not isinstance(given, Mapping):
        raise ValueError(f"A configuration is a mapping of fields to values, got {given!r}.")
    errors: list[str] = []
    values = fields.parse_group(ExperimentConfig, given, "", errors)
    if errors:
        raise ValueError("\n".join(errors))
    for field in dataclasses.fields(ExperimentConfig):
        group = fields.group_type(field)
        if group and field.name in values:
            values[field.name] = group(**values[field.name])
    return ExperimentConfig(**values)


def _config_dict(config: ExperimentConfig) -> ml_collections.ConfigDict:
    """The mutable form: tuples stay tuples, and a field of two types takes both."""
    plain = dataclasses.asdict(config)
    plain["cluster"]["changes"] = tuple(to_dict(config)["cluster"]["changes"])
    overhead = ml_collections.FieldReference(config.cluster.overhead_secs, field_type=object)
    plain["cluster"]["overhead_secs"] = overhead
    return ml_collections.ConfigDict(plain)
