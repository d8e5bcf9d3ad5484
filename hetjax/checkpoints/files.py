"""What is a checkpoint on the disk, and is it still what was written?

It is a directory with `about.json`, the arrays in Orbax's format, and `manifest.json`. The manifest
has the size and the SHA-256 sum of every other file, and a digest of itself. One process writes or
reads alone.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
import stat
from collections.abc import Awaitable, Iterator
from typing import Any

import jax
import numpy as np

ABOUT, ARRAYS = "about.json", "arrays"
_MANIFEST = "manifest.json"
_FORMAT = 1


class DamageError(Exception):
    """What is wrong with a checkpoint."""


def steps(directory: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a directory, whole or not; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        names = [name for name in os.listdir(directory) if name.isascii() and name.isdigit()]
        return [int(name) for name in names if f"{int(name):08d}" == name]
    return []


def seal(path: pathlib.Path, step: int) -> None:
    """Writes the manifest of a directory's files, and flushes all to the disk."""
    files = {name: _file_entry(path / name) for name in _plain_files(path)}
    (path / _MANIFEST).write_bytes(_manifest(step, files))
    for parent, _, names in os.walk(path, topdown=False):
        for name in names:
            flush(pathlib.Path(parent, name))
        flush(pathlib.Path(parent))


def verify(path: pathlib.Path, only: str | None = None) -> None:
    """Raises `DamageError` unless the directory is what its manifest says, file by file.

    With `only`, it checks that file alone.
    """
    text, is_whole = (path / _MANIFEST).read_bytes(), False
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        claimed = json.loads(text)
        step, version, files = claimed["step"], claimed["format"], claimed["files"]
        is_whole = text == _manifest(step, files, version)
    if not is_whole or step != int(path.name):
        raise DamageError(f"{_MANIFEST} is not what was written")
    if version != _FORMAT:
        raise ValueError(
            f"checkpoint {str(path)!r} has format {version}; this version of hetjax reads {_FORMAT}"
        )
    if only is None:
        found = set(_plain_files(path)) - {_MANIFEST}
        if missing := sorted(files.keys() - found):
            raise DamageError(f"{missing[0]} is missing")
        if unlisted := sorted(found - files.keys()):
            raise DamageError(f"{unlisted[0]} is not in {_MANIFEST}")
    for name, entry in files.items():
        if only in (None, name) and _file_entry(path / name) != entry:
            raise DamageError(f"the SHA-256 sum of {name} is another")


def _manifest(step: int, files: dict[str, Any], version: int = _FORMAT) -> bytes:
    """The one text of such a manifest: one that is not equal to it is damaged."""
    content = {"format": version, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"digest": digest}, indent=1, sort_keys=True).encode()


def _file_entry(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _plain_files(path: pathlib.Path) -> list[str]:
    """The names of the files below a directory; to one that is no plain file its kind is added."""

    def fail(error: OSError) -> None:
        raise error

    names = []
    for parent, directories, files in os.walk(path, onerror=fail):
        for name in files + [d for d in directories if os.path.islink(os.path.join(parent, d))]:
            file = pathlib.Path(parent, name)
            is_plain = stat.S_ISREG(file.lstat().st_mode)
            names.append(file.relative_to(path).as_posix() + ("" if is_plain else " (a link)"))
    return sorted(names)


def flush(path: pathlib.Path) -> None:
    """Flushes a file or a directory to the disk before it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """What an error says, in a line; if Orbax has wrapped it in others, the cause."""
    if cause := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(cause[1]))
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class _Existing:
    """A directory that exists already, in the form that Orbax asks for."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __truediv__(self, name: Any) -> "_Existing":
        return _Existing(self.path / name)

    async def await_creation(self) -> Any:
        return self.path


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """`(handler, path class)` for one process that writes or reads alone; 0.3 s at first.

    Orbax logs every step that it takes and each error several times. Here errors are only raised.
    Its logging would configure the root logger, were no handler there.
    """
    nothing = logging.NullHandler()
    logging.root.addHandler(nothing)
    import orbax.checkpoint.experimental.v1 as ocp

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    context = ocp.Context()
    context.array.saving.use_compression = False  # 100 MB: 0.06 s of processor, not 0.5
    context.memory.deepcopy_host_arrays = False
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    logger = logging.getLogger("absl")
    logger.addFilter(is_not_of_orbax)
    try:
        with context:
            yield ocp.handlers.PyTreeHandler(), context.file.path_class
    finally:
        logger.removeFilter(is_not_of_orbax)
        logging.root.removeHandler(nothing)


async def _done(begun: Awaitable[Awaitable[Any]]) -> Any:
    """Awaits both steps of Orbax: that it has begun a thing, and that it has done it."""
    return await (await begun)


# The handler is called directly. `ocp.save` (0.12.8) gathers the directory's name over all
# processes, whatever `active_processes` says. It would wait for ever for those that do not save.
def write_arrays(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a new directory of arrays that all have elements; they are flushed by `seal`."""
    path.mkdir()
    with _orbax() as (handler, path_class):
        asyncio.run(_done(handler.save(_Existing(path_class(path.absolute())), arrays)))


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote; raises `DamageError` if Orbax cannot."""
    with _orbax() as (handler, path_class):
        try:
            return asyncio.run(_done(handler.load(path_class(path.absolute()))))
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # the files are what was written, but Orbax cannot read them
            raise DamageError(f"Orbax cannot read it: {reason(error)}") from error
