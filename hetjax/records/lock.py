"""A workdir belongs to one run at a time: which process holds it, and since when."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import time
from typing import Any

from hetjax.checkpoints import generations
from hetjax.config import recorded
from hetjax.rounds import resume as resume_lib

logger = logging.getLogger(__name__)

_NAME = "lock.json"
_PATIENCE_SECS = 2.0  # a process that was just killed may hold it for a moment
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[pathlib.Path] = set()  # by this process, which its own locks do not keep out


class Holder:
    """How a process holds the workdir of a run, and leads the run there.

    The system lets go of the workdir when the process ends, however it does. `lock.json` there says
    which process of which host holds it, and since when. One that is there and that no process
    holds is of a run that was killed: it is taken over.

    Args:
        stack: lets go of the workdir.
        workdir: of the run.
        communicator: of the run, where it has one.
    """

    lead: generations.Lead | None = None
    """Of this process, once it leads."""

    def __init__(self, stack: Any, workdir: pathlib.Path, communicator: Any = None) -> None:
        self._stack, self._workdir, self._communicator = stack, workdir, communicator
        self._checkpoints, self._path = workdir / resume_lib.DIRECTORY, (workdir / _NAME).resolve()

    def hold(self) -> None:
        """Holds the workdir, which is there.

        Raises:
            ValueError: another run holds it, in this process or another; says who.
        """
        if self._path in _held:
            raise ValueError(generations.in_use(self._workdir, "another run of this process"))
        with recorded.usable(self._workdir):
            self._keep(_locked(self._path, self._workdir))
            self._before = generations.newest(self._checkpoints)

    def begin(self, step: int) -> generations.Lead:
        """Leads the run, which goes on from a step, or begins anew (-1).

        Raises:
            ValueError: another process has come between.
        """
        with recorded.usable(self._workdir):
            self.lead = generations.Lead(self._checkpoints, self._before, step, self._communicator)
        return self.lead

    def take_over(self, step: int) -> None:
        """Leads in the place of another process of the run, which may hold its lock still.

        Args:
            step: that this process has reached.

        Raises:
            ValueError: another one leads already, of this run or of the call repeated.
        """
        with recorded.usable(self._workdir):
            self._before = before = generations.newest(self._checkpoints)
            if before["run_id"] != self._communicator.run_id or before["step"] > step:
                raise ValueError(generations.in_use(self._workdir, before))
            with self.begin(step).written(self._path) as new:
                self._keep(_locked(new, self._workdir))

    def _keep(self, file: Any) -> None:
        """Says in a file, which is locked, whose the workdir is."""
        self._stack.enter_context(file)
        file.truncate(0)  # what is written goes to the end
        file.write(json.dumps(generations.this_process()).encode())
        _held.add(self._path)
        self._stack.callback(self._let_go, file)

    def _let_go(self, file: Any) -> None:
        """Removes the lock, unless it is another process's by now."""
        _held.remove(self._path)
        with contextlib.suppress(OSError):  # a directory that was removed meanwhile
            if self.lead is not None:
                self.lead.remove(self._path)
                generations.put_away(self.lead.scratch)
            elif _is_there(self._path, file):
                self._path.unlink()


def _locked(path: pathlib.Path, workdir: pathlib.Path) -> Any:
    """The file, open and locked; says who held it."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while True:
        file = path.open("a+b", buffering=0)  # or a full disk is found when it is closed
        file.seek(0)
        try:
            # Of the process, not of the file: a child that it forked does not hold it on.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(path, file):
                if left := file.read().decode():
                    who = generations.in_use(workdir, _holder(left))
                    who = who.replace(" is in use by ", " was held by ")
                    logger.info(f"{who}, which is gone, or sees no locks of this disk")
                return file  # else the run before has just removed it
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(f"{str(workdir)!r} has no locks: see that no other run uses it")
                return file
            if time.monotonic() > deadline:
                with file:
                    who = _holder(file.read().decode())
                    raise ValueError(generations.in_use(workdir, who)) from error
        file.close()
        time.sleep(0.05)


def _is_there(path: pathlib.Path, file: Any) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _holder(text: str) -> Any:
    with contextlib.suppress(ValueError):  # it is just being written
        return json.loads(text)
    return "another process"
