"""When is a run saved, and where does it go on? Checkpoints in its workdir, beside its records."""

import dataclasses
import pathlib
import time
from typing import Any

from hetjax import types
from hetjax.checkpoints import checkpoint
from hetjax.processes import board as board_lib
from hetjax.processes import solutions
from hetjax.records import record
from hetjax.rounds import arguments, round_report, run_records, setup
from hetjax.rounds import resume as resume_lib


@dataclasses.dataclass
class Start:
    """Where a run begins: at its beginning, or at a checkpoint."""

    saved: checkpoint.Saved | None = None
    lines: list[round_report.RoundReport] = dataclasses.field(default_factory=list)
    examples_recomputed: int = 0
    """Done after the checkpoint and before the run ended; not committed, and done again."""


def find(
    workdir: pathlib.Path | None,
    config: dict[str, Any],
    *,
    parts: setup.RunParts,
    resume: bool,
    restarted: bool,
) -> Start:
    """Decides where the run begins; process 0 does, and all others follow it.

    Args:
        workdir: of the run; None: nothing is kept.
        config: as recorded.
        parts: of the run.
        resume: go on from the newest checkpoint.
        restarted: a supervisor has started the run again, so that even one that is finished is
            gone on from.

    Raises:
        ValueError: the directory is another configuration's, or cannot be used.
    """
    if workdir is None:
        return Start()
    directory = workdir / resume_lib.DIRECTORY
    board = None if parts.meeting.alone else board_lib.Board("resume")
    if not parts.leads:
        assert board is not None
        step = board.wait("step", 600.0, what="find the checkpoint to go on from")
        return Start() if step is None else Start(checkpoint.read(directory, step))
    saved = checkpoint.newest(directory) if resume and directory.is_dir() else None
    if saved is not None and not _goes_on(saved.about, restarted):
        saved = None
    record.check_workdir(workdir, config, may_differ=_MAY_DIFFER if saved else ())
    start = Start(saved)
    if saved is None:
        checkpoint.clear(directory)
    else:
        start.lines, dropped = record.kept_lines(workdir, saved.about["rounds"])
        start.examples_recomputed = saved.about["examples_recomputed"] + dropped
        resume_lib.check_workers(saved, parts)
    if board is not None:
        board.post("step", None if saved is None else saved.step)
    return start


def _goes_on(about: dict[str, Any], restarted: bool) -> bool:
    return restarted or not about["finished"]


def kept_solutions(
    workdir: pathlib.Path | None, *, resume: bool = True, restarted: bool = False
) -> dict[str, solutions.Numbers]:
    """Those of the run that goes on; empty where it begins anew. Changes nothing.

    All checkpoints of a run have the same, so that one whose arrays are damaged tells them too.
    """
    if workdir is None or not resume or not (workdir / resume_lib.DIRECTORY).is_dir():
        return {}
    about = checkpoint.newest_about(workdir / resume_lib.DIRECTORY)
    if about is None or not _goes_on(about, restarted):
        return {}
    return about.get("solutions", {})


_MAY_DIFFER = ("checkpoint", "cluster", "quota")
"""Groups of the configuration that a run may be resumed with other values of."""


class Keeper:
    """Saves a run; process 0 writes, in the background, and the others help to gather.

    Args:
        workdir: of the run.
        parts: of the run.
    """

    def __init__(self, workdir: pathlib.Path, parts: setup.RunParts) -> None:
        self._parts, self._every_secs = parts, parts.config.checkpoint.every_secs
        self._checkpoints = None
        if parts.leads:
            keep = parts.config.checkpoint.keep
            self._checkpoints = checkpoint.Checkpoints(workdir / resume_lib.DIRECTORY, keep=keep)
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save, by the clock of process 0."""
        late = time.monotonic() - self._last >= self._every_secs > 0
        return late and self._checkpoints is not None

    def save(
        self,
        state: run_records.RunState,
        best_params: types.PyTree,
        *,
        finished: bool,
        **about: Any,
    ) -> None:
        """Takes the run as it is, and returns while it is written; waits for the save before.

        All processes call it. What is known of the run goes into `about`.

        Raises:
            ValueError: it, or the save before it, could not be written.
        """
        arrays = resume_lib.to_arrays(state, best_params, self._parts)
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        if self._checkpoints.latest == state.rounds_done:  # as when one is interrupted after it
            return
        about |= {
            "finished": finished,
            "rounds": state.rounds_done,
            "num_workers": len(self._parts.devices),
            "has_best": best_params is not None,
            "solutions": self._parts.solved.save(),
            "versions": arguments.versions(),
        }
        self._checkpoints.save(state.rounds_done, arrays, about)
        self._last = time.monotonic()

    def close(self) -> None:
        """Waits until all is on the disk."""
        if self._checkpoints is not None:
            self._checkpoints.close()
