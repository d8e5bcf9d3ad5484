"""Which start of a run may be read, and which process writes now?

The process that leads a run has a number in the workdir, which no other can take: that of the
leader before, plus one. What it makes visible it writes into directories of that number and then
renames. What it removes it renames into them. The next leader removes these directories first. So a
leader that was stopped or cut off, and goes on later, changes nothing in the workdir.

A generation is one start of a run; its number is that of its first leader. `begun.json` says from
which step each generation went on. A checkpoint of an older generation after that step is ignored.
"""

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Mapping
from typing import Any

from hetjax import whole
from hetjax.checkpoints import files

DIRECTORY = "generations"  # in the workdir, beside the checkpoints
_BEGUN = "begun.json"
_MOST = 100  # generations that are remembered; those before have nothing left to write into


def this_process() -> dict[str, Any]:
    """Which process this is, for another one that reads it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": now}


def in_use(workdir: pathlib.Path, by: Mapping[str, Any] | str) -> str:
    """What is said of a workdir that another process holds: as of `this_process`, or by name."""
    if not isinstance(by, str):
        by = f"process {by['process']} on {by['host']} since {by['since']}"
    return f"workdir {str(workdir)!r} is in use by {by}"


def newest(checkpoints: pathlib.Path) -> dict[str, Any]:
    """What the newest leader of a run has written of itself; of `number` 0 where there was none.

    `step` is that from which it leads; -1 is before any. `starts` are pairs of a generation and the
    step from which that went on, and both ascend.

    Args:
        checkpoints: the directory of them.
    """
    root = checkpoints.parent / DIRECTORY
    if not (number := _last(root)):
        return {"number": 0, "run_id": "", "step": -1, "starts": []}
    try:
        return json.loads((root / f"{number:08d}" / _BEGUN).read_text()) | {"number": number}
    except FileNotFoundError:
        if _last(root) == number:
            raise
        return newest(checkpoints)  # the next leader has just removed it


def readable(checkpoints: pathlib.Path) -> list[int]:
    """The steps of the checkpoints that may be read, whole or not, in order."""
    starts = newest(checkpoints)["starts"]

    def is_readable(step: int) -> bool:
        needed = max((generation for generation, begun in starts if begun < step), default=0)
        if not needed:
            return True
        with contextlib.suppress(OSError, ValueError, LookupError):
            about = json.loads((checkpoints / f"{step:08d}" / files.ABOUT).read_bytes())["about"]
            return about.get("written_by", {}).get("generation", 0) >= needed  # 0: of an old hetjax
        return True  # who reads it will say that it is damaged

    return sorted(filter(is_readable, files.steps(checkpoints)))


class Lead:
    """Leads a run in its workdir from now on, until another process does.

    Args:
        checkpoints: the directory of them, in the workdir.
        before: the newest leader, as it was when this process began to take its place.
        step: the run goes on from; -1: it begins anew.
        process: this one: its `incarnation`, and the `run_id` of the attempt whose processes lead
            in turn. Where that is '', or was another one before, a generation begins.

    Raises:
        ValueError: another process has come between.
    """

    def __init__(self, checkpoints: pathlib.Path, before: Any, step: int, process: Any) -> None:
        number, starts = before["number"] + 1, before["starts"]
        if not process.run_id or process.run_id != before["run_id"]:
            starts = [*(start for start in starts if start[1] < step), (number, step)][-_MOST:]
        self.about = {"generation": starts[-1][0], "incarnation": process.incarnation}
        begun = this_process() | {"run_id": process.run_id, "step": step, "starts": starts}
        root = checkpoints.parent / DIRECTORY
        self._own, self.scratch = root / f"{number:08d}", checkpoints / f".partial-n{number:08d}"
        new = root / f".{os.urandom(8).hex()}"
        try:
            for path in (new, self.scratch):
                path.mkdir(parents=True, exist_ok=True)
            (new / _BEGUN).write_text(json.dumps(begun))
            files.flush(new / _BEGUN)
            new.rename(self._own)  # fails where it is there: it is not empty
        except OSError as error:
            put_away(new)
            if _last(root) >= number:
                raise ValueError(in_use(root.parent, newest(checkpoints))) from error
            raise
        # Names of earlier numbers come before, and those of what was half removed, or half made.
        for path in [*root.iterdir(), *checkpoints.glob(".partial-*")]:
            own = self._own if path.parent == root else self.scratch
            with contextlib.suppress(OSError):  # the next leader tries again
                if path.name < own.name:
                    put_away(path)

    def leads(self) -> bool:
        """Whether this process leads still."""
        return _last(self._own.parent) <= int(self._own.name)

    def check(self) -> None:
        """Raises ValueError where another process leads."""
        if not self.leads():
            who = in_use(self._own.parents[1], newest(self.scratch.parent))
            raise ValueError(f"{who}: this process was stopped or cut off, and writes nothing more")

    def written(self, path: pathlib.Path) -> contextlib.AbstractContextManager[pathlib.Path]:
        """As `whole.written`, for a file in the workdir; an OSError where another leads."""
        return whole.written(self._own / path.name, lambda new, _: os.replace(new, path))

    def remove(self, path: pathlib.Path) -> None:
        """Removes a file of the workdir, where it is there and this process leads."""
        put_away(path, self._own)


def put_away(path: pathlib.Path, into: pathlib.Path | None = None) -> None:
    """Removes a file or directory, which is renamed first: no process sees half of it.

    Args:
        path: where it is; where it is gone, nothing happens.
        into: where it is renamed to; where that is gone, nothing happens. None: beside it.
    """
    gone = (into or path.parent) / f".partial-{os.urandom(8).hex()}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        (shutil.rmtree if gone.is_dir() else os.unlink)(gone)


def _last(root: pathlib.Path) -> int:
    """The number of the newest leader. The disk of a network is asked anew when it lists."""
    names = os.listdir(root) if root.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)
