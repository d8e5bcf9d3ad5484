"""How is an option declared, and which values may it have?

An option is declared once, where Python has it: as a parameter of a part's factory, or as a field
of a configuration's dataclass.

    wait_rounds: Annotated[int, options.integer(at_least=1, unit="rounds", says="before …")] = 8

The default is Python's; range, unit and a sentence stand in the annotation. `options_of` finds all
of it. From there come the checks (`Option.check`), the command line (`Option.read`), `--help`, and
the tables of the pages.

A `Rule` turns a value as it comes from Python, JSON or the command line into the value that is
kept, or refuses it. A bool is not a number; an integer is good for a float, a list or a single
value for a tuple.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

_MOST = 2**31 - 1
_MOST_SHOWN = 200  # characters of a value in a message
_TRUTHS = dict.fromkeys(("true", "t", "1"), True) | dict.fromkeys(("false", "f", "0"), False)


_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_path(name: str) -> bool:
    """Whether a name has the form `module:function`."""
    return _PATH.fullmatch(name) is not None


class Refused(Exception):
    """A rule's answer to a value that it does not take."""


def literal(text: str) -> Any:
    """What Python reads in it; the text itself where that is nothing."""
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.literal_eval(text)
    return text


class Rule(NamedTuple):
    """Turns a given value into the kept one, and says in words which values it takes."""

    allowed: str
    parse: Callable[[Any], Any]
    names: tuple[str, ...] = ()
    read: Callable[[str], Any] = literal  # what a text of the command line means


def _kept_if(is_right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """What a rule does that keeps a value as it was given, where it is right."""

    def parse(value: Any) -> Any:
        if not is_right(value):
            raise Refused
        return value

    return parse


class Option(NamedTuple):
    """An option: what it may be, in which unit, a sentence about it, and its default."""

    rule: Rule
    unit: str
    says: str
    default: Any = inspect.Parameter.empty  # that of the signature, or of the dataclass

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def told(self) -> str:
        """What it is, as `--help` and the tables have it."""
        return f"{self.unit} {self.says}".strip()

    def check(self, name: str, value: Any) -> Any:
        """The value that is kept of what was given.

        Args:
            name: for the message.
            value: what a user gave.

        Returns:
            The value, in the type that the rule keeps.

        Raises:
            ValueError: it is not allowed; names the option, the value and what is.
        """
        value = plain(value)
        try:
            return self.rule.parse(value)
        except Refused as refused:
            detail = f" ({refused})" if str(refused) else ""
        hint = nearest(value, self.rule.names)
        if not hint and not self.is_required and self.default not in (None, (), ""):
            hint = f" The default is {self.default!r}."
        shown = repr(value)
        shown = shown if len(shown) < _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        raise ValueError(f"{name}: got {shown}{detail}, must be {self.rule.allowed}.{hint}")


@functools.cache
def options_of(declared: Callable[..., Any]) -> dict[str, Option]:
    """The options of a factory, or of a dataclass, by name, with their defaults.

    A field of a dataclass that is a dataclass itself is a group of options, and none.

    Args:
        declared: a factory, or a dataclass.

    Returns:
        `{name: Option}`, in the order of the signature.

    Raises:
      TypeError: a parameter has no option in its annotation.
    """
    hints = typing.get_type_hints(inspect.unwrap(declared), include_extras=True)
    found = {}
    for name, parameter in inspect.signature(declared).parameters.items():
        hint = hints.get(name)
        stated = [o for o in getattr(hint, "__metadata__", ()) if isinstance(o, Option)]
        if len(stated) == 1:
            found[name] = stated[0]._replace(default=parameter.default)
        elif not dataclasses.is_dataclass(hint):
            raise TypeError(
                f"{declared.__module__}:{declared.__qualname__}: the parameter {name!r} states no "
                "option; annotate it by Annotated[int, parts.integer(says='…')]"
            )
    return found


def plain(value: Any) -> Any:
    """The value in Python's own types, where it is a NumPy number or array."""
    return value.tolist() if hasattr(value, "tolist") else value


def nearest(name: object, names: Sequence[str]) -> str:
    """Returns ` Did you mean 'x'?` for the most similar of `names`, or an empty string."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def nearest_field(name: str, names: Sequence[str]) -> str:
    """As `nearest`, of dotted names. That two are of one group does not make them similar."""
    group = name[: name.rfind(".") + 1]
    own = {each.removeprefix(group): each for each in names if each.startswith(group)}
    if not own:
        return nearest(name, names)
    close = difflib.get_close_matches(name.removeprefix(group), own, n=1, cutoff=0.5)
    return f" Did you mean {own[close[0]]!r}?" if close else ""


# --- What an option may be ---


def option(rule: Rule, *, unit: str = "", says: str = "") -> Option:
    """An option with any rule.

    Args:
        rule: what is allowed, and how it is read.
        unit: such as "rounds"; stands before `says`.
        says: a sentence without its subject, for `--help` and the tables.

    Returns:
        What stands in `Annotated[type, …]` of a parameter.
    """
    return Option(rule, unit, says)


def integer(*, at_least: int = 0, at_most: int = _MOST, unit: str = "", says: str = "") -> Option:
    """A whole number from `at_least` to `at_most`.

    Args:
        at_least: the least that is allowed.
        at_most: the most; by default 2^31 - 1.
        unit: such as "rounds"; stands before `says`.
        says: a sentence without its subject, for `--help` and the tables.
    """
    upper = "" if at_most == _MOST else f" and at most {at_most}"

    def is_right(value: Any) -> bool:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and at_least <= value <= at_most

    return Option(Rule(f"an integer of at least {at_least}{upper}", _kept_if(is_right)), unit, says)


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    unit: str = "",
    says: str = "",
) -> Option:
    """A finite number within bounds; an integer is taken and kept as a float.

    Args:
        at_least: the least that is allowed.
        above: or what it must be above.
        at_most: the most that is allowed.
        below: or what it must be below.
        unit: such as "rounds"; stands before `says`.
        says: a sentence without its subject, for `--help` and the tables.
    """
    bounds = {"of at least": at_least, "above": above, "at most": at_most, "below": below}
    words = " and ".join(f"{word} {b:g}" for word, b in bounds.items() if b is not None)

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Refused
        try:
            value = float(value)
        except OverflowError:
            raise Refused from None
        low = (at_least is not None and value < at_least) or (above is not None and value <= above)
        high = (at_most is not None and value > at_most) or (below is not None and value >= below)
        if low or high or not math.isfinite(value):
            raise Refused
        return value

    return Option(Rule(f"a finite number {words}".strip(), parse), unit, says)


def flag(*, says: str = "") -> Option:
    """True or false.

    Args:
        says: a sentence without its subject, for `--help` and the tables.
    """

    def read(text: str) -> Any:
        return _TRUTHS.get(text.lower(), literal(text))

    parse = _kept_if(lambda value: isinstance(value, bool))
    return Option(Rule("true or false", parse, read=read), "", says)


def text(*, may_be_empty: bool = False, says: str = "") -> Option:
    """A string; the empty one only where it stands for a default."""
    parse = _kept_if(lambda value: isinstance(value, str) and bool(value or may_be_empty))
    allowed = "a string" if may_be_empty else "a string, not empty"
    return Option(Rule(allowed, parse, read=str), "", says)


def choice(
    *names: str,
    why: Mapping[str, str] = MappingProxyType({}),
    or_path: bool = False,
    says: str = "",
) -> Option:
    """One of a few names.

    Args:
        names: that are allowed.
        why: of names that people try and that are none, the reason; in lower case, without signs.
        or_path: whether the import path of a function of one's own is allowed, too.
        says: what it is.
    """

    def parse(value: Any) -> str:
        is_own = or_path and isinstance(value, str) and is_path(value)
        if not is_own and (not isinstance(value, str) or value not in names):
            plain_name = re.sub(r"[^a-z]", "", str(value).lower())
            raise Refused(*(why[plain_name],) if plain_name in why else ())
        return value

    own = ", or 'module:function' of your own" if or_path else ""
    return Option(Rule(f"one of {', '.join(names)}{own}", parse, names, read=str), "", says)


def several(one: Option, *, unit: str = "", says: str = "") -> Option:
    """A tuple, each entry by the rule of `one`; a single number is a tuple of one."""

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (int, float)):
            value = (value,)  # --config.model.hidden=64
        if not isinstance(value, (tuple, list)):
            raise Refused
        return tuple(one.rule.parse(entry) for entry in value)

    return Option(Rule(f"a tuple, each entry {one.rule.allowed}", parse), unit, says)


def names(*allowed: str, says: str = "") -> Option:
    """A tuple of names; a text is split at its commas."""

    def parse(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        if not isinstance(value, (tuple, list)):
            raise Refused
        for name in value:
            if name not in allowed:
                raise Refused(f"{name!r} is none of them")
        return tuple(value)

    return Option(Rule(f"some of {', '.join(map(repr, allowed))}", parse, allowed), "", says)


def numbers(
    *, at_least: float | None = None, above: float | None = None, unit: str = "", says: str = ""
) -> Option:
    """A tuple of finite numbers.

    Args:
        at_least: the least that each may be.
        above: or what each must be above.
        unit: such as "rounds"; stands before `says`.
        says: a sentence without its subject, for `--help` and the tables.
    """
    return several(number(at_least=at_least, above=above), unit=unit, says=says)


def one_or_several(one: Option, *, says: str = "") -> Option:
    """A value for all workers, or a tuple with one for each."""

    def parse(value: Any) -> Any:
        return (several(one) if isinstance(value, (tuple, list)) else one).rule.parse(value)

    words = f"{one.rule.allowed}, or a tuple of such, one for each worker"
    return Option(Rule(words, parse), "", says)


def count_or(prefix: str, *, says: str = "") -> Option:
    """A whole number, or a text of a prefix and a number of at least 1."""
    count = integer(at_least=1).rule

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return count.parse(value)
        if not re.fullmatch(re.escape(prefix) + "[1-9][0-9]{0,3}", value):
            raise Refused
        return value

    return Option(Rule(f"{count.allowed}, or a text such as '{prefix}4'", parse), "", says)


def text_or_object(allowed: str, *types: type, says: str = "") -> Option:
    """A string, not empty, or an object of one of `types`; `allowed` says so in words."""
    parse = _kept_if(lambda value: isinstance(value, (*types, str)) and value != "")
    return Option(Rule(allowed, parse, read=str), "", says)
