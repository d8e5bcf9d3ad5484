"""Compiled programs are kept on disk and, once loaded, in memory; devices of one kind share them.

JAX has no public interface for two things that this takes. This module alone uses the private one.
If JAX has changed, programs are compiled as often as JAX does by itself.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import logging
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


OFF = "off"
AUTO = "auto"
_MOST_BYTES = 1 << 30  # of kept programs; those used longest ago are removed first
_USUAL_LEAST_SECS = 1.0  # JAX by itself keeps no program that took less time to compile
_CACHE_WRITE = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
_CACHE_READ = ["module_name", "cache_key", "compile_options", "backend", "executable_devices"]
_COMPILE = ["backend", "computation", "executable_devices", "compile_options", "host_callbacks"]
_COMPILE += ["module_name", "cache_key"]
_MOST_LOADED = 256  # programs in memory, each on its device; those used longest ago are let go
_HASH_OPTIONS = ["hash_obj", "compile_options_obj", "strip_device_assignment"]


def keep(where: str = AUTO) -> None:
    """Has JAX keep what it compiles, for this run and the next ones; may be called again.

    Args:
        where: a directory. 'auto': the one that JAX already has, or else `hetjax` in the user's
            cache directory, in which at most 1 GiB stays. 'off': change nothing.
    """
    import jax

    has: Any = jax.config  # mypy does not know its options
    if where == OFF or not has.jax_enable_compilation_cache:
        return
    _share_between_devices()
    _hold_loaded()
    if has.jax_compilation_cache_dir and where == AUTO:
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


def _replace(module: str, name: str, parameters: list[str], function: Callable) -> None:
    """Puts a function in the place of a private one of JAX, which it is given before the arguments.

    Once. Nothing where JAX has no such function, or one of other parameters; one more may follow.
    """
    try:
        home = importlib.import_module(f"jax._src.{module}")
        plain = getattr(home, name)
    except (ImportError, AttributeError):
        return
    found = list(inspect.signature(plain).parameters)
    if parameters in (found, found[:-1]) and not getattr(plain, "is_of_hetjax", False):
        made: Any = functools.update_wrapper(functools.partial(function, plain), plain)
        made.is_of_hetjax = True
        setattr(home, name, made)


def _share_between_devices() -> None:
    """Lets a CPU device load what was compiled for another one, if JAX computes on CPUs.

    JAX (0.10 to 0.12) does so for GPUs. For CPUs the key of a program names the device, although a
    loaded program is bound to the device for which it is loaded. Other versions are not known.
    """
    import jax

    def without_device(
        plain: Callable, hash_obj: Any, options: Any, strip_device_assignment: bool = False
    ) -> Any:
        assigned = options.device_assignment
        is_of_one = assigned is not None and assigned.computation_count() == 1
        is_of_one = is_of_one and assigned.replica_count() == 1
        return plain(hash_obj, options, strip_device_assignment or is_of_one)

    if jax.default_backend() == "cpu":
        _replace("cache_key", "_hash_serialized_compile_options", _HASH_OPTIONS, without_device)


@functools.lru_cache(_MOST_LOADED)
def loaded(key: str, backend: Any, devices: tuple[int, ...]) -> list[Any]:
    """A list for the program that this process has loaded; empty where it has not.

    The key finds it on disk, too.
    """
    return []


def _place_of(key: str, backend: Any, devices: Any) -> list[Any]:
    return loaded(key, backend, tuple(device.id for device in devices))


def _hold_loaded() -> None:
    """Has a program that is loaded already not loaded again: to link a large one takes a second.

    JAX (0.10 to 0.12) keeps loaded programs by the Python function that they were made of, and a
    second run has functions of its own. `jax.clear_caches()` lets all of them go.
    """

    def held_or_read(
        read: Callable, name: str, key: str, options: Any, backend: Any, devices: Any, *more: Any
    ) -> Any:
        place = _place_of(key, backend, devices)
        if place:
            return place[0], 0
        program, secs = read(name, key, options, backend, devices, *more)
        if program is not None and not any(more):  # callbacks
            place[:] = [program]
        return program, secs

    def compiled_and_held(
        compile_anew: Callable, backend: Any, computation: Any, devices: Any, *more: Any
    ) -> Any:
        program = compile_anew(backend, computation, devices, *more)
        _, callbacks, _, key = more
        if not callbacks:
            _place_of(key, backend, devices)[:] = [program]
        return program

    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import util

        util.register_cache(loaded, "programs that hetjax holds")
        _replace("compiler", "_cache_read", _CACHE_READ, held_or_read)
        _replace("compiler", "_compile_and_write_cache", _COMPILE, compiled_and_held)


def write_from_all_processes() -> None:
    """Lets each process of a launcher write what it compiles to the compilation cache.

    JAX (0.10 to 0.12) lets process 0 alone write, to spare shared file systems. So the others would
    compile all anew at each restart: to them a program has another key.
    """
    import jax

    def write(
        _: Any, key: str, secs: float, name: str, backend: Any, program: Any, callbacks: Any = ()
    ) -> None:
        has: Any = jax.config
        if secs < has.jax_persistent_cache_min_compile_time_secs or callbacks:
            return  # a program that calls Python cannot be kept
        with contextlib.suppress(Exception):  # a full disk: the next process compiles again
            from jax._src import compilation_cache as cache

            cache.put_executable_and_time(key, name, program, backend, int(secs))

    _replace("compiler", "_cache_write", _CACHE_WRITE, write)
