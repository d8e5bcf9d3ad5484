"""The results of a study: one file of JSON lines, a line a run, which only grows.

A process that is killed while it adds a line leaves the lines before it as they are. Several
processes may add to a file.
"""

import fcntl
import functools
import json
import os
import pathlib
import sys
from typing import Any

Record = dict[str, Any]


def read(path: pathlib.Path) -> tuple[Record, ...]:
    """The results of a study; none where there is no file. They are shared: change none of them.

    A last line that was cut short is dropped, and said.
    """
    if not path.exists():
        return ()
    status = path.stat()
    return _parsed(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)  # a study asks for its results after each run
def _parsed(path: pathlib.Path, *version: int) -> tuple[Record, ...]:
    del version
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        print(
            f"{path}: the last line is cut short; it is dropped, and its run is done again",
            file=sys.stderr,
        )
    return tuple(json.loads(line) for line in lines)


def append(path: pathlib.Path, record: Record) -> None:
    """Adds a line, in place of one that was cut short."""
    line = json.dumps(record) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        if whole < file.tell():
            file.truncate(whole)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
