"""Compiled programs are kept on disk; devices of one kind share them.

Only the last takes a private function of JAX, while a run is open.
"""

import contextlib
import copy
import hashlib
import inspect
import logging
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

OFF = "off"
AUTO = "auto"
_MOST_BYTES = 1 << 30  # of kept programs; those used longest ago are removed first
_USUAL_LEAST_SECS = 1.0  # JAX by itself keeps no program that took less time to compile
_KEYED = ["module", "devices", "compile_options", "backend"]
_lock, _inside = threading.Lock(), 0  # how many runs are open
_plain: Callable[..., str]  # JAX's, meanwhile


def keep(where: str = AUTO) -> None:
    """Has JAX keep what it compiles, for this run and the next ones; may be called again.

    Args:
        where: a directory. 'auto': the one that JAX already has, or else `hetjax` in the user's
            cache directory, in which at most 1 GiB stays. 'off': change nothing.
    """
    import jax

    has: Any = jax.config  # mypy does not know its options
    is_set = where == AUTO and has.jax_compilation_cache_dir
    if where == OFF or is_set or not has.jax_enable_compilation_cache:
        return
    directory = default_directory() if where == AUTO else pathlib.Path(where).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if where == AUTO:
            _prune(directory)
    except OSError as error:
        logger.warning(f"compiled programs are not kept in {str(directory)!r}: {error}")
        return
    from jax.experimental.compilation_cache import compilation_cache

    if has.jax_persistent_cache_min_compile_time_secs == _USUAL_LEAST_SECS:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # else JAX goes on without one if it began without


def default_directory() -> pathlib.Path:
    """The directory of this user, kind of processor and versions: others' programs may not run."""
    import jax

    processor = platform.node()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith("flags")), processor)
    digest = hashlib.blake2b(processor.encode(), digest_size=4).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"{jax.__version__}-{platform.machine()}-{digest}"
    return pathlib.Path(home, "hetjax", "compiled", name).expanduser()


def _prune(directory: pathlib.Path) -> None:
    """Removes the programs that were used longest ago, until the others are small enough."""
    found = []
    for path in directory.parent.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if path.is_file():
                status = path.stat()
                found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in found) - _MOST_BYTES
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Inside, a CPU device loads what was compiled for another one.

    JAX (0.10 to 0.12) does so for GPUs. For CPUs the key of a program names the device, although a
    loaded program is bound to the device for which it is loaded. JAX has no public interface for
    it; of another version each device compiles for itself. Outside JAX's own function is back.
    """
    global _inside, _plain
    home: Any = None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import cache_key

        if list(inspect.signature(cache_key.get).parameters)[:4] == _KEYED:
            home = cache_key
    if home is None:
        yield
        return
    with _lock:
        if not _inside:
            _plain, home.get = home.get, _key
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                home.get = _plain


def _key(module: Any, devices: Any, compile_options: Any, backend: Any, *more: Any) -> str:
    """As JAX's, without the device where a program is of one."""
    assigned = compile_options.device_assignment
    if backend.platform == "cpu" and devices.size == 1 and assigned is not None:
        compile_options = copy.deepcopy(compile_options)
        compile_options.device_assignment = type(assigned).create(np.zeros((1, 1), int))
    return _plain(module, devices, compile_options, backend, *more)
