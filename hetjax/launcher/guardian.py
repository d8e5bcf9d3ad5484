"""Cleans up after a launcher that could not: one that was ended by SIGKILL.

Run as a file, in a process of its own. It reads a line for each thing that the launcher made and
each that it put away again. When standard input ends, it ends or removes whatever is left.
The workers themselves end with the launcher anyway (`enter.py`); their own children do not.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

_REMOVE_SECS = 5.0


def clean(lines: Iterable[str]) -> None:
    """Follows the lines until they end, then ends and removes what is left.

    Args:
        lines: `+ KIND NAME` or `- KIND NAME`, with the kinds `process_group` (NAME is its number),
            `control_group` and `directory` (NAME is its path).
    """
    left: dict[tuple[str, str], None] = {}
    for line in lines:
        sign, kind, name = line.rstrip("\n").split(" ", 2)
        if sign == "+":
            left[kind, name] = None
        else:
            left.pop((kind, name), None)
    for kind, name in sorted(left, key=lambda thing: thing[0] != "process_group"):
        if kind == "process_group":
            with contextlib.suppress(OSError):
                os.killpg(int(name), signal.SIGKILL)
        elif kind == "control_group":
            remove_control_group(name)
        elif kind == "directory":
            shutil.rmtree(name, ignore_errors=True)


def end_control_group(path: str) -> None:
    """Ends the processes of a control group."""
    with contextlib.suppress(OSError), open(os.path.join(path, "cgroup.procs")) as file:
        for pid in file.read().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def remove_control_group(path: str) -> None:
    """Ends the processes of a control group and removes it; gives up after a while."""
    deadline = time.monotonic() + _REMOVE_SECS
    while os.path.isdir(path) and time.monotonic() < deadline:
        end_control_group(path)
        with contextlib.suppress(OSError):  # its processes have not ended yet
            os.rmdir(path)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    clean(sys.stdin)
