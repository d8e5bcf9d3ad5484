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
import re
import shutil
import socket
from typing import Any, NamedTuple

from hetjax import whole
from hetjax.checkpoints import files

DIRECTORY = "generations"  # in the workdir, beside the checkpoints
_BEGUN = "begun.json"
_ANEW = -1  # before any step
_MOST = 100  # generations that are remembered; those before have nothing left to write into
_LOOKS = 10  # while a leader takes the place of another
_HIDDEN = (".writer-", ".gone-", ".partial-")  # beside checkpoints; the last of earlier versions
_NUMBER = re.compile(r"(?:\.writer-|\.)?(\d{8})")  # of a leader, in the names of what is its own


class LostError(ValueError):
    """Another process leads the run in this workdir now."""


class Begun(NamedTuple):
    """What the newest leader of a workdir has written of itself."""

    number: int = 0
    run_id: str = ""  # of its generation
    step: int = _ANEW  # from which it leads
    starts: tuple[tuple[int, int], ...] = ()  # (generation, step), by which both ascend
    process: str = "another process"


def this_process() -> dict[str, Any]:
    """Which process this is, for another one that reads it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": now}


def named(text: str) -> str:
    """What `this_process` says, from JSON, in words."""
    try:
        known = json.loads(text)
        return f"process {known['process']} on {known['host']} since {known['since']}"
    except (ValueError, KeyError, TypeError):  # it is just being written
        return "another process"


def newest(checkpoints: pathlib.Path) -> Begun:
    """Of the newest leader of a run; of number 0 where there was none.

    Args:
        checkpoints: the directory of them.
    """
    root, number = checkpoints.parent / DIRECTORY, 0
    for _ in range(_LOOKS):
        if not (number := _last(root)):
            break
        with contextlib.suppress(OSError, ValueError, LookupError):  # it has just been removed
            text = (root / f"{number:08d}" / _BEGUN).read_text()
            known = json.loads(text)
            starts = tuple((generation, step) for generation, step in known["starts"])
            return Begun(number, known["run_id"], known["step"], starts, named(text))
    return Begun(number)


def readable(checkpoints: pathlib.Path) -> list[int]:
    """The steps of the checkpoints that may be read, whole or not, in order."""
    starts = newest(checkpoints).starts

    def is_readable(step: int) -> bool:
        needed = max((generation for generation, begun in starts if begun < step), default=0)
        return _generation(checkpoints / f"{step:08d}", needed) >= needed

    return sorted(filter(is_readable, files.steps(checkpoints)))


def _generation(path: pathlib.Path, needed: int) -> int:
    """Of a checkpoint; 0 of one of an earlier version of hetjax."""
    if needed:
        with contextlib.suppress(OSError, ValueError, LookupError):
            about = json.loads((path / files.ABOUT).read_bytes())["about"]
            return about.get("written_by", {}).get("generation", 0)
    return needed  # of one that is damaged, too: who reads it tells of that


class Lead:
    """Leads a run in its workdir from now on, until another process does.

    Args:
        checkpoints: the directory of them, in the workdir.
        before: the newest leader, as it was when this process began to take its place.
        step: the run goes on from; None: it begins anew.
        run_id: of the generation, which goes on with another leader; '': a generation begins.
        incarnation: of this process.

    Raises:
        LostError: another process has come between.
    """

    def __init__(
        self,
        checkpoints: pathlib.Path,
        before: Begun,
        *,
        step: int | None,
        run_id: str = "",
        incarnation: int = 0,
    ) -> None:
        number, step = before.number + 1, _ANEW if step is None else step
        starts = before.starts
        if not run_id:
            starts = (*(start for start in starts if start[1] < step), (number, step))[-_MOST:]
            run_id = os.urandom(8).hex()
        self.about = {"generation": starts[-1][0], "run_id": run_id, "incarnation": incarnation}
        root = checkpoints.parent / DIRECTORY
        self._own, self.scratch = root / f"{number:08d}", checkpoints / f".writer-{number:08d}"
        new = root / f".{number:08d}.{os.urandom(8).hex()}"
        for path in (new, self.scratch):
            path.mkdir(parents=True, exist_ok=True)
        begun = this_process() | self.about | {"step": step, "starts": starts}
        (new / _BEGUN).write_text(json.dumps(begun))
        files.flush(new / _BEGUN)
        try:
            new.rename(self._own)  # fails where it is there: it is not empty
        except OSError as error:
            if newest(checkpoints).number < number:
                raise
            shutil.rmtree(new, ignore_errors=True)
            raise LostError(
                f"workdir {str(root.parent)!r} is in use by {newest(checkpoints).process}"
            ) from error
        beside = [path for path in _inside(checkpoints) if path.name.startswith(_HIDDEN)]
        for path in (*_inside(root), *beside):
            found = _NUMBER.match(path.name)
            if found is None or int(found[1]) < number:
                with contextlib.suppress(OSError):  # the next leader tries again
                    put_away(path)

    def leads(self) -> bool:
        """Whether this process leads still."""
        return _last(self._own.parent) <= int(self._own.name)

    def check(self) -> None:
        """Raises LostError where another process leads."""
        if not self.leads():
            workdir = self._own.parents[1]
            raise LostError(
                f"workdir {str(workdir)!r} is led by {newest(self.scratch.parent).process}: this "
                "process was stopped or cut off, and writes nothing more"
            )

    def written(self, path: pathlib.Path) -> contextlib.AbstractContextManager[pathlib.Path]:
        """As `whole.written`, for a file in the workdir; an OSError where another leads."""
        return whole.written(path, within=self._own)

    def remove(self, path: pathlib.Path) -> None:
        """Removes a file of the workdir, where it is there and this process leads."""
        put_away(path, self._own)

    def close(self) -> None:
        """Ends to write; its number stays."""
        put_away(self.scratch)


def put_away(path: pathlib.Path, into: pathlib.Path | None = None) -> None:
    """Removes a file or directory, which is renamed first: no process sees half of it.

    Args:
        path: where it is; where it is gone, nothing happens.
        into: where it is renamed to; where that is gone, nothing happens. None: beside it.
    """
    gone = (into or path.parent) / f".gone-{os.urandom(8).hex()}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.unlink()


def _last(root: pathlib.Path) -> int:
    return max((int(p.name) for p in _inside(root) if p.name.isdigit()), default=0)


def _inside(path: pathlib.Path) -> list[pathlib.Path]:
    """What a directory holds; nothing of one that is gone. A network's disk is asked anew."""
    with contextlib.suppress(OSError):
        return list(path.iterdir())
    return []
