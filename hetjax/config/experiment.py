"""The configuration of a run: its validation, and how it is recorded.

`validate` turns nested values into an `ExperimentConfig`, frozen and checked, before anything is
computed; everything after that reads the frozen one. `hetjax.zoo.config` has one with more fields.
Nothing here imports jax. `groups` has the fields; an option of a part that is not chosen is
left out.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from hetjax.config import checks, fields, kinds
from hetjax.config.groups import ExperimentConfig

_Config = TypeVar("_Config")


def validate(given: Mapping[str, Any]) -> ExperimentConfig:
    """Checks a configuration and freezes it.

    Args:
      given: nested values; what is not given has its default.

    Returns:
      the checked configuration.

    Raises:
      ValueError: a field is unknown, of a wrong type or out of range, or fields contradict each
        other. A line for each names the field, the value, what is allowed and how to mend it.
    """
    return checks.resolve(parse(ExperimentConfig, given), {})[0]


def plain(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dicts, the options of a part beside its group's fields."""
    nested = dataclasses.asdict(config)
    if "cluster" in nested:
        nested["cluster"]["changes"] = tuple(
            {name: value for name, value in change.items() if value is not None}
            for change in nested["cluster"]["changes"]
        )
    for group in nested.keys() & kinds.KINDS.keys():
        nested[group] = fields.beside(nested[group])
    for each in nested.values():
        if isinstance(each, dict) and isinstance(each.get(kinds.ARGUMENTS), tuple):
            each[kinds.ARGUMENTS] = dict(each[kinds.ARGUMENTS])
    return nested


def to_dict(config: Any) -> dict[str, Any]:
    """As `plain`, of what JSON can hold, tuples as lists."""
    return json.loads(json.dumps(plain(config)))


def completed(recorded: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded configuration with the fields that were not there when it was written.

    Args:
      recorded: nested values, as a `config.json` has them.
      like: the same of today. A field that is only here has its default in the result.
    """
    defaults = to_dict(ExperimentConfig())
    for with_more_fields in ExperimentConfig.__subclasses__():
        defaults |= to_dict(with_more_fields())
    levels = dict.fromkeys(("upper", "lower"), defaults)  # of a bilevel run
    return _completed(recorded, like, defaults | levels)


def _completed(recorded: Any, like: Any, defaults: Any) -> Any:
    if not all(isinstance(values, Mapping) for values in (recorded, like, defaults)):
        return recorded
    missing = {name: defaults[name] for name in like.keys() & defaults.keys() - recorded.keys()}
    return {
        name: _completed(value, like.get(name), defaults.get(name))
        for name, value in (missing | dict(recorded)).items()
    }


def parse(kind: type[_Config], given: Any) -> _Config:
    """Applies the rule of each field, without the rules between fields.

    Args:
      kind: of configuration.
      given: nested values.

    Raises:
      ValueError: fields are unknown, of a wrong type or out of range; a line for each.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"A configuration is a mapping of fields to values, got {given!r}.")
    errors: list[str] = []
    values = fields.parse_group(kind, given, "", errors)
    if errors:
        raise ValueError("\n".join(errors))
    return kind(**values)
