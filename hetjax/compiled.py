"""Compiled programs are kept on disk; devices of one kind share them.

The last takes private functions of JAX, while a run is open.
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
_WRITTEN = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
_lock, _inside = threading.Lock(), 0  # how many runs are open
_plain: dict[str, Callable[..., Any]] = {}  # JAX's own, meanwhile


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
    """Inside, a CPU device loads what was compiled for another one, and launched processes all keep
    what they compile.

    JAX (0.10 to 0.12) shares programs between GPUs. For CPUs the key of a program names the device,
    although a loaded program is bound to the device for which it is loaded. Process 0 alone keeps
    programs, to spare shared file systems; so the others would compile anew at each restart. JAX
    has no public interface for either. Outside, its own functions are back.
    """
    global _inside
    homes: dict[str, Any] = {}
    with contextlib.suppress(ImportError):  # of another version
        from jax._src import cache_key, compiler

        ours: dict[str, tuple[Any, list[str]]] = {"get": (cache_key, _KEYED)}
        if "HETJAX_ATTEMPT" in os.environ:
            ours["_cache_write"] = (compiler, _WRITTEN)
        for name, (home, known) in ours.items():
            plain = getattr(home, name, lambda: None)
            if list(inspect.signature(plain).parameters)[: len(known)] == known:
                homes[name] = home
    with _lock:
        for name, home in homes.items() if not _inside else ():
            _plain[name] = getattr(home, name)
            setattr(home, name, {"get": _key, "_cache_write": _write}[name])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            for name, home in homes.items() if not _inside else ():
                setattr(home, name, _plain[name])  # a thread may still be inside ours


def _key(module: Any, devices: Any, compile_options: Any, backend: Any, *more: Any) -> str:
    """As JAX's, without the device where a program is of one."""
    assigned = compile_options.device_assignment
    if backend.platform == "cpu" and devices.size == 1 and assigned is not None:
        compile_options = copy.deepcopy(compile_options)
        compile_options.device_assignment = type(assigned).create(np.zeros((1, 1), int))
    return _plain["get"](module, devices, compile_options, backend, *more)


def _write(
    cache_key: str,
    compile_time_secs: float,
    module_name: str,
    backend: Any,
    executable: Any,
    host_callbacks: Any = (),
) -> None:
    """As JAX's, whatever the process."""
    import jax
    from jax._src import compilation_cache

    has: Any = jax.config
    if compile_time_secs < has.jax_persistent_cache_min_compile_time_secs or host_callbacks:
        return  # a program that calls Python cannot be kept
    with contextlib.suppress(Exception):  # a full disk: the next process compiles again
        compilation_cache.put_executable_and_time(
            cache_key, module_name, executable, backend, int(compile_time_secs)
        )
