"""The fields of a configuration: nested groups of options, and what a user is told about them.

A group is a frozen dataclass, whose fields are options (`hetjax.parts.options`) or groups again.
`parse_group` applies the rules to a nested mapping and collects a line for every wrong field.
What concerns several fields at once is left to `checks`, the fields to `groups`.
"""

import contextlib
import dataclasses
import functools
import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetjax.config import kinds
from hetjax.parts import options

_INSTEAD = {  # of fields that other libraries have
    "batch_size": " The batch of an update is budget * microbatch_size examples: set those two.",
    "lr": " Did you mean 'optimizer.learning_rate'?",
}


def _held(value: Any) -> Any:
    """A value that JSON can hold, its lists as tuples."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise options.Refused("a configuration holds no object") from None
    return tuple(map(_held, value)) if isinstance(value, (tuple, list)) else value


def _pairs(value: Any) -> tuple[tuple[str, Any], ...]:
    """A dict as a tuple of pairs, so that a configuration can be hashed."""
    if isinstance(value, (tuple, list)):
        with contextlib.suppress(TypeError, ValueError):
            value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise options.Refused
    return tuple(sorted((key, _held(part)) for key, part in value.items()))


ARGUMENTS = options.Option(
    options.Rule("a dict of the options of a part and their values", _pairs),
    unit="",
    says="options of the part that is named",
    default=(),
)
_OF_A_PART = options.option(options.Rule("what the part's factory takes", _held))


def beside(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the options of its part beside its own fields.

    One whose name is that of a field stays in `arguments`.
    """
    given = dict(group[kinds.ARGUMENTS])
    inside = {name: given.pop(name) for name in group.keys() & given.keys()}
    return {**group, kinds.ARGUMENTS: inside, **given}


def records(record_type: type, *, says: str = "") -> options.Option:
    """A tuple of mappings, each with the fields of `record_type`, kept as such records."""
    known = options.options_of(record_type)
    must = [name for name, option in known.items() if option.is_required]

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (Mapping, str, bytes)) or not isinstance(value, Iterable):
            raise options.Refused
        return tuple(_record(index, entry) for index, entry in enumerate(value))

    def _record(index: int, entry: Any) -> Any:
        if isinstance(entry, record_type):
            entry = dataclasses.asdict(entry)  # type: ignore[call-overload]
        if not isinstance(entry, Mapping):
            raise options.Refused(f"entry {index} is {entry!r}")
        errors: list[str] = []
        given = {key: part for key, part in entry.items() if part is not None}
        right = parse_group(record_type, given, "", errors)
        errors += [f"{name}: missing." for name in must if name not in given]
        if errors:
            raise options.Refused(f"entry {index}: " + " ".join(errors))
        return record_type(**right)

    words = f"a tuple of dicts with keys of {', '.join(known)}, the first {len(must)} in each"
    return options.option(options.Rule(words, parse), says=says)


@functools.cache
def declared(parent: type) -> dict[str, options.Option | type]:
    """What each field of a group is: an option, or the dataclass of a group."""
    below, hints = options.options_of(parent), typing.get_type_hints(parent)
    return {
        field.name: below.get(field.name) or hints[field.name]
        for field in dataclasses.fields(parent)
    }


def leaves(parent: type, prefix: str = "") -> Iterator[tuple[str, options.Option]]:
    """(dotted name, option) of all the fields below `parent`, and of the options of all parts."""
    for name, field in declared(parent).items():
        if isinstance(field, options.Option):
            yield f"{prefix}{name}", field
        else:
            yield from leaves(field, f"{prefix}{name}.")
        for option, owners, stated in kinds.stated(name) if name in kinds.KINDS else ():
            unit = f"of {owners}: {stated.unit}".strip()
            yield f"{prefix}{name}.{option}", stated._replace(unit=unit)


def leaf_names(parent: type, prefix: str = "") -> list[str]:
    """Returns the dotted names of all the fields below `parent`."""
    return [dotted for dotted, _ in leaves(parent, prefix)]


def unknown_name(name: str, known: Sequence[str]) -> str:
    """Returns the message about a field that does not exist, with the nearest that does."""
    hint = _INSTEAD.get(name.split(".")[-1], "") or options.nearest_field(name, known)
    group = name[: name.rfind(".") + 1]
    own = [dotted for dotted in known if dotted.startswith(group)]
    hint = hint or f" There are: {', '.join(own or known)}."
    return f"{name or repr(name)}: there is no such field.{hint}"


def parse_group(
    parent: type, given: Mapping[Any, Any], prefix: str, errors: list[str]
) -> dict[str, Any]:
    """Applies the rules below `parent` to a nested mapping; what is not given is left out.

    Args:
      parent: a dataclass of options and groups.
      given: the values, groups as mappings.
      prefix: what stands before a name in messages, `""` or `"data."`.
      errors: gets a line for each field that is wrong.

    Returns:
      the values that were right, groups as their dataclasses.
    """
    fields, of_part = declared(parent), prefix[:-1] in (*kinds.KINDS, "rule", "slices")
    right: dict[str, Any] = {}
    for name, value in given.items():
        value, field, dotted = options.plain(value), fields.get(name), f"{prefix}{name}"
        if field is None and of_part and isinstance(name, str):
            field = _OF_A_PART  # which the factory checks
        if field is None:
            inner = [f"{dotted}.{part}" for part in value] if isinstance(value, Mapping) else []
            errors += [unknown_name(each, leaf_names(parent, prefix)) for each in inner or [dotted]]
        elif isinstance(field, options.Option):
            try:
                right[name] = field.check(dotted, value)
            except ValueError as error:
                errors.append(str(error))
        elif isinstance(value, Mapping):
            right[name] = field(**parse_group(field, value, f"{dotted}.", errors))
        else:
            names = ", ".join(leaf_names(field, f"{dotted}."))
            errors.append(f"{dotted}: got {value!r}, but it is a group of fields. Set {names}.")
    if given_beside := {name: right.pop(name) for name in right.keys() - fields.keys()}:
        right[kinds.ARGUMENTS] = _pairs(given_beside | dict(right.get(kinds.ARGUMENTS, ())))
    return right
