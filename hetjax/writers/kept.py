"""Which run of a tracker goes on? Its id is kept in the workdir, in `writers.json`."""

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from hetjax import paths, whole
from hetjax.writers import records

_FILE = "writers.json"


def place(run: records.RunInfo, given: str | pathlib.Path | None, name: str, factory: str) -> str:
    """Where a writer writes: the given place, or `name` in the workdir; an absolute path.

    Raises:
        Misplaced: there is neither.
    """
    if given is not None:
        return str(paths.on_disk(given))
    if run.workdir is None:
        raise records.Misplaced(f"writers.{factory}(): give it a place, or the run a workdir=")
    return str(run.workdir / name)


def load(run: records.RunInfo, tracker: str) -> dict[str, Any]:
    """What was saved of a tracker, where the run was resumed; {} else."""
    if run.workdir is None or not run.first_step:
        return {}
    return _read(run.workdir / _FILE).get(tracker, {})


def save(run: records.RunInfo, tracker: str, about: Mapping[str, Any]) -> None:
    """Saves what a resumed run needs to go on with the same run of the tracker."""
    if run.workdir is not None:
        path = run.workdir / _FILE
        with (whole.written if run.lead is None else run.lead.written)(path) as new:
            new.write_text(json.dumps({**_read(path), tracker: dict(about)}, indent=2) + "\n")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted names, lists as text.

    Example:
        >>> flat({"seed": 0, "quota": {"policy": "equal"}, "of": [1, 2]})
        {'seed': 0, 'quota.policy': 'equal', 'of': '[1, 2]'}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            is_plain = isinstance(value, bool | int | float | str)
            found[f"{prefix}{name}"] = value if is_plain else str(value)
    return found


def _read(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}
