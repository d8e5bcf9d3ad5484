"""When is a run saved, and where does it go on? Checkpoints in its workdir, beside its records."""

import logging
import os
import pathlib
import time
from typing import Any

import numpy as np

from hetjax.checkpoints import checkpoint, generations
from hetjax.comm import key_value_store as store_lib
from hetjax.config import recorded
from hetjax.rounds import resume as resume_lib
from hetjax.rounds import setup as setup_lib

logger = logging.getLogger(__name__)

FORCE, OVERWRITE = "force", "overwrite"
WORDS = (FORCE, OVERWRITE)
"""Of `resume`, beside a truth: to go on whatever has changed; to begin anew over any run."""


_PATIENCE_SECS = 600.0  # until process 0 has read what is in the workdir


def saved_in(
    workdir: pathlib.Path, task: Any, resume: bool | str, *, fingerprint: dict[str, Any]
) -> checkpoint.Saved | None:
    """The checkpoint that a run goes on from; process 0 decides, and all others follow it.

    Args:
        workdir: of the run.
        task: that is driven, a `training.task.Task`.
        resume: go on from the newest checkpoint; 'force': whatever else has changed; 'overwrite':
            begin anew, whatever is there. Where a supervisor has started the run again even one
            that is finished is gone on from, and one that it began to write.
        fingerprint: of what the run depends on beside its configuration, in process 0.

    Returns:
        the checkpoint, which says what ended the run where it is started again at its end; or None.

    Raises:
        ValueError: the directory is another configuration's, its run depends on something else, or
            it cannot be used.
    """
    directory, setup = workdir / resume_lib.DIRECTORY, task.setup
    saved, grown = None, list[str]()
    if setup.where.leads:
        saved, grown = _checked(workdir, task, resume, fingerprint)
        if saved is not None:
            resume_lib.check_shards(saved, setup)
            more = f", with more: {', '.join(grown)}" if grown else ""
            logger.info(
                f"going on with the run in {str(workdir)!r} from {task.unit} "
                f"{saved.about['rounds']}{more} (resume=False begins anew)"
            )
    found, what = (saved and saved.step, grown), "find the checkpoint to go on from"
    step, grown = agreed(setup, found, board="resume", what=what)
    if saved is None and step is not None:
        saved = checkpoint.read(directory, step)
    if saved is not None and (grown or not (is_restarted() and saved.about["finished"])):
        saved.about["stopped_by"] = None
    return saved


def _checked(
    workdir: pathlib.Path, task: Any, resume: bool | str, fingerprint: dict[str, Any]
) -> tuple[checkpoint.Saved | None, list[str]]:
    """Refuses a call that may neither go on with what is there nor replace it."""
    if resume == OVERWRITE and not is_restarted():
        return None, []
    directory, config = workdir / resume_lib.DIRECTORY, task.recorded
    saved = checkpoint.newest(directory) if resume and directory.is_dir() else None
    about = checkpoint.newest_about(directory) if saved is None else saved.about
    is_finished = about is not None and about["finished"]
    grown = recorded.all_grown(workdir, config, () if saved is None else task.may_grow)
    if is_finished and not (is_restarted() or grown):
        saved = None
    how = {"may_differ": recorded.MAY_DIFFER, "may_grow": task.may_grow} if saved else {}
    way = f"give another directory, or resume={OVERWRITE!r} to write over it"
    recorded.check(workdir, config, way=way, **how)
    if about is not None and (saved is not None or is_finished):
        anew = "resume=False begins anew" if saved else f"resume={OVERWRITE!r} writes over it"
        done = f"{about['rounds']} {task.unit}s"
        resume_lib.check_given(
            about["fingerprint"],
            fingerprint,
            saved,
            task.setup,
            is_grown=bool(grown),
            held=f"workdir {str(workdir)!r} holds {done} of a run that",
            way=f"{anew}, another workdir keeps both",
            force=f"resume={FORCE!r}" if saved else "",
            is_forced=resume == FORCE,
        )
    return saved, grown


def agreed(setup: setup_lib.Setup, found: Any, *, board: str, what: str) -> Any:
    """What process 0 has found in the workdir; the others may find there what it wrote since.

    Args:
        setup: of the run.
        found: by this process.
        board: a name of its own.
        what: process 0 does, as a message names it.
    """
    if setup.company.communicator.alone:
        return found
    shared = store_lib.KeyValueStore(board)
    if setup.where.leads:
        shared.post("found", found)
    return shared.wait("found", _PATIENCE_SECS, what=what)


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


def solved_in(workdir: pathlib.Path | None, *, resume: bool | str = True) -> dict[str, Any]:
    """What the run in a workdir solved; empty where nothing is to go on. Changes nothing.

    All checkpoints of a run have the same, so that one whose arrays are damaged tells them too.
    """
    if workdir is None or begins_anew(resume) or not (workdir / resume_lib.DIRECTORY).is_dir():
        return {}
    about = checkpoint.newest_about(workdir / resume_lib.DIRECTORY)
    return {} if about is None else about["solutions"]


class CheckpointManager:
    """Saves a run; process 0 writes, in the background, and the others help to gather.

    Args:
        workdir: of the run; None: nothing is kept.
        setup: of the run.
        lead: of this process; None: another one leads.
    """

    def __init__(
        self,
        workdir: pathlib.Path | None,
        setup: setup_lib.Setup,
        lead: generations.Lead | None = None,
    ) -> None:
        self._every_secs, self.keeps = setup.config.checkpoint.every_secs, workdir is not None
        self._checkpoints = None
        if workdir is not None and lead is not None:
            keep = setup.config.checkpoint.keep
            where, at = workdir / resume_lib.DIRECTORY, setup.company.heartbeats.at
            self._checkpoints = checkpoint.Checkpoints(
                where, lead=lead, keep=keep, meanwhile=lambda: at("checkpointing")
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
            about: what is said of them, and after how many steps (`rounds`) they are.

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

    def close(self) -> None:
        """Waits until all is on the disk; may be called twice.

        Raises:
            ValueError: it could not be written.
        """
        if self._checkpoints is not None:
            self._checkpoints.close()
