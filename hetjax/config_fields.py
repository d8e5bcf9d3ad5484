"""What one field of a configuration may hold, and what a user is told who gives something else.

Each function here makes a dataclass field with a default and a rule. A rule turns a value as
it comes from Python, JSON or the command line into the value that is kept, or refuses it: a
bool is not a number, an integer is good for a float, a list or a single value for a tuple.
`parse_group` applies the rules to a nested mapping and collects a line for every wrong field.

What concerns several fields at once is left to `config_rules`, the fields to `config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_MOST = 2**31 - 1


class Refused(Exception):
    """A rule's answer to a value that it does not take."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Turns a given value into the kept one, and says in words which values it takes."""

    allowed: str
    parse: Callable[[Any], Any]
    names: tuple[str, ...] = ()


def _field(default: Any, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule})


def integer(default: int, *, at_least: int = 0, at_most: int = _MOST, even: bool = False) -> Any:
    """A whole number from `at_least` to `at_most`."""
    kind = "an even integer" if even else "an integer"
    upper = "" if at_most == _MOST else f" and at most {at_most}"

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused
        if not at_least <= value <= at_most or (even and value % 2):
            raise Refused
        return value

    return _field(default, Rule(f"{kind} of at least {at_least}{upper}", parse))


def _number_rule(
    at_least: float | None, above: float | None, at_most: float | None, below: float | None
) -> Rule:
    bounds = [
        f"{words} {bound:g}"
        for words, bound in (
            ("of at least", at_least),
            ("above", above),
            ("at most", at_most),
            ("below", below),
        )
        if bound is not None
    ]

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Refused
        try:
            value = float(value)
        except OverflowError:
            raise Refused from None
        if (
            not math.isfinite(value)
            or (at_least is not None and value < at_least)
            or (above is not None and value <= above)
            or (at_most is not None and value > at_most)
            or (below is not None and value >= below)
        ):
            raise Refused
        return value

    return Rule(" ".join(["a finite number", " and ".join(bounds)]).strip(), parse)


def number(
    default: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A finite number within bounds; an integer is taken and kept as a float."""
    return _field(default, _number_rule(at_least, above, at_most, below))


def flag(default: bool) -> Any:
    """True or False."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise Refused
        return value

    return _field(default, Rule("true or false", parse))


def text(default: str, *, may_be_empty: bool = False) -> Any:
    """A string; the empty one only where it stands for a default."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not (value or may_be_empty):
            raise Refused
        return value

    return _field(default, Rule("a string" if may_be_empty else "a string, not empty", parse))


def choice(default: str, *names: str) -> Any:
    """One of a few names."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise Refused
        return value

    return _field(default, Rule(f"one of {', '.join(names)}", parse, names=names))


def _several(parse_one: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def parse(value: Any) -> tuple[Any, ...]:
        return tuple(parse_one(one) for one in _as_tuple(value))

    return parse


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (int, float)):
        return (value,)  # --config.model.hidden=64
    if not isinstance(value, (tuple, list)):
        raise Refused
    return tuple(value)


def integers(default: tuple[int, ...], *, at_least: int) -> Any:
    """A tuple of whole numbers."""
    one: Rule = integer(0, at_least=at_least).metadata["rule"]
    return _field(default, Rule(f"a tuple, each entry {one.allowed}", _several(one.parse)))


def numbers(
    default: tuple[float, ...], *, at_least: float | None = None, above: float | None = None
) -> Any:
    """A tuple of finite numbers."""
    one = _number_rule(at_least, above, None, None)
    return _field(default, Rule(f"a tuple, each entry {one.allowed}", _several(one.parse)))


def number_or_numbers(default: float, *, at_least: float) -> Any:
    """One number for all workers, or a tuple with one for each."""
    one = _number_rule(at_least, None, None, None)

    def parse(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(one.parse(entry) for entry in value)
        return one.parse(value)

    words = f"{one.allowed}, or a tuple of such, one for each worker"
    return _field(default, Rule(words, parse))


def records(record_type: type) -> Any:
    """A tuple of mappings, each with the fields of `record_type`, kept as such records."""
    names = [field.name for field in dataclasses.fields(record_type)]
    must = [
        field.name
        for field in dataclasses.fields(record_type)
        if field.default is dataclasses.MISSING
    ]

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Mapping) or not isinstance(value, Iterable):
            raise Refused
        if isinstance(value, (str, bytes)):
            raise Refused
        parsed = []
        for index, entry in enumerate(value):
            if isinstance(entry, record_type):
                entry = dataclasses.asdict(entry)  # type: ignore[call-overload]
            if not isinstance(entry, Mapping):
                raise Refused(f"entry {index} is {entry!r}")
            errors: list[str] = []
            given = {key: part for key, part in entry.items() if part is not None}
            values = parse_group(record_type, given, "", errors)
            errors += [f"{name}: missing." for name in must if name not in given]
            if errors:
                raise Refused(f"entry {index}: " + " ".join(errors))
            parsed.append(record_type(**{key: values[key] for key in given}))
        return tuple(parsed)

    words = f"a tuple of dicts with keys of {', '.join(names)}, the first {len(must)} in each"
    return _field((), Rule(words, parse))


def optional(field: Any) -> Any:
    """The same rule, with None for "not given" as the default."""
    return dataclasses.field(default=None, metadata=field.metadata)


def required(field: Any) -> Any:
    """The same rule without a default."""
    return dataclasses.field(metadata=field.metadata)


def nearest(name: object, names: Sequence[str]) -> str:
    """Returns ` Did you mean 'x'?` for the most similar of `names`, or an empty string."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def leaf_names(parent: type, prefix: str = "") -> list[str]:
    """Returns the dotted names of all the fields below `parent`."""
    names = []
    for field in dataclasses.fields(parent):
        group = group_type(field)
        dotted = f"{prefix}{field.name}"
        names += leaf_names(group, f"{dotted}.") if group else [dotted]
    return names


def group_type(field: dataclasses.Field[Any]) -> Any:
    """Returns the dataclass of a field that is a group of fields, None for a single one."""
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory


def unknown_name(name: str, known: Sequence[str]) -> str:
    """Returns the message about a field that does not exist, with the nearest that does."""
    hint = nearest(name, known)
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
    values: dict[str, Any] = {}
    for name, value in given.items():
        dotted = f"{prefix}{name}"
        if hasattr(value, "tolist"):  # a NumPy number or array
            value = value.tolist()
        if name not in fields:
            known = leaf_names(parent, prefix)
            inner = [f"{dotted}.{part}" for part in value] if isinstance(value, Mapping) else []
            errors += [unknown_name(each, known) for each in inner or [dotted]]
        elif (below := group_type(fields[name])) is None:
            try:
                values[name] = fields[name].metadata["rule"].parse(value)
            except Refused as refused:
                errors.append(refusal(dotted, value, fields[name], str(refused)))
        elif isinstance(value, Mapping):
            values[name] = parse_group(below, value, f"{dotted}.", errors)
        else:
            names = ", ".join(leaf_names(below, f"{dotted}."))
            errors.append(f"{dotted}: got {value!r}, but it is a group of fields. Set {names}.")
    return values


def refusal(name: str, value: Any, field: dataclasses.Field[Any], detail: str = "") -> str:
    """Returns the message about a value that a field does not take."""
    rule: Rule = field.metadata["rule"]
    hint = nearest(value, rule.names)
    if not hint and field.default not in (dataclasses.MISSING, None, (), ""):
        hint = f" The default is {field.default!r}."
    extra = f" ({detail})" if detail else ""
    shown = repr(value) if len(repr(value)) < 200 else repr(value)[:200] + "…"
    return f"{name}: got {shown}{extra}, must be {rule.allowed}.{hint}"
