"""How much memory is there for examples? Of the machine, the process's control groups and limits.

NumPy and JAX do not say: an array that is too large raises a MemoryError, or the system kills the
process when the array is written to. Linux alone tells; elsewhere nothing is known.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # a limit above is none


def free_bytes() -> int | None:
    """Bytes that this process may still take; None: that is not known."""
    found = [*_of_machine(), *_of_groups(), *_of_process()]
    return max(0, min(found)) if found else None


def _of_machine() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (_PROC / "meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        yield int(line.split()[1]) * 1024


def _of_groups() -> Iterator[int]:
    """What is left of each control group's limit that this process is in, of both versions."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                roots = [_CGROUPS, _CGROUPS / "unified"]
                names = "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                roots = [_CGROUPS / "memory"]
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            for root in roots:
                own = root / path.lstrip("/")
                for group in (own, *own.parents):
                    yield from _of_group(group, *names)
                    if group == root:
                        break


def _of_group(group: pathlib.Path, most: str, used: str, files: str) -> Iterator[int]:
    """What is left of one group's limit; of it the system takes back what it keeps of files."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / most).read_text())  # "max": no limit
        if limit < _UNLIMITED:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit - int((group / used).read_text()) + int(stat.get(files, 0))


def _of_process() -> Iterator[int]:
    """What is left of `ulimit -v`."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if 0 <= limit < _UNLIMITED:
            pages = int((_PROC / "self" / "statm").read_text().split()[0])
            yield limit - pages * os.sysconf("SC_PAGE_SIZE")
