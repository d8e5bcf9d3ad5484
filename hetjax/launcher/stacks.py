"""Where does a worker that hangs stand? Its stacks, kept for whoever looks later."""

import contextlib
import os
import pathlib
import re
import signal
import tempfile
import time

from hetjax.processes import beacons

_WAIT_SECS = 5.0
_QUIET_SECS = 0.3  # if nothing comes for so long, the dump is whole, on a busy machine too
_EXCERPT_LINES = 12


def keep(
    directory: pathlib.Path, process: int, snapshot: beacons.Snapshot
) -> tuple[pathlib.Path, str] | None:
    """Makes a process write the stacks of all its threads, and keeps them.

    Args:
        directory: where its beacons are.
        process: its number.
        snapshot: what it last said, which shows that it understands the signal.

    Returns:
        A file that stays, readable by its owner alone, and its content; None if the process did
        not answer.
    """
    source = beacons.stack_path(directory, process)
    with contextlib.suppress(OSError):
        os.kill(snapshot.pid, signal.SIGUSR1)
    text = ""
    deadline = time.monotonic() + _WAIT_SECS
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECS)
        before, text = text, source.read_text(errors="replace") if source.exists() else ""
        if text and text == before:
            break
    if not text:
        return None
    handle, name = tempfile.mkstemp(prefix=f"hetjax-worker-{process}-", suffix=".stack")
    with open(handle, "w") as file:
        file.write(text)
    return pathlib.Path(name), text


def main_part(text: str, thread: int = 0) -> str:
    """The part of a dump that matters most, shortened: one thread's frames, innermost first.

    Args:
        text: as `faulthandler` writes it.
        thread: whose frames; if they are not found, the main thread's, which is the last.

    Example:
        >>> print(main_part("Thread 0x0b (most recent call first):\\n  File 1\\n\\n"
        ...                 "Current thread 0x0a (most recent call first):\\n  File 2", 11))
        Thread 0x0b (most recent call first):
          File 1
    """
    sections = [section for section in text.strip().split("\n\n") if section]
    chosen = sections[-1]
    for section in sections:
        named = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", section)
        if named and int(named[1], 16) == thread:
            chosen = section
    lines = chosen.splitlines()
    if len(lines) > _EXCERPT_LINES:
        lines = [*lines[:_EXCERPT_LINES], f"  ... {len(lines) - _EXCERPT_LINES} more"]
    return "\n".join(lines)
