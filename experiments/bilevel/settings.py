"""The configuration of a cleaning run: fields, defaults, checks, and the file's form."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import ml_collections

from experiments import config_flag
from hetjax.config import fields, files

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
_EXAMPLES = "examples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    name: str = fields.choice("digits", "digits", "fashion_mnist", "mnist", says="data set")
    dir: str = fields.text("", may_be_empty=True, says="where the original files lie")
    num_train: int = fields.integer(600, at_least=2, says=f"{_EXAMPLES}, polluted in part")
    num_validation: int = fields.integer(400, at_least=1, says=f"{_EXAMPLES} with right labels")
    num_test: int = fields.integer(0, says=f"{_EXAMPLES}; 0: all that are left")
    polluted_fraction: float = fields.number(
        0.5, at_least=0, at_most=1, says="of the training labels, drawn anew from all classes"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    name: str = fields.choice("softmax", "softmax", "mlp", says="model")
    hidden: int = fields.integer(300, at_least=1, says="units of the mlp's hidden layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lower:
    optimizer: str = fields.choice("sgd", "sgd", "momentum", "adam", says="of the lower steps")
    learning_rate: float = fields.number(0.5, above=0, says="of the lower steps")
    ridge: float = fields.number(3e-4, at_least=0, says="half of it times |y|^2 is added to f")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upper:
    optimizer: str = fields.choice("adam", "adam", "sgd", says="of the weights of examples")
    learning_rate: float = fields.number(0.1, above=0, says="of the weights of examples")
    steps: int = fields.integer(100, at_least=1, says="hypergradients")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimator:
    name: str = fields.choice("value_gap", *ESTIMATORS, says="how the hypergradient is found")
    steps: int = fields.integer(10, at_least=1, says="lower steps for each hypergradient")
    multiplier: float = fields.number(1.0, above=0, says="of the gap; value_gap*")
    back: int = fields.integer(5, says="steps that are differentiated; unrolled_truncated")
    products: int = fields.integer(10, at_least=1, says="for the linear system; implicit_*")
    damp: float = fields.number(0.01, at_least=0, says="of the linear system; implicit_*")
    start: str = fields.choice(
        "warm", "warm", "cold", says="of the lower steps; unrolled*, but unrolled_worst learns it"
    )
    start_learning_rate: float = fields.number(
        0.03, above=0, says="of the start that unrolled_worst learns"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    seed: int = fields.integer(0, says="of the split and the pollution")
    eval_every: int = fields.integer(5, at_least=1, says="hypergradients between two records")
    retrain_steps: int = fields.integer(80, at_least=1, says="L-BFGS steps of each trained model")
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    lower: Lower = dataclasses.field(default_factory=Lower)
    upper: Upper = dataclasses.field(default_factory=Upper)
    estimator: Estimator = dataclasses.field(default_factory=Estimator)


def base() -> ml_collections.ConfigDict:
    """The defaults of every field, to be changed by a file in `configs/`."""
    return ml_collections.ConfigDict(dataclasses.asdict(CleaningConfig()))


def load(path: str) -> ml_collections.ConfigDict:
    """A `.py` file with `get_config()`, or the `config.json` of a run, to be overridden.

    Raises:
        ValueError: the file cannot be read, or a field is wrong.
    """
    return ml_collections.ConfigDict(dataclasses.asdict(_parsed(files.read(path))))


def validate(given: Mapping[str, Any] | ml_collections.ConfigDict) -> CleaningConfig:
    """Checks a configuration and freezes it.

    Raises:
        ValueError: a field is unknown, of a wrong type or out of range, or fields contradict
            each other; names each.
    """
    config = _parsed(given)
    estimator = config.estimator
    if estimator.name == "unrolled_truncated" and estimator.back > estimator.steps:
        raise ValueError(
            f"estimator.back: got {estimator.back} of estimator.steps={estimator.steps}, must be "
            "at most the steps that are made. Lower it, or make more steps."
        )
    if config.upper.steps % config.eval_every:
        raise ValueError(
            f"eval_every: got {config.eval_every}, must divide upper.steps={config.upper.steps}, "
            "so that every record is of as many hypergradients."
        )
    return config


def to_dict(config: CleaningConfig) -> dict[str, Any]:
    """Nested dicts that JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _parsed(given: Mapping[str, Any] | ml_collections.ConfigDict) -> CleaningConfig:
    if isinstance(given, ml_collections.ConfigDict):
        given = given.to_dict()
    errors: list[str] = []
    values = fields.parse_group(CleaningConfig, given, "", errors)
    if errors:
        raise ValueError("\n".join(errors))
    for field in dataclasses.fields(CleaningConfig):
        group = fields.group_type(field)
        if group and field.name in values:
            values[field.name] = group(**values[field.name])
    return CleaningConfig(**values)


SCHEMA = config_flag.Schema(
    CleaningConfig, load, validate, "configs/digits_cleaning.py", lambda loaded, overrides: ()
)
