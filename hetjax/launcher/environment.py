"""Variables that the launcher sets for its workers, so that libraries keep what they made.

What the user has set already stays as it is.
"""

import os
import pathlib
import platform

_KEPT = 1 << 32  # bytes of free memory
_MOST_OF_OLD_GLIBC = 1 << 25  # that 2.34 and older take as mmap_threshold


def compilation_cache(directory: pathlib.Path) -> dict[str, str]:
    """What makes JAX keep all that it compiles, so that a restart compiles nothing again.

    Variables that are set already stay as they are.
    """
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def allocator() -> dict[str, str]:
    """What makes glibc keep the memory that arrays give back, in large pages, for the next ones.

    `use_cpu_workers` asks for some of this, but too late for large pages and for the memory of
    threads. Memory that goes back to the system comes again page by page, zeroed. In virtual
    machines that is dear: it takes a process with a small share of a core longer than the update.
    glibc alone reads the variables. If one of its malloc's is set already, all stays as it is.
    """
    name, version = platform.libc_ver()
    if name != "glibc" or any(v.startswith(("GLIBC_TUNABLES", "MALLOC_")) for v in os.environ):
        return {}
    most = _KEPT if tuple(map(int, version.split(".")[:2])) >= (2, 35) else _MOST_OF_OLD_GLIBC
    wanted = {"hugetlb": 1, "trim_threshold": _KEPT, "mmap_threshold": most, "arena_max": 1}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{k}={v}" for k, v in wanted.items())}
