"""A workdir belongs to one run at a time: which process holds it, and since when."""

import contextlib
import datetime
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

from hetjax.config import recorded

logger = logging.getLogger(__name__)

_NAME = "lock.json"
_PATIENCE_SECS = 2.0  # a process that was just killed may hold it for a moment
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[pathlib.Path] = set()  # by this process, which its own locks do not keep out


@contextlib.contextmanager
def held(workdir: pathlib.Path, *, takes_over: bool = False) -> Iterator[None]:
    """Holds a workdir; the system lets go of it when this process ends, however it does.

    `lock.json` there says which process of which host holds it, and since when. One that is there
    and that no process holds is of a run that was killed: it is taken over.

    Args:
        workdir: of the run; it is there.
        takes_over: another process of the same run, which held it, is gone or sleeps.

    Raises:
        ValueError: another run holds it, in this process or another; says who.
    """
    path = (workdir / _NAME).resolve()
    if path in _held:
        raise ValueError(_in_use(workdir, "another run of this process"))
    with contextlib.ExitStack() as stack:
        try:
            if takes_over:
                path.unlink(missing_ok=True)
            file = stack.enter_context(_locked(path, workdir))
            _held.add(path)
            stack.callback(_let_go, path)
            file.seek(0)
            left = file.read().decode()
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            own = {"host": socket.gethostname(), "process": os.getpid(), "since": now}
            file.truncate(0)  # what is written goes to the end
            file.write(json.dumps(own).encode())
        except OSError as error:
            raise recorded.unusable(workdir, error) from error
        if left:
            logger.info(f"{str(workdir)!r} was held by {_holder(left)}, which is gone")
        yield


def _let_go(path: pathlib.Path) -> None:
    _held.remove(path)
    with contextlib.suppress(OSError):  # a directory that was removed meanwhile
        path.unlink()


def _locked(path: pathlib.Path, workdir: pathlib.Path) -> Any:
    """The file, open and locked."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while True:
        file = path.open("a+b", buffering=0)  # or a full disk is found when it is closed
        try:
            # Of the process, not of the file: a child that it forked does not hold it on.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(path, file):
                return file  # else the run before has just removed it
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(f"{str(workdir)!r} has no locks: see that no other run uses it")
                return file
            if time.monotonic() > deadline:
                with file:
                    file.seek(0)
                    raise ValueError(_in_use(workdir, _holder(file.read().decode()))) from error
        file.close()
        time.sleep(0.05)


def _is_there(path: pathlib.Path, file: Any) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _holder(text: str) -> str:
    try:
        known = json.loads(text)
        return f"process {known['process']} on {known['host']} since {known['since']}"
    except (ValueError, KeyError, TypeError):  # it is just being written
        return "another process"


def _in_use(workdir: pathlib.Path, holder: str) -> str:
    return f"workdir {str(workdir)!r} is in use by {holder}"
