"""The configuration of a run: its defaults, its validation, and how it is read and written.

`base` gives the defaults as an `ml_collections.ConfigDict`, which files in `configs/` change
and `--config.field=value` overrides. `validate` turns one into an `ExperimentConfig`, frozen
and checked, before anything is computed; everything after that reads the frozen one. A JSON
file holds the same fields and no code. Nothing here imports jax. `groups` has the fields; an
option of a part that is not chosen is ignored.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetjax import extras, kinds
from hetjax.config import checks, files
from hetjax.config import fields as fields
from hetjax.config.groups import ExperimentConfig

if TYPE_CHECKING:
    import ml_collections


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
    problems = checks.problems(config, parts or {})
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
    for group in (*kinds.KINDS, "rule"):
        plain[group][kinds.ARGUMENTS] = dict(plain[group][kinds.ARGUMENTS])
    return json.loads(json.dumps(plain))


def from_json(path: str | pathlib.Path) -> ExperimentConfig:
    """Reads and checks a JSON configuration, such as the `config.json` of a run.

    Raises:
      ValueError: the file is missing or is not JSON, or as `validate`.
    """
    return validate(files.read_json(path))


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
    return _config_dict(_parse(files.read(path)))


def _parse(given: Mapping[str, Any] | ml_collections.ConfigDict) -> ExperimentConfig:
    """Applies the rule of each field, without the rules between fields."""
    given = files.plain(given)
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
    extras.require("ml_collections")
    import ml_collections

    plain = dataclasses.asdict(config)
    plain["cluster"]["changes"] = tuple(to_dict(config)["cluster"]["changes"])
    overhead = ml_collections.FieldReference(config.cluster.overhead_secs, field_type=object)
    plain["cluster"]["overhead_secs"] = overhead
    return ml_collections.ConfigDict(plain)
