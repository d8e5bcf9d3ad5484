"""When is a run saved, and where does it go on? Checkpoints in its workdir, beside its records."""

import dataclasses
import datetime
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax import messages, types
from hetjax.checkpoints import checkpoint, leaves
from hetjax.config import recorded
from hetjax.inputs import arguments
from hetjax.processes import board as board_lib
from hetjax.rounds import resume as resume_lib
from hetjax.rounds import setup as setup_lib

FORCE, OVERWRITE = "force", "overwrite"
WORDS = (FORCE, OVERWRITE)
"""Of `resume`, beside a truth: to go on whatever has changed; to begin anew over any run."""


_PATIENCE_SECS = 600.0  # until process 0 has read what is in the workdir


class Start(NamedTuple):
    """Where a run begins: at its beginning, or at a checkpoint."""

    saved: checkpoint.Saved | None = None
    stopped_by: str | None = None
    """A run that is started again at its end: who ended it."""


@dataclasses.dataclass(frozen=True)
class Search:
    """Where does the run in a workdir begin? Process 0 decides, and all others follow it.

    Args:
        workdir: of the run.
        config: as recorded.
        setup: of the run.
        fingerprint: of what the run depends on beside it, in process 0.
        resume: go on from the newest checkpoint; 'force': whatever else has changed; 'overwrite':
            begin anew, whatever is there. Where a supervisor has started the run again even one
            that is finished is gone on from, and one that it began to write.
        may_grow: fields that a run may be resumed with more of, also when it is finished.
        unit: of which the run counts how many are done.
    """

    workdir: pathlib.Path
    config: dict[str, Any]
    setup: setup_lib.Setup
    fingerprint: dict[str, Any]
    resume: bool | str
    may_grow: Sequence[str]
    unit: str

    def start(self) -> Start:
        """Where it begins.

        Raises:
            ValueError: the directory is another configuration's, its run depends on something
                else, or it cannot be used.
        """
        directory = self.workdir / resume_lib.DIRECTORY
        if not self.setup.where.leads:
            what = "find the checkpoint to go on from"
            step, grown = board_lib.Board("resume").wait("found", _PATIENCE_SECS, what=what)
            saved = None if step is None else checkpoint.read(directory, step)
        else:
            saved, grown = self._checked(directory)
            if saved is None:
                checkpoint.clear(directory)
            else:
                resume_lib.check_shards(saved, self.setup)
                more = f", with more: {', '.join(grown)}" if grown else ""
                messages.say(
                    f"going on with the run in {str(self.workdir)!r} from {self.unit} "
                    f"{saved.about['rounds']}{more} (resume=False begins anew)"
                )
            if not self.setup.company.meeting.alone:
                board_lib.Board("resume").post("found", (saved and saved.step, grown))
        if saved is not None and is_restarted() and saved.about["finished"] and not grown:
            return Start(saved, saved.about.get("stopped_by"))
        return Start(saved)

    def _checked(self, directory: pathlib.Path) -> tuple[checkpoint.Saved | None, list[str]]:
        """Refuses a call that may neither go on with what is there nor replace it."""
        if self.resume == OVERWRITE and not is_restarted():
            return None, []
        saved = checkpoint.newest(directory) if self.resume and directory.is_dir() else None
        about = checkpoint.newest_about(directory) if saved is None else saved.about
        is_finished = about is not None and about["finished"]
        may_grow = self.may_grow if saved is not None else ()
        grown = recorded.all_grown(self.workdir, self.config, may_grow)
        if is_finished and not (is_restarted() or grown):
            saved = None
        how = {"may_differ": recorded.MAY_DIFFER, "may_grow": self.may_grow} if saved else {}
        way = f"give another directory, or resume={OVERWRITE!r} to write over it"
        recorded.check(self.workdir, self.config, way=way, **how)
        if about is not None and (saved is not None or is_finished):
            anew = "resume=False begins anew" if saved else f"resume={OVERWRITE!r} writes over it"
            done = f"{about['rounds']} {self.unit}s"
            resume_lib.check_given(
                about["fingerprint"],
                self.fingerprint,
                saved,
                self.setup,
                is_grown=bool(grown),
                held=f"workdir {str(self.workdir)!r} holds {done} of a run that",
                way=f"{anew}, another workdir keeps both",
                force=f"resume={FORCE!r}" if saved else "",
                is_forced=self.resume == FORCE,
            )
        return saved, grown


def agreed(setup: setup_lib.Setup, number: int) -> int:
    """What process 0 has read in the workdir; the others may find there what it has written since.

    Args:
        setup: of the run.
        number: that this process has read.
    """
    if setup.company.meeting.alone:
        return number
    board = board_lib.Board("read")
    if setup.where.leads:
        board.post("number", number)
    return board.wait("number", _PATIENCE_SECS, what="read the lines of the run")


def check_resume(resume: Any, *, caller: str) -> None:
    """Refuses what is no way to begin in a workdir.

    Raises:
        ValueError: it is none.
    """
    if resume not in (True, False, *WORDS):
        allowed = ", ".join(map(repr, (True, False, *WORDS)))
        raise ValueError(f"{caller}: resume is {resume!r}; allowed are {allowed}")


def begins_anew(resume: bool | str) -> bool:
    """Whether a run begins anew, whatever checkpoint there is."""
    return not resume or (resume == OVERWRITE and not is_restarted())


def is_restarted() -> bool:
    """Whether a supervisor has started the run again."""
    return int(os.environ.get("HETJAX_ATTEMPT", "0")) > 0


def kept_solutions(workdir: pathlib.Path | None, *, resume: bool | str = True) -> dict[str, Any]:
    """What the run in a workdir solved; empty where nothing is to go on. Changes nothing.

    All checkpoints of a run have the same, so that one whose arrays are damaged tells them too.
    """
    if workdir is None or begins_anew(resume) or not (workdir / resume_lib.DIRECTORY).is_dir():
        return {}
    about = checkpoint.newest_about(workdir / resume_lib.DIRECTORY)
    return {} if about is None else about["solutions"]


class Keeper:
    """Saves a run; process 0 writes, in the background, and the others help to gather.

    Args:
        workdir: of the run; None: nothing is kept.
        setup: of the run.
        fingerprint: of what the run depends on beside its configuration, in process 0.
    """

    def __init__(
        self, workdir: pathlib.Path | None, setup: setup_lib.Setup, *, fingerprint: dict[str, Any]
    ) -> None:
        self._setup, self._every_secs = setup, setup.config.checkpoint.every_secs
        self._fingerprint, self.keeps = fingerprint, workdir is not None
        self._checkpoints = None
        if workdir is not None and setup.where.leads:
            keep = setup.config.checkpoint.keep
            where, at = workdir / resume_lib.DIRECTORY, setup.company.beacons.at
            self._checkpoints = checkpoint.Checkpoints(
                where, keep=keep, meanwhile=lambda: at("checkpointing")
            )
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save, by the clock of process 0."""
        late = time.monotonic() - self._last >= self._every_secs > 0
        return late and self._checkpoints is not None

    def save(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Takes the run as it is, and returns while it is written; waits for the save before.

        Args:
            arrays: all that the run goes on from; every process gathered them.
            about: from `about`.

        Raises:
            ValueError: it, or the save before it, could not be written.
        """
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        if self._checkpoints.latest == about["rounds"]:  # as when one is interrupted after it
            return
        self._checkpoints.save(about["rounds"], arrays, about)
        self._last = time.monotonic()

    def about(
        self,
        *,
        done: int,
        params: types.PyTree,
        best_params: types.PyTree,
        finished: bool,
        **about: Any,
    ) -> dict[str, Any]:
        """What is said of a state that is saved, or handed on.

        Args:
            done: rounds, or outer steps.
            params: of the form in which `hetjax.load` returns them.
            best_params: of the run so far; None: there are none.
            finished: whether the run is at its end.
            about: what else is known of the run.
        """
        return about | {
            "finished": finished,
            "rounds": done,
            "num_workers": len(self._setup.where.devices),
            "has_best": best_params is not None,
            "form": leaves.form_of(params),
            "fingerprint": self._fingerprint,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "solutions": self._setup.company.solved.save(),
            "versions": arguments.versions(),
        }

    def close(self) -> None:
        """Waits until all is on the disk; may be called twice.

        Raises:
            ValueError: it could not be written.
        """
        if self._checkpoints is not None:
            self._checkpoints.close()
