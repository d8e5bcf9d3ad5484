"""What is a part of a run, and how is one made?

A part is a record of functions and properties that a user brings: a quota policy, an ordering, a
reducer, a gate. A factory makes one from options. It states each option once, in its signature
(`hetjax.parts.options`):

    @parts.factory
    def patient(
        *,
        wait_rounds: Annotated[int, parts.integer(at_least=1, unit="rounds", says="before …")] = 8,
    ) -> QuotaPolicy: ...

What a factory needs of a run (how many workers there are, say) is no option: the record has a
function that the run calls with it.

`made_by` of a record remembers the factory and its arguments, so that a run can be written down
and compared with another one. A record that is made by hand has none.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from hetjax.parts import options
from hetjax.parts.options import Option, choice, flag, integer, number, numbers, option, options_of
from hetjax.parts.options import is_path as is_path

__all__ = [
    "Facts",
    "Made",
    "Option",
    "choice",
    "factory",
    "flag",
    "integer",
    "is_factory",
    "load",
    "made_by",
    "number",
    "numbers",
    "option",
    "options_of",
]

_Arguments = ParamSpec("_Arguments")
_Part = TypeVar("_Part")
_IS_FACTORY = "__hetjax_factory__"
_SHOWN = (bool, int, float, str, list, tuple, dict, set)
_MOST_SHOWN = 16  # elements of an array, in a message


class Facts(NamedTuple):
    """What a run knows before it begins; a part's `problems` are asked with it."""

    num_workers: int
    budget: int  # microbatches of a round, over all workers
    shortest_secs: float = 0.0  # emulated, of the first microbatch to end, in the mean; 0: unknown


def no_problems(facts: Facts) -> Iterable[str]:
    """What a part says that works in every run."""
    return ()


class Made(NamedTuple):
    """How a part was made: all that is needed to make it again."""

    path: str  # 'module:function' of the factory
    arguments: Mapping[str, Any]  # of all options, JSON values
    fields: tuple[Any, ...]  # of the record as it was made, to notice one that was changed


def path_of(function: Callable[..., Any]) -> str:
    """`module:function`, from where it can be imported; also of a function inside another."""
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"


def make(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    prefix: str,
    unknown: Callable[[str], str] | None = None,
) -> Any:
    """Makes a part, of arguments as a user gives them; other options have their defaults.

    Args:
      factory: makes it.
      arguments: by name.
      prefix: stands before an option's name in a message.
      unknown: the message about an option that there is not; None: in the words of `factory`.

    Raises:
      ValueError: an argument is wrong, unknown or missing; a line for each.
    """
    known, kept, lines = options_of(factory), {}, []
    for name, value in arguments.items():
        if name in known:
            try:
                kept[name] = known[name].check(f"{prefix}{name}", value)
            except ValueError as error:
                lines.append(str(error))
        elif unknown is not None:
            lines.append(unknown(name))
        else:
            mine = [f"{prefix}{each}" for each in known]
            hint = options.nearest_field(f"{prefix}{name}", mine)
            hint = hint or f" It has: {', '.join(mine) or 'none'}."
            lines.append(f"{prefix}{name}: {factory.__name__!r} has no such option.{hint}")
    for name in [each for each in known if each not in arguments]:
        kept[name] = known[name].default
        if known[name].is_required:
            must = known[name].rule.allowed
            lines.append(f"{prefix}{name}: missing, must be {must}: {known[name].says}.")
    if lines:
        raise ValueError("\n".join(lines))
    return remembered(factory.__wrapped__(**kept), factory, kept)  # type: ignore[attr-defined]


def factory(function: Callable[_Arguments, _Part]) -> Callable[_Arguments, _Part]:
    """Makes a factory of a function with options: it checks them, and its parts remember them.

    The function returns a record with a field `made_by`.

    Args:
      function: its parameters are annotated `Annotated[type, option]`, with defaults.

    Returns:
      The function, which checks its arguments before it is called.

    Raises:
      ValueError: (when it is called) an argument is out of range, unknown or missing. A line for
        each names the factory, the option, the value and what is allowed.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checking(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Part:
        named = dict(zip(signature.parameters, args, strict=False))
        if len(args) > len(signature.parameters) or named.keys() & kwargs.keys():
            signature.bind(*args, **kwargs)  # Python's own words are the best here
        return make(checking, named | kwargs, f"{function.__name__}: ")

    setattr(checking, _IS_FACTORY, True)
    return checking


def by_name(*factories: Callable[..., _Part]) -> dict[str, Callable[..., _Part]]:
    """A registry of factories, each by the name of its function, which configurations use."""
    return {each.__name__: each for each in factories}


def is_factory(thing: Any) -> bool:
    """Whether it was made by `factory`.

    Args:
      thing: anything.
    """
    return getattr(thing, _IS_FACTORY, False)


def remembered(made: Any, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The record with `made_by`, if its factory can be imported and the arguments written."""
    path = path_of(function)
    if "<" in path:  # of a function inside another, or of a lambda
        return made
    try:
        plain = json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError):
        return made
    return made._replace(made_by=Made(path, plain, _fields_of(made)))


def _fields_of(part: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in zip(part._fields, part, strict=True) if name != "made_by")


def made_by(part: Any) -> Made | None:
    """How a part was made; None where it cannot be written down.

    That is a part made by hand or by a function inside another one, one whose factory was given
    what JSON cannot hold, and one that was changed after it was made.

    Args:
      part: a record that a factory made, or any other.
    """
    made: Made | None = getattr(part, "made_by", None)
    fields = () if made is None else zip(_fields_of(part), made.fields, strict=True)
    return made if all(mine is theirs for mine, theirs in fields) else None


def label(part: Any) -> str:
    """What a part that cannot be written down is called: where its first function is from."""
    return path_of(next((value for value in part if callable(value)), part))


def named(part: Any) -> str:
    """What a message calls a part: the path of its factory, or where its first function is from."""
    made = made_by(part)
    return repr(label(part) if made is None else made.path)


def is_ours(part: Any) -> bool:
    """Whether a factory of hetjax's own made it, of which tests know that it keeps what it says."""
    made = made_by(part)
    return made is not None and made.path.startswith("hetjax.")


def takes(function: Callable[..., Any], count: int, *names: str) -> bool:
    """Whether a function can be called with so many arguments, as far as its signature tells.

    Args:
      function: any.
      count: of the arguments that are given by place.
      names: of those that are given by name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of one that is not written in Python
        return True
    with contextlib.suppress(TypeError):
        signature.bind(*range(count), **dict.fromkeys(names))
        return True
    return False


def asked_for(function: Callable[..., Any], names: Sequence[str], skip: int = 0) -> tuple[str, ...]:
    """Those of `names` that are the name of an argument of a function, behind the first `skip`."""
    with contextlib.suppress(TypeError, ValueError):  # of one that is not written in Python
        arguments = list(inspect.signature(function).parameters)[skip:]
        return tuple(name for name in names if name in arguments)
    return ()


def array_of(given: Any) -> np.ndarray:
    """What a part returned as an array; of no shape and no numbers where it is none."""
    with contextlib.suppress(ValueError):  # a list of lists of several lengths
        return np.asarray(given)
    return np.asarray(None)


def wrong_functions(part: Any, functions: Mapping[str, int]) -> str:
    """What is wrong with the functions of a part, 'NAME is …'; '' where nothing is.

    Args:
      part: a record.
      functions: their names, and with how many arguments each is called.
    """
    for name, count in functions.items():
        function = getattr(part, name)
        if not callable(function):
            return f"{name} is {function!r} and no function"
        if not takes(function, count):
            plural = "" if count == 1 else "s"
            return f"{name}{inspect.signature(function)} does not take {count} argument{plural}"
    return ""


def shown(given: Any) -> str:
    """What a user gave, in a few words for a message: a long `repr` is cut short."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if inspect.isroutine(given):
        return f"the function {getattr(given, '__name__', '')}"
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        kind = f"{given.dtype}{list(given.shape)}"
        is_known = isinstance(given, np.ndarray | np.generic) and given.size <= _MOST_SHOWN
        return f"{kind} {given.tolist()}" if is_known else kind
    if given is None or type(given) in _SHOWN:
        return repr(given) if len(repr(given)) < 80 else f"{repr(given)[:80]}…"
    name = type(given).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def load(path: str) -> Callable[..., Any]:
    """Imports the factory at `module:function`.

    Args:
      path: such as "my.module:my_policy".

    Returns:
      The factory, to be called with its options.

    Raises:
      ValueError: there is no such module or function, or it is no factory.
    """
    found = imported(path)
    if not is_factory(found):
        raise ValueError(f"{path!r} is no factory of parts; put @hetjax.parts.factory above it")
    return found


def imported(path: str) -> Any:
    """What is at `module:name`.

    Args:
      path: such as "my.module:build".

    Raises:
      ValueError: there is no such module, or no such name in it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        is_lost = getattr(error, "name", None) == module.partition(".")[0]
        way = f". Modules are looked for in {os.getcwd()} and in PYTHONPATH" if is_lost else ""
        raise ValueError(f"{path!r} cannot be imported: {error}{way}") from error
