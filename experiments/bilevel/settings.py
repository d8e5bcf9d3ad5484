"""The configuration of a bilevel run: fields, defaults, checks, and the file's form."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import ml_collections

from experiments import config_flag
from hetjax import parts
from hetjax.config import experiment, fields, groups, kinds
from hetjax.config.experiment import to_dict as to_dict
from hetjax.parts.options import choice, integer, number, text
from hetjax.zoo import config as zoo_config
from hetjax.zoo import config_files

ESTIMATORS = (
    "value_gap",
    "value_gap_central",
    "implicit_cg",
    "implicit_neumann",
    "unrolled",
    "unrolled_checkpointed",
    "unrolled_truncated",
    "unrolled_aggregate",
    "unrolled_worst",
    "first_order",
)
PROBLEMS = ("cleaning", "few_shot", "search", "gan")
_NO_START = tuple(name for name in ESTIMATORS if name != "unrolled_worst")
_OF_PROBLEM = {
    "few_shot": (
        "value_gap",
        "value_gap_central",
        "implicit_cg",
        "implicit_neumann",
        "unrolled",
        "unrolled_worst",
        "first_order",
    ),
    "search": _NO_START,
    "gan": _NO_START,
}
"""The estimators of the problems that have not all of them."""
_OF_ALL = ("problem", "seed", "eval_every", "lower", "upper", "estimator")
_EXAMPLES = "examples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    name: Annotated[
        str, choice("digits", "fashion_mnist", "mnist", or_path=True, says="data set")
    ] = "digits"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()
    dir: Annotated[str, text(may_be_empty=True, says="where the original files lie")] = ""
    num_train: Annotated[int, integer(at_least=2, says=f"{_EXAMPLES}, polluted in part")] = 600
    num_validation: Annotated[int, integer(at_least=1, says=f"{_EXAMPLES} with right labels")] = 400
    num_test: Annotated[int, integer(says=f"{_EXAMPLES}; 0: all that are left")] = 0
    polluted_fraction: Annotated[
        float,
        number(at_least=0, at_most=1, says="of the training labels, drawn anew from all classes"),
    ] = 0.5
    block_size: Annotated[
        int, integer(says=f"{_EXAMPLES} that are in memory at once; divides both parts; 0: all")
    ] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    name: Annotated[str, choice("softmax", "mlp", or_path=True, says="model")] = "softmax"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()
    hidden: Annotated[int, integer(at_least=1, says="units of the mlp's hidden layer")] = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lower:
    optimizer: Annotated[
        str, choice("sgd", "momentum", "clipped", "adam", says="of the lower steps")
    ] = "sgd"
    learning_rate: Annotated[float, number(above=0, says="of the lower steps")] = 0.5
    ridge: Annotated[float, number(at_least=0, says="half of it times |y|^2 is added to f")] = 3e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upper:
    optimizer: Annotated[str, choice("adam", "sgd", says="of the upper variable")] = "adam"
    learning_rate: Annotated[float, number(above=0, says="of the upper variable")] = 0.1
    steps: Annotated[int, integer(at_least=1, says="hypergradients")] = 100
    last_rate: Annotated[
        float,
        number(above=0, at_most=1, says="the learning rate falls linearly to so much of itself"),
    ] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimator:
    name: Annotated[str, choice(*ESTIMATORS, says="how the hypergradient is found")] = "value_gap"
    steps: Annotated[int, integer(at_least=1, says="lower steps for each hypergradient")] = 10
    multiplier: Annotated[float, number(above=0, says="of the gap; value_gap*")] = 1.0
    back: Annotated[int, integer(says="steps that are differentiated; unrolled_truncated")] = 5
    products: Annotated[int, integer(at_least=1, says="for the linear system; implicit_*")] = 10
    damp: Annotated[float, number(at_least=0, says="of the linear system; implicit_*")] = 0.01
    start: Annotated[
        str,
        choice("warm", "cold", says="of the lower steps; unrolled*, but unrolled_worst learns it"),
    ] = "warm"
    start_learning_rate: Annotated[
        float, number(above=0, says="of the start that unrolled_worst learns")
    ] = 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    seed: Annotated[int, integer(says="of the split and the pollution")] = 0
    eval_every: Annotated[int, integer(at_least=1, says="hypergradients between two records")] = 5
    retrain_steps: Annotated[
        int, integer(at_least=1, says="L-BFGS steps of each trained model")
    ] = 80
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    loss: Annotated[str, zoo_config.LOSS] = zoo_config.BY_KIND
    metrics: Annotated[str, zoo_config.METRICS] = zoo_config.BY_KIND
    lower: Lower = dataclasses.field(default_factory=Lower)
    upper: Upper = dataclasses.field(default_factory=Upper)
    estimator: Estimator = dataclasses.field(default_factory=Estimator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Of how many microbatches a sum is made that an estimator asks for."""

    lower: Annotated[int, integer(says="microbatches of training; 0: all of them")] = 0
    upper: Annotated[int, integer(says="microbatches of validation; 0: all of them")] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot:
    """Of the problem few_shot."""

    shots: Annotated[int, integer(at_least=1, says="points of a task to fit it by")] = 10
    num_tasks: Annotated[int, integer(at_least=1, says="for each hypergradient")] = 25
    proximity: Annotated[
        float,
        number(above=0, says="half of it times |y - start|^2 is added to f; not of unrolled*"),
    ] = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Of the problem search."""

    num_train: Annotated[int, integer(at_least=1, says=_EXAMPLES)] = 400
    num_validation: Annotated[int, integer(at_least=1, says=_EXAMPLES)] = 400
    channels: Annotated[int, integer(at_least=1, says="of a node")] = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gan:
    """Of the problem gan."""

    batch_size: Annotated[int, integer(at_least=1, says="points, real and made")] = 256
    hidden: Annotated[int, integer(at_least=1, says="units of each of two layers, both nets")] = 48
    noise_size: Annotated[int, integer(at_least=1, says="inputs of the generator")] = 8
    deviation: Annotated[float, number(above=0, says="of each Gaussian")] = 0.1
    penalty: Annotated[
        float, number(at_least=0, says="half of it times |gradient at real points|^2 is added to f")
    ] = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(CleaningConfig):
    """A run: cleaning on unequal workers, or another problem on one device."""

    problem: Annotated[str, choice(*PROBLEMS, says="what is solved")] = "cleaning"
    few_shot: FewShot = dataclasses.field(default_factory=FewShot)
    search: Search = dataclasses.field(default_factory=Search)
    gan: Gan = dataclasses.field(default_factory=Gan)
    microbatch_size: Annotated[int, integer(at_least=1, says="examples")] = 20
    local: Annotated[
        str, choice("stepped", "fused", "virtual", says="what calls the workers' function")
    ] = "stepped"
    writers: Annotated[tuple[str, ...], zoo_config.WRITERS] = ()
    sums: Sums = dataclasses.field(default_factory=Sums)
    cluster: groups.ClusterConfig = dataclasses.field(default_factory=groups.ClusterConfig)
    quota: groups.QuotaConfig = dataclasses.field(default_factory=groups.QuotaConfig)
    reducer: groups.ReducerConfig = dataclasses.field(default_factory=groups.ReducerConfig)
    gate: groups.GateConfig = dataclasses.field(default_factory=groups.GateConfig)
    checkpoint: groups.CheckpointConfig = dataclasses.field(default_factory=groups.CheckpointConfig)


MAY_DIFFER = ("cluster", "quota", "checkpoint")
"""Groups that a run may be gone on with other values of."""

_OF_PARTS = ("quota", "reducer", "gate")
_OF_ROUNDS = ("cluster", *_OF_PARTS, "checkpoint")
"""Groups that are those of any run of hetjax."""


def base() -> ml_collections.ConfigDict:
    """The defaults of every field, to be changed by a file in `configs/`."""
    return zoo_config.mutable(TrainConfig())


def load(path: str) -> ml_collections.ConfigDict:
    """A `.py` file with `get_config()`, or the `config.json` of a run, to be overridden.

    Raises:
        ValueError: the file cannot be read, or a field is wrong.
    """
    return zoo_config.mutable(experiment.parse(TrainConfig, config_files.read(path)))


def validate_train(given: Mapping[str, Any] | ml_collections.ConfigDict) -> "TrainConfig":
    """As `validate`, of a run on unequal workers; the rest is checked as of any run of hetjax."""
    config = validate(given, TrainConfig)
    known = _OF_PROBLEM.get(config.problem, ESTIMATORS)
    if config.estimator.name not in known:
        raise ValueError(
            f"estimator.name: got {config.estimator.name!r}, must be one of "
            f"{', '.join(map(repr, known))} for problem={config.problem!r}."
        )
    if config.problem != "cleaning":
        given = {"data.name": config.data.name, "model.name": config.model.name}
        given |= {"loss": config.loss, "metrics": config.metrics}
        if mine := [name for name, value in given.items() if parts.is_path(value)]:
            raise ValueError(
                f"{', '.join(mine)}: problem={config.problem!r} has its own. Set "
                "problem='cleaning', or leave them out."
            )
        return config
    if config.data.block_size:
        raise ValueError(
            f"data.block_size: got {config.data.block_size}, must be 0: a worker has one "
            "microbatch in memory at a time. Set microbatch_size"
        )
    sizes = {"lower": config.data.num_train, "upper": config.data.num_validation}
    for name, num_examples in sizes.items():
        budget = getattr(config.sums, name) or math.ceil(num_examples / config.microbatch_size)
        try:
            checked = experiment.validate(of_rounds(config) | {"budget": budget})
        except ValueError as error:
            raise ValueError(
                f"{error}\n(Here budget is sums.{name}, or all microbatches where that is 0.)"
            ) from error
    made = {name: getattr(checked, name) for name in _OF_PARTS}
    return dataclasses.replace(config, **made)


def of_rounds(config: "TrainConfig") -> dict[str, Any]:
    """The fields that are those of any run of hetjax; of groups those that are no defaults."""
    plain, defaults = dataclasses.asdict(config), dataclasses.asdict(TrainConfig())
    groups_of_run = {
        name: {k: value for k, value in plain[name].items() if value != defaults[name][k]}
        for name in _OF_ROUNDS
    }
    for name in _OF_PARTS:  # options belong to a part
        if groups_of_run[name]:
            key = kinds.KINDS[name].key
            groups_of_run[name][key] = plain[name][key]
    groups_of_run["cluster"]["num_workers"] = config.cluster.num_workers
    names = "microbatch_size", "local", "seed"
    return {name: plain[name] for name in names} | {k: v for k, v in groups_of_run.items() if v}


Config = TypeVar("Config", bound="CleaningConfig")


def validate(
    given: Mapping[str, Any] | ml_collections.ConfigDict, kind: type[Config] = CleaningConfig
) -> Config:
    """Checks a configuration and freezes it.

    Raises:
        ValueError: a field is unknown, of a wrong type or out of range, or fields contradict
            each other; names each.
    """
    config = experiment.parse(kind, config_files.plain(given))
    estimator = config.estimator
    if estimator.name == "unrolled_truncated" and estimator.back > estimator.steps:
        raise ValueError(
            f"estimator.back: got {estimator.back} of estimator.steps={estimator.steps}, must be "
            "at most the steps that are made. Lower it, or make more steps."
        )
    data = config.data
    if data.block_size and (
        data.num_train % data.block_size or data.num_validation % data.block_size
    ):
        raise ValueError(
            f"data.block_size: got {data.block_size}, must divide data.num_train={data.num_train} "
            f"and data.num_validation={data.num_validation}, such as "
            f"{math.gcd(data.num_train, data.num_validation)}; or 0 for all at once."
        )
    if config.upper.steps % config.eval_every:
        raise ValueError(
            f"eval_every: got {config.eval_every}, must divide upper.steps={config.upper.steps}, "
            "so that every record is of as many hypergradients."
        )
    return config


def _of_other_problems(
    loaded: ml_collections.ConfigDict, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yields what is wrong with fields on the command line that the problem does not read.

    In a file they are no mistake: `config.json` has them all.
    """
    own = given.get("problem", loaded.problem)
    for name in given:
        group = name.partition(".")[0]
        if group in PROBLEMS and group != own:
            yield f"{name}: problem={own!r} does not read it. Set problem={group!r}."
        elif own != "cleaning" and group not in (*_OF_ALL, own):
            yield (
                f"{name}: problem={own!r} runs on one device and does not read it. It reads "
                f"{', '.join(_OF_ALL)} and {own}.*"
            )


SCHEMA = config_flag.Schema(
    TrainConfig, load, validate_train, "configs/digits_cleaning.py", _of_other_problems
)
