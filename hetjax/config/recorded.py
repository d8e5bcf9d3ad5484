"""Is the configuration that a run has recorded the one that is to go on?"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from hetjax import messages
from hetjax.config import experiment, kinds

_OF_NO_EFFECT = (
    "compilation_cache",
    "data.feed",
    "data.readers",
    "debug",
    "dispatch_depth",
    "loss_over",
    "writers",
)
"""Fields that change no number of a run, which goes on with other values of them too.

A bilevel run has them of each level.
"""


MAY_DIFFER = ("best_by", "best_mode", "checkpoint", "cluster", "ema", "quota", "rules")
"""Groups of which a run may be resumed with other values; `rules` update nothing."""


def check(
    workdir: pathlib.Path,
    config: dict[str, Any],
    *,
    may_differ: Sequence[str] = (),
    may_grow: Sequence[str] = (),
    way: str = "give another directory",
) -> None:
    """Sees that the run in a directory has this configuration, where its `config.json` says which.

    Args:
        workdir: of a run.
        config: plain values.
        may_differ: groups of fields that may have other values there.
        may_grow: numbers that may be smaller there; 0 is no limit.
        way: what to do where it has another one.

    Raises:
        ValueError: if it has another one, or its `config.json` cannot be read.
    """
    with messages.as_mistake(_unusable(workdir), (OSError, AttributeError, json.JSONDecodeError)):
        theirs = read(workdir, config)
        if theirs is None:
            return
        config = config | {name: theirs[name] for name in may_grow if grown(theirs, config, name)}
        theirs, ours = (_without(each, may_differ) for each in (theirs, config))
        _check_given(theirs, ours, way)
    if different := _differences(theirs, ours):
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"workdir {str(workdir)!r} belongs to another configuration "
            f"({'; '.join(different[:3])}{more}); {way}"
        )


def _without(fields: dict[str, Any], may_differ: Sequence[str]) -> dict[str, Any]:
    """What is compared; a level of a bilevel run may differ in the same groups."""
    return {
        name: _without(value, may_differ) if name in ("upper", "lower") else value
        for name, value in fields.items()
        if name not in may_differ
    }


def read(workdir: pathlib.Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration there, with all fields that `config` has; None where there is none."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    return experiment.completed(json.loads(path.read_text()), config)


def grown(theirs: dict[str, Any], ours: dict[str, Any], name: str) -> bool:
    """Whether a number is larger here than there; 0 is no limit. Another kind of run has none."""
    if name not in theirs:
        return False
    before, now = (each[name] or float("inf") for each in (theirs, ours))
    return now > before


def all_grown(workdir: pathlib.Path, config: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What the run in a directory is to have more of than it had: 'epochs 3 to 5'."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # `check` tells
        theirs = read(workdir, config) or {}
        more = [name for name in names if grown(theirs, config, name)]
        return [f"{name} {theirs[name]} to {config[name] or 'any number'}" for name in more]
    return []


def _check_given(theirs: dict[str, Any], ours: dict[str, Any], way: str) -> None:
    """Refuses a run whose part could not be written down there, and is another here."""
    named = [(group, kind.title, kind.key) for group, kind in kinds.KINDS.items()]
    for group, title, key in [*named, ("rule", "local rule", "name")]:
        name, mine = theirs.get(group, {}).get(key), ours.get(group, {}).get(key)
        if isinstance(name, str) and name.startswith(kinds.GIVEN) and name != mine:
            raise ValueError(
                f"the {title} {name.removeprefix(kinds.GIVEN)!r} of this workdir could not be "
                f"written down, here it is {mine!r}. Give the same object again, or {way}"
            )


@contextlib.contextmanager
def usable(workdir: pathlib.Path, lead: Any = None) -> Iterator[None]:
    """Says of an error that a workdir cannot be read or written; or who leads there, in the place
    of this process.

    Raises:
        ValueError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        if lead is not None:
            lead.check()
        raise ValueError(f"{_unusable(workdir)}{error}") from error


def _unusable(workdir: pathlib.Path) -> str:
    return f"workdir {str(workdir)!r} cannot be used: "


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    if name.removeprefix("upper.").removeprefix("lower.") in _OF_NO_EFFECT:
        return []
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return [f"{name}: {_short(theirs)} there, {_short(ours)} here"]
    keys, kind = theirs.keys() | ours.keys(), kinds.KINDS.get(name.rpartition(".")[2])
    if kind is not None and theirs.get(kind.key) != ours.get(kind.key):
        keys = theirs.keys() & ours.keys()  # the options of one part say nothing of the other
    return [
        line
        for key in sorted(keys)
        if theirs.get(key) != ours.get(key)
        for line in _differences(theirs.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
    ]
