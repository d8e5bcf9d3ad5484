"""What one field of a configuration may hold, and what a user is told who gives something else.

Each function here makes a dataclass field with a default and a rule of `hetjax.values`.
`parse_group` applies the rules to a nested mapping and collects a line for every wrong field.

What concerns several fields at once is left to `checks`, the fields to `groups`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from hetjax import kinds, values

_Group = TypeVar("_Group")
_INSTEAD = {  # of fields that other libraries have
    "batch_size": " The batch of an update is budget * microbatch_size examples: set those two.",
    "lr": " Did you mean 'optimizer.learning_rate'?",
}
_NOTHING: Mapping[str, str] = MappingProxyType({})


def _field(default: Any, rule: values.Rule, says: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule, "says": says})


def integer(default: int, *, says: str = "", **bounds: Any) -> Any:
    """A whole number, as `values.integer`; `says` is what it is, as in `--help`."""
    return _field(default, values.integer(**bounds), says)


def number(default: float, *, says: str = "", **bounds: float) -> Any:
    """A finite number within bounds, as `values.number`."""
    return _field(default, values.number(**bounds), says)


def flag(default: bool, *, says: str = "") -> Any:
    """True or False."""
    return _field(default, values.flag(), says)


def text(default: str, *, says: str = "", may_be_empty: bool = False) -> Any:
    """A string; the empty one only where it stands for a default."""
    return _field(default, values.text(may_be_empty=may_be_empty), says)


def choice(default: str, *names: str, says: str = "", why: Mapping[str, str] = _NOTHING) -> Any:
    """One of a few names; `why` says of others, in lower case without signs, why they are none."""
    return _field(default, values.choice(*names, why=why), says)


def integers(default: tuple[int, ...], *, at_least: int, says: str = "") -> Any:
    """A tuple of whole numbers."""
    return _field(default, values.several(values.integer(at_least=at_least)), says)


def numbers(default: tuple[float, ...], *, says: str = "", **bounds: float) -> Any:
    """A tuple of finite numbers."""
    return _field(default, values.several(values.number(**bounds)), says)


def number_or_numbers(default: float, *, at_least: float, says: str = "") -> Any:
    """One number for all workers, or a tuple with one for each."""
    return _field(default, values.one_or_several(values.number(at_least=at_least)), says)


def with_options(group: str) -> Callable[[type[_Group]], type[_Group]]:
    """Makes a dataclass of a group of fields, with those of the options of its kind of part.

    They stand behind the group's own fields; behind them is `arguments`, for a part that is named
    by its import path.
    """

    def add(fields: type[_Group]) -> type[_Group]:
        for name, option in kinds.options_of(group).items():
            fields.__annotations__[name] = Any
            says = f"{option.unit} {option.says}".strip()
            setattr(fields, name, _field(option.default, _written(option.rule), says))
        fields.__annotations__[kinds.ARGUMENTS] = Any
        setattr(fields, kinds.ARGUMENTS, arguments())
        return dataclasses.dataclass(frozen=True, kw_only=True)(fields)

    return add


def _written(rule: values.Rule) -> values.Rule:
    """The same rule, for values that JSON can hold."""

    def parse(value: Any) -> Any:
        kept = rule.parse(value)
        try:
            json.dumps(kept)
        except TypeError:
            raise values.Refused("a configuration holds no object") from None
        return kept

    return dataclasses.replace(rule, parse=parse)


def arguments() -> Any:
    """The arguments of a part that is named by its import path: `{"name": value}`.

    Kept as a tuple of pairs, so that a configuration can be hashed.
    """

    def parse(value: Any) -> tuple[tuple[str, Any], ...]:
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Mapping):
            value = value[0]  # --config.quota.arguments="{'name': 3}"
        if isinstance(value, (tuple, list)):
            try:
                value = dict(value)
            except (TypeError, ValueError):
                raise values.Refused from None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise values.Refused
        return tuple(sorted((key, _frozen(part)) for key, part in value.items()))

    rule = values.Rule("a dict of the options of a part and their values", parse)
    return _field((), rule, "options of a part that is named by its import path")


def _frozen(value: Any) -> Any:
    """A JSON value that can be hashed."""
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise values.Refused


def records(record_type: type, *, says: str = "") -> Any:
    """A tuple of mappings, each with the fields of `record_type`, kept as such records."""
    names = [field.name for field in dataclasses.fields(record_type)]
    must = [
        field.name
        for field in dataclasses.fields(record_type)
        if field.default is dataclasses.MISSING
    ]

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Mapping) or not isinstance(value, Iterable):
            raise values.Refused
        if isinstance(value, (str, bytes)):
            raise values.Refused
        parsed = []
        for index, entry in enumerate(value):
            if isinstance(entry, record_type):
                entry = dataclasses.asdict(entry)  # type: ignore[call-overload]
            if not isinstance(entry, Mapping):
                raise values.Refused(f"entry {index} is {entry!r}")
            errors: list[str] = []
            given = {key: part for key, part in entry.items() if part is not None}
            right = parse_group(record_type, given, "", errors)
            errors += [f"{name}: missing." for name in must if name not in given]
            if errors:
                raise values.Refused(f"entry {index}: " + " ".join(errors))
            parsed.append(record_type(**{key: right[key] for key in given}))
        return tuple(parsed)

    words = f"a tuple of dicts with keys of {', '.join(names)}, the first {len(must)} in each"
    return _field((), values.Rule(words, parse), says)


def optional(field: Any) -> Any:
    """The same rule, with None for "not given" as the default."""
    return dataclasses.field(default=None, metadata=field.metadata)


def required(field: Any) -> Any:
    """The same rule without a default."""
    return dataclasses.field(metadata=field.metadata)


def leaf_names(parent: type, prefix: str = "") -> list[str]:
    """Returns the dotted names of all the fields below `parent`."""
    names = []
    for field in dataclasses.fields(parent):
        group = group_type(field)
        dotted = f"{prefix}{field.name}"
        names += leaf_names(group, f"{dotted}.") if group else [dotted]
    return names


def rows(parent: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted name, default, what it is, what is allowed) of all the fields below `parent`."""
    for field in dataclasses.fields(parent):
        dotted = f"{prefix}{field.name}"
        if (group := group_type(field)) is not None:
            yield from rows(group, f"{dotted}.")
            continue
        kind, allowed = kinds.KINDS.get(prefix.removesuffix(".")), field.metadata["rule"].allowed
        if kind is not None and field.name == kind.key:
            allowed = f"one of {', '.join(kind.registry)}, or the import path of a factory"
        yield dotted, repr(field.default), field.metadata["says"], allowed


def group_type(field: dataclasses.Field[Any]) -> Any:
    """Returns the dataclass of a field that is a group of fields, None for a single one."""
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory


def unknown_name(name: str, known: Sequence[str]) -> str:
    """Returns the message about a field that does not exist, with the nearest that does."""
    hint = _INSTEAD.get(name.split(".")[-1], "") or values.nearest(name, known)
    if not hint:  # 'polcy' alone, or in the wrong group
        last = [dotted for dotted in known if dotted.split(".")[-1] == name.split(".")[-1]]
        hint = f" Did you mean {last[0]!r}?" if last else ""
    hint = hint or f" There are: {', '.join(known)}."
    return f"{name or repr(name)}: there is no such field.{hint}"


def parse_group(
    parent: type, given: Mapping[Any, Any], prefix: str, errors: list[str]
) -> dict[str, Any]:
    """Applies the rules below `parent` to a nested mapping; what is not given is left out.

    Args:
      parent: a dataclass whose fields were made by the functions of this module.
      given: the values, groups as mappings.
      prefix: what stands before a name in messages, `""` or `"data."`.
      errors: gets a line for each field that is wrong.

    Returns:
      the values that were right, groups as dicts.
    """
    fields = {field.name: field for field in dataclasses.fields(parent)}
    right: dict[str, Any] = {}
    for name, value in given.items():
        dotted = f"{prefix}{name}"
        value = values.plain(value)
        if name not in fields:
            known = leaf_names(parent, prefix)
            inner = [f"{dotted}.{part}" for part in value] if isinstance(value, Mapping) else []
            errors += [unknown_name(each, known) for each in inner or [dotted]]
        elif (below := group_type(fields[name])) is None:
            try:
                right[name] = fields[name].metadata["rule"].parse(value)
            except values.Refused as refused:
                rule, default = fields[name].metadata["rule"], fields[name].default
                default = None if default is dataclasses.MISSING else default
                errors.append(values.refusal(dotted, value, rule, default, str(refused)))
        elif isinstance(value, Mapping):
            right[name] = parse_group(below, value, f"{dotted}.", errors)
        else:
            names = ", ".join(leaf_names(below, f"{dotted}."))
            errors.append(f"{dotted}: got {value!r}, but it is a group of fields. Set {names}.")
    return right
