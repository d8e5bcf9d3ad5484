"""A workdir belongs to one run at a time: which process holds it, and since when."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from hetjax.checkpoints import generations
from hetjax.config import recorded

logger = logging.getLogger(__name__)

_NAME = "lock.json"
_PATIENCE_SECS = 2.0  # a process that was just killed may hold it for a moment
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[pathlib.Path] = set()  # by this process, which its own locks do not keep out


class Held:
    """A workdir that this process holds.

    Args:
        path: of the lock.
        file: open, and locked.
        lead: of this process, once it leads.
    """

    def __init__(self, path: pathlib.Path, file: Any, lead: generations.Lead | None) -> None:
        self._path, self._file, self.lead = path, file, lead

    def let_go(self) -> None:
        """Removes the lock, unless it is another process's by now."""
        _held.remove(self._path)
        with contextlib.suppress(OSError):  # a directory that was removed meanwhile
            if self.lead is not None:
                self.lead.remove(self._path)
                self.lead.close()
            elif _is_there(self._path, self._file):
                self._path.unlink()


@contextlib.contextmanager
def held(workdir: pathlib.Path, lead: generations.Lead | None = None) -> Iterator[Held]:
    """Holds a workdir; the system lets go of it when this process ends, however it does.

    `lock.json` there says which process of which host holds it, and since when. One that is there
    and that no process holds is of a run that was killed: it is taken over.

    Args:
        workdir: of the run; it is there.
        lead: of this process, which takes the place of another one of the same run, though that one
            may hold its lock still: it is stopped, or cut off.

    Raises:
        ValueError: another run holds it, in this process or another; says who.
    """
    path = (workdir / _NAME).resolve()
    if path in _held:
        raise ValueError(in_use(workdir, "another run of this process"))
    with contextlib.ExitStack() as stack:
        try:
            if lead is None:
                file = stack.enter_context(_locked(path, workdir))
                _write(file)
            else:
                with lead.written(path) as new:
                    file = stack.enter_context(new.open("a+b", buffering=0))
                    with contextlib.suppress(OSError):  # where there are no locks
                        _lock(file)
                    _write(file)
        except OSError as error:
            if lead is not None:
                lead.check()
            raise recorded.unusable(workdir, error) from error
        _held.add(path)
        holds = Held(path, file, lead)
        stack.callback(holds.let_go)
        yield holds


def _lock(file: Any) -> None:
    # Of the process, not of the file: a child that it forked does not hold it on.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write(file: Any) -> None:
    file.truncate(0)  # what is written goes to the end
    file.write(json.dumps(generations.this_process()).encode())


def _locked(path: pathlib.Path, workdir: pathlib.Path) -> Any:
    """The file, open and locked; says who held it."""
    deadline, name = time.monotonic() + _PATIENCE_SECS, repr(str(workdir))
    while True:
        file = path.open("a+b", buffering=0)  # or a full disk is found when it is closed
        try:
            _lock(file)
            if _is_there(path, file):
                if left := _text(file):
                    is_here = f'"{socket.gethostname()}"' in left
                    local = "" if is_here else ", or this disk's locks do not reach that host"
                    logger.info(
                        f"{name} was held by {generations.named(left)}, which is gone{local}"
                    )
                return file  # else the run before has just removed it
        except OSError as error:
            who = generations.named(_text(file))
            if error.errno in _NO_LOCKS:
                last = f"; {who} used it last" if _text(file) else ""
                logger.warning(f"{name} has no locks{last}: see that no other run uses it")
                return file
            if time.monotonic() > deadline:
                file.close()
                raise ValueError(in_use(workdir, who)) from error
        file.close()
        time.sleep(0.05)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode()


def _is_there(path: pathlib.Path, file: Any) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def in_use(workdir: pathlib.Path, holder: str) -> str:
    """What is said of a workdir that another process holds."""
    return f"workdir {str(workdir)!r} is in use by {holder}"
