"""The configuration of an experiment: that of a run, with its data set, model and optimiser.

`base` gives the defaults as an `ml_collections.ConfigDict`, which files in `configs/` change
and `--config.field=value` overrides. Before anything is computed `validate` makes a frozen and
checked `ExperimentConfig` of it, which everything after that reads. A JSON file holds the same
fields and no code. Nothing here imports jax. A file may have options of parts and data sets that
are not chosen; `experiments.tasks` tells one that the model does not have.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from hetjax import extras, parts
from hetjax.config import checks, experiment, fields, files, groups
from hetjax.config.experiment import to_dict as to_dict
from hetjax.parts.options import choice, flag, integer, names, number, several, text
from hetjax.zoo import config_files

if TYPE_CHECKING:
    import ml_collections

_Config = TypeVar("_Config", bound=groups.ExperimentConfig)
WRITERS = names(
    "tensorboard",
    "wandb",
    "mlflow",
    "csv",
    says="trackers that get the line of each round, such as tensorboard,csv; below the workdir",
)
BY_KIND = "by_kind"
LOSS = choice(BY_KIND, or_path=True, says="what is minimised, by the kind of the examples")
METRICS = choice(BY_KIND, or_path=True, says="what is measured of an evaluated set, likewise")
_MODELS = "logistic mlp lenet small_cnn resnet8 resnet18 bag_of_words lstm transformer forecaster"
_LINE_SEARCHES = dict.fromkeys(
    ("lbfgs", "lbfgsb", "bfgs", "newton", "newtoncg", "cg", "linesearch"), groups.LINE_SEARCH
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedDataConfig:
    """Which data set it is, and where it lies."""

    name: Annotated[str, text(says="ours, prepared by TFDS, or 'module:function'")] = "digits"
    dir: Annotated[str, text(may_be_empty=True, says="of the data; '': the default directory")] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(groups.DataConfig, NamedDataConfig):
    """What the examples are and how they reach the workers."""

    num_train: Annotated[int, integer(says="use only the first num_train examples; 0: all")] = 0
    arguments: Annotated[Any, fields.ARGUMENTS] = ()
    augmentation: Annotated[
        str,
        choice("none", "crops_and_flips", or_path=True, says="other views in each epoch"),
    ] = "none"
    vocabulary: Annotated[
        int, integer(says="of wikitext2: the most frequent words that are kept; 0: all")
    ] = 10_000
    length: Annotated[int, integer(at_least=1, says="of wikitext2: words of a chunk")] = 35
    features: Annotated[
        str, choice("hashed", "svd", says="of sst2, cola, rte: what a sentence's words become")
    ] = "hashed"
    num_features: Annotated[
        int, integer(says="of sst2, cola, rte: how many; 0: 65536 hashed, 768 svd")
    ] = 0
    past: Annotated[int, integer(at_least=1, says="of m4_weekly: weeks that a model sees")] = 20
    future: Annotated[
        int, integer(at_least=1, says="of m4_weekly: weeks that it tells at once")
    ] = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained: one of the reference models, or one's own."""

    name: Annotated[str, choice(*_MODELS.split(), or_path=True)] = "small_cnn"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()
    hidden: Annotated[
        tuple[int, ...],
        several(integer(at_least=1), says="widths of the layers of mlp, lstm, forecaster"),
    ] = (128,)
    width: Annotated[
        int, integer(says="of transformer (0: 128), resnet8 (0: 16) and resnet18 (0: 64)")
    ] = 0
    norm: Annotated[
        str, choice("group", "batch", says="of resnet8 and resnet18: whose statistics normalise")
    ] = "group"
    blocks: Annotated[int, integer(at_least=1, says="of the transformer")] = 2
    heads: Annotated[int, integer(at_least=1, says="of the transformer")] = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update, and its learning rate over time (in nominal epochs)."""

    name: Annotated[str, choice("sgd", "adam", "adamw", or_path=True, why=_LINE_SEARCHES)] = "sgd"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()
    learning_rate: Annotated[float, number(above=0.0, says="the highest of the schedule")] = 0.05
    momentum: Annotated[float, number(at_least=0.0, below=1.0, says="of sgd")] = 0.9
    nesterov: Annotated[bool, flag(says="of sgd: momentum looks ahead")] = False
    weight_decay: Annotated[
        float, number(at_least=0.0, says="added to the gradient; with adamw apart from it")
    ] = 0.0
    clip_norm: Annotated[
        float, number(at_least=0.0, says="greatest norm of the reduced gradient; 0: none")
    ] = 0.0
    schedule: Annotated[
        str, choice("constant", "cosine", "linear", "step", says="of the learning rate")
    ] = "constant"
    warmup_epochs: Annotated[
        float, number(at_least=0.0, says="in which the learning rate rises from 0")
    ] = 0.0
    decay_every_epochs: Annotated[
        float, number(at_least=0.0, says="epochs between two steps of schedule 'step'")
    ] = 0.0
    decay_factor: Annotated[
        float, number(above=0.0, at_most=1.0, says="of schedule 'step', each time")
    ] = 0.1


def _with_own_groups_behind_data(config: type[_Config]) -> type[_Config]:
    """The same class; messages and `--help` list what is trained before how it is trained."""
    of_run = dict(config.__dataclass_fields__)
    own = {name: of_run.pop(name) for name in ("model", "loss", "metrics", "optimizer", "writers")}
    behind = list(of_run).index("data") + 1
    items = list(of_run.items())
    config.__dataclass_fields__ = dict([*items[:behind], *own.items(), *items[behind:]])
    return config


@_with_own_groups_behind_data
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(groups.ExperimentConfig):
    """One experiment, checked. Make it with `validate` or `from_json`."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: Annotated[str, LOSS] = BY_KIND
    metrics: Annotated[str, METRICS] = BY_KIND
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    writers: Annotated[tuple[str, ...], WRITERS] = ()


def base() -> ml_collections.ConfigDict:
    """Returns the defaults of every field, to be changed by a file in `configs/`."""
    return mutable(ExperimentConfig())


def load(path: str | pathlib.Path) -> ml_collections.ConfigDict:
    """Reads a configuration file, `.py` with a `get_config()` or `.json`, to be overridden.

    Afterwards every field is there and has been checked by itself. `validate` checks them together,
    and the options of parts, after the overrides.

    Raises:
      ValueError: the file is missing, has another suffix, cannot be run or parsed, or a field
        is wrong.
    """
    return mutable(_parse(config_files.read(path)))


def from_json(path: str | pathlib.Path) -> ExperimentConfig:
    """Reads and checks a JSON configuration, such as the `config.json` of a run.

    Raises:
      ValueError: the file is missing or is not JSON, or `validate` raises it.
    """
    return validate(files.read_json(path))


def validate(
    given: Mapping[str, Any] | ml_collections.ConfigDict, *, parts: Mapping[str, Any] | None = None
) -> ExperimentConfig:
    """Checks a configuration and freezes it.

    Args:
      given: nested values; what is not given has its default.
      parts: the parts that were given as objects, by group (`quota`, `ordering`, `reducer`,
        `gate`). The configuration says of them what can be written down.

    Returns:
      The checked configuration.

    Raises:
      ValueError: a field is unknown, of a wrong type or out of range, or fields contradict each
        other. A line for each names the field, the value, what is allowed and how to mend it.
    """
    config = _parse(given)
    more = [*_data(config.data), *_model(config.model), *_optimizer(config)]
    return checks.resolve(config, parts or {}, more=more)[0]


def _parse(given: Mapping[str, Any] | ml_collections.ConfigDict) -> ExperimentConfig:
    return experiment.parse(ExperimentConfig, config_files.plain(given))


def _data(data: DataConfig) -> Iterator[str]:
    if data.sharing == "process_local" and not parts.is_path(data.name):
        yield (
            f"data.sharing: got 'process_local', but each process reads all of data.name="
            f"{data.name!r}; take 'shared' or 'private'."
        )


def _model(model: ModelConfig) -> Iterator[str]:
    if model.name == "mlp" and not model.hidden:
        yield (
            "model.hidden: got (), must be one or more widths with model.name='mlp'. Give "
            "some, such as (128,), or set model.name='logistic'."
        )


def _optimizer(config: ExperimentConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.warmup_epochs > config.epochs:
        yield (
            f"optimizer.warmup_epochs: got {optimizer.warmup_epochs}, must be at most "
            f"epochs={config.epochs}. Lower it, or raise epochs."
        )
    if optimizer.schedule == "step" and not optimizer.decay_every_epochs:
        yield (
            "optimizer.decay_every_epochs: got 0.0, must be above 0 with "
            "optimizer.schedule='step'. Give the epochs between two steps."
        )
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum):
        yield (
            f"optimizer.nesterov: got True with optimizer.name={optimizer.name!r} and "
            f"optimizer.momentum={optimizer.momentum}, needs 'sgd' and a momentum above 0. Set "
            "those, or nesterov to False."
        )


def mutable(config: Any) -> ml_collections.ConfigDict:
    """A configuration that can be changed: tuples stay tuples, a field of two types takes both."""
    extras.require("ml_collections")
    import ml_collections

    plain = experiment.plain(config)
    for group, name in (("cluster", "overhead_secs"), ("data", "readers")):
        if name in plain[group]:  # not in the data of a bilevel problem
            value = plain[group][name]
            plain[group][name] = ml_collections.FieldReference(value, field_type=object)
    return ml_collections.ConfigDict(plain)
