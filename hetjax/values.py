"""Which values may an option or a field have?

A `Rule` turns a value as it comes from Python, JSON or the command line into the value that is
kept, or refuses it: a bool is not a number, an integer is good for a float, a list or a single
value for a tuple. `hetjax.parts` gives rules to the options of a part's factory, and
`hetjax.config.fields` to the fields of a configuration.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

_MOST = 2**31 - 1
_MOST_SHOWN = 200  # characters of a value in a message


class Refused(Exception):
    """A rule's answer to a value that it does not take."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Turns a given value into the kept one, and says in words which values it takes."""

    allowed: str
    parse: Callable[[Any], Any]
    names: tuple[str, ...] = ()


def integer(*, at_least: int = 0, at_most: int = _MOST, even: bool = False) -> Rule:
    """A whole number from `at_least` to `at_most`."""
    kind = "an even integer" if even else "an integer"
    upper = "" if at_most == _MOST else f" and at most {at_most}"

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused
        if not at_least <= value <= at_most or (even and value % 2):
            raise Refused
        return value

    return Rule(f"{kind} of at least {at_least}{upper}", parse)


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Rule:
    """A finite number within bounds; an integer is taken and kept as a float."""
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


def flag() -> Rule:
    """True or False."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise Refused
        return value

    return Rule("true or false", parse)


def text(*, may_be_empty: bool = False) -> Rule:
    """A string; the empty one only where it stands for a default."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not (value or may_be_empty):
            raise Refused
        return value

    return Rule("a string" if may_be_empty else "a string, not empty", parse)


def choice(*names: str, why: Mapping[str, str] = MappingProxyType({})) -> Rule:
    """One of a few names.

    Args:
        names: that are allowed.
        why: of names that people try and that are none, the reason; in lower case, without signs.
    """

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            plain_name = re.sub(r"[^a-z]", "", str(value).lower())
            raise Refused(*(why[plain_name],) if plain_name in why else ())
        return value

    return Rule(f"one of {', '.join(names)}", parse, names=names)


def several(one: Rule) -> Rule:
    """A tuple, each entry by the rule `one`; a single number is a tuple of one."""

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (int, float)):
            value = (value,)  # --config.model.hidden=64
        if not isinstance(value, (tuple, list)):
            raise Refused
        return tuple(one.parse(entry) for entry in value)

    return Rule(f"a tuple, each entry {one.allowed}", parse)


def one_or_several(one: Rule) -> Rule:
    """A value for all workers, or a tuple with one for each."""

    def parse(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(one.parse(entry) for entry in value)
        return one.parse(value)

    return Rule(f"{one.allowed}, or a tuple of such, one for each worker", parse)


def text_or_object(allowed: str, *types: type) -> Rule:
    """A string, not empty, or an object of one of `types`; `allowed` says so in words."""

    def parse(value: Any) -> Any:
        if isinstance(value, types) or (isinstance(value, str) and value):
            return value
        raise Refused

    return Rule(allowed, parse)


def plain(value: Any) -> Any:
    """The value in Python's own types, where it is a NumPy number or array."""
    return value.tolist() if hasattr(value, "tolist") else value


def nearest(name: object, names: Sequence[str]) -> str:
    """Returns ` Did you mean 'x'?` for the most similar of `names`, or an empty string."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def refusal(name: str, value: Any, rule: Rule, default: Any, detail: str = "") -> str:
    """Returns the message about a value that a rule does not take.

    Args:
      name: of the option or field.
      value: what was given.
      rule: that refused it.
      default: is named in the message; None, `()` and `""` are not.
      detail: what the rule says about it.
    """
    hint = nearest(value, rule.names)
    if not hint and default not in (None, (), ""):
        hint = f" The default is {default!r}."
    extra = f" ({detail})" if detail else ""
    shown = repr(value) if len(repr(value)) < _MOST_SHOWN else repr(value)[:_MOST_SHOWN] + "…"
    return f"{name}: got {shown}{extra}, must be {rule.allowed}.{hint}"
