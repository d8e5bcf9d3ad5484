"""How is a run kept on disk, so that whatever happens the newest good state is found again?

A directory holds a few checkpoints. Each is one commit: Orbax writes the arrays into a hidden
directory, and a manifest lists the SHA-256 sum of every file. All of it is flushed to the disk, and
one rename makes it a checkpoint. Orbax restores a file with a flipped bit without a word. So a
restore verifies the manifest first, and falls back on an older checkpoint if it does not agree.

One process writes, in a background thread. `generations` says what may be read of those that led
before. The loop decides what belongs to a run and when it is saved. Nothing is ever unpickled.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hetjax import messages
from hetjax.checkpoints import files, generations

logger = logging.getLogger(__name__)

STAGES = ("begin", "arrays", "manifest", "commit", "prune", "end")
"""The stages of one checkpoint's writing; it is committed between `commit` and `prune`."""

_PARTIAL = ".partial-"
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP)


class Saved(NamedTuple):
    """A checkpoint that was read."""

    step: int
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


class Checkpoints:
    """Writes checkpoints into a directory, one after another, in a background thread.

    A directory belongs to one run. The umask says who may read it.

    Args:
        directory: made if it does not exist.
        lead: of this process, where others may lead before and after it; it made the directory.
        keep: how many checkpoints stay, the newest ones.
        on_stage: called in the background thread as each of the `STAGES` begins.
        meanwhile: called again and again in the wait until a checkpoint is written.

    Raises:
        ValueError: the directory cannot be made or written to.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        lead: generations.Lead | None = None,
        keep: int = 2,
        on_stage: Callable[[str], None] = lambda stage: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = pathlib.Path(directory)
        self._keep, self._on_stage, self._meanwhile, self._lead = keep, on_stage, meanwhile, lead
        with messages.as_mistake(f"no checkpoints can be kept in {str(directory)!r}: ", OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._scratch = self._directory if lead is None else lead.scratch
            for stale in self._scratch.glob(f"{_PARTIAL}*"):
                shutil.rmtree(stale)
            self.latest: int | None = max(generations.readable(self._directory), default=None)
            self._prune()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[None] | None = None

    def save(self, step: int, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Begins to write a checkpoint, once the one before it is written, and returns.

        Args:
            step: more than `latest`, the step of the newest in the directory.
            arrays: by name, as `flatten` gives them; not to be changed until they are written.
            about: JSON values; floats must be finite.

        Raises:
            ValueError: the save before this one failed.
        """
        self.wait()
        index = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
        text = json.dumps({"about": about, "arrays": index}, indent=1, allow_nan=False)
        # Orbax refuses arrays without elements; the index alone has them.
        filled = {name: array for name, array in arrays.items() if array.size}
        self._pending = self._thread.submit(self._write, step, filled, text)

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            ValueError: writing failed. The checkpoints before it are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            while futures.wait([pending], timeout=0.2).not_done:
                self._meanwhile()
            pending.result()

    def close(self) -> None:
        """Waits, raises as `wait` does, and ends the thread; may be called twice."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, arrays: dict[str, np.ndarray], about: str) -> None:
        path = self._directory / f"{step:08d}"
        partial = self._scratch / f"{_PARTIAL}{step:08d}"  # two writers have two such directories
        try:
            self._on_stage("begin")
            self._check_room(sum(array.nbytes for array in arrays.values()))
            partial.mkdir()
            self._on_stage("arrays")
            (partial / files.ABOUT).write_text(about)
            if arrays:
                files.write_arrays(partial / files.ARRAYS, arrays)
            self._on_stage("manifest")
            (partial / files.ABOUT).stat()  # Orbax makes anew what a next leader has put away
            files.seal(partial, step)
            self._on_stage("commit")
            if step in generations.readable(self._directory):
                shutil.rmtree(partial)  # the leader before has written the same
            else:
                generations.put_away(path, self._scratch)
                partial.rename(path)
            self.latest = step
            files.flush(self._directory)
        except Exception as error:  # Orbax has errors of many types
            shutil.rmtree(partial, ignore_errors=True)
            if self._lead is not None and not self._lead.leads():
                logger.warning(f"checkpoint {step} is dropped: another process leads the run now")
                return
            raise ValueError(
                f"checkpoint {step} could not be written to {str(self._directory)!r}: "
                f"{files.reason(error)}; the checkpoints before it are untouched"
            ) from error
        self._on_stage("prune")
        self._prune()
        self._on_stage("end")

    def _check_room(self, num_bytes: int) -> None:
        """Finds a full disk first: Orbax prints an error for each array that it cannot write."""
        if shutil.disk_usage(self._directory).free < num_bytes + (1 << 20):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {num_bytes >> 20} MB")

    def _prune(self) -> None:
        kept = generations.readable(self._directory)[-self._keep :]
        for step in set(files.steps(self._directory)) - set(kept):
            with messages.as_mistake(f"old checkpoint {step} could not be removed: ", OSError):
                generations.put_away(self._directory / f"{step:08d}", self._scratch)


def newest(directory: str | pathlib.Path, *, mend: bool = True) -> Saved | None:
    """The newest checkpoint that is whole; None if there is none.

    A damaged or incomplete one is renamed to `<step>.damaged`, with a message on stderr, and the
    one before it is tried. What an interrupted save left is ignored, and what a leader left that
    was stopped before a later generation began.

    Args:
        directory: of checkpoints.
        mend: rename what is damaged; False if another process may be writing.

    Raises:
        ValueError: this process may not read the directory or a file in it, which is no damage; or
            a checkpoint has a format that this version of hetjax does not know.
    """
    directory = pathlib.Path(directory)
    with messages.as_mistake(f"the checkpoints in {str(directory)!r} cannot be read: ", OSError):
        found = generations.readable(directory)
        for step in set(files.steps(directory)) - set(found):
            logger.warning(f"checkpoint {step} is not read: a later start began before it")
        for step in reversed(found):
            path = directory / f"{step:08d}"
            try:
                return _read(path)
            except files.DamageError as damage:
                if mend:
                    _set_aside(path, str(damage))
    return None


def newest_about(directory: str | pathlib.Path) -> dict[str, Any] | None:
    """The `about` of the newest checkpoint in which that is whole; its arrays are not checked."""
    directory = pathlib.Path(directory)
    for step in reversed(generations.readable(directory)):
        path = directory / f"{step:08d}"
        with contextlib.suppress(files.DamageError, OSError):  # `newest` tells of them
            files.verify(path, only=files.ABOUT)
            return json.loads((path / files.ABOUT).read_bytes())["about"]
    return None


def read(directory: str | pathlib.Path, step: int) -> Saved:
    """Reads and verifies one checkpoint, in processes that follow the one that chose it.

    Raises:
        ValueError: it does not exist, or is not whole as this process sees it.
    """
    path = pathlib.Path(directory) / f"{step:08d}"
    cannot, kinds = f"checkpoint {str(path)!r} cannot be read: ", (files.DamageError, OSError)
    with messages.as_mistake(cannot, kinds, after="; all processes need to see it"):
        return _read(path)


def _read(path: pathlib.Path) -> Saved:
    try:
        files.verify(path)
        described = json.loads((path / files.ABOUT).read_bytes())
    except OSError as error:
        if error.errno in _DAMAGE:
            raise files.DamageError(str(error)) from error
        raise
    index = {name: (dtype, tuple(shape)) for name, (dtype, shape) in described["arrays"].items()}
    arrays = {n: np.zeros(s, jnp.dtype(d)) for n, (d, s) in index.items() if 0 in s}
    if len(arrays) < len(index):
        # A thread of its own: in a notebook an event loop is already running.
        with futures.ThreadPoolExecutor(1) as thread:
            arrays |= thread.submit(files.read_arrays, path / files.ARRAYS).result()
    if {name: (str(a.dtype), a.shape) for name, a in arrays.items()} != index:
        raise files.DamageError("the arrays are not those that were saved")
    return Saved(int(path.name), {name: arrays[name] for name in index}, described["about"])


def _set_aside(path: pathlib.Path, damage: str) -> None:
    names = [f"{path.name}.damaged", *(f"{path.name}.damaged-{n}" for n in range(2, 1000))]
    target = next(path.with_name(n) for n in names if not os.path.lexists(path.with_name(n)))
    where = f"set aside as {target.name!r}"
    try:
        path.rename(target)
    except OSError as error:  # the directory is read-only, or another process did it
        where = f"not set aside ({error})"
    said = f"checkpoint {str(path)!r} is damaged ({damage}) and {where}"
    logger.warning(f"{said}; the one before it is taken")
