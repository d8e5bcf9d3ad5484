"""Where does a worker that hangs stand? Its stacks, kept for a later look."""

import contextlib
import os
import pathlib
import tempfile
import time

from hetjax.liveness import heartbeats

_WAIT_SECS = 5.0
_QUIET_SECS = 0.3  # if nothing comes for so long, the dump is whole, on a busy machine too


def keep(directory: pathlib.Path, process: int, snapshot: heartbeats.Snapshot) -> str | None:
    """Makes a process write the stacks of all its threads, and keeps them.

    Args:
        directory: where its heartbeats are.
        process: its number.
        snapshot: what it last said, which shows that it understands the signal.

    Returns:
        The path of a file that stays, readable by its owner alone; None if the process did not
        answer.
    """
    source = heartbeats.stack_path(directory, process)
    with contextlib.suppress(OSError):
        os.kill(snapshot.pid, heartbeats.STACKS)
    text = ""
    deadline = time.monotonic() + _WAIT_SECS
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECS)
        before, text = text, source.read_text(errors="replace") if source.exists() else ""
        if text and text == before:
            break
    if not text:
        return None
    prefix = f"hetjax-worker-{process}-"
    with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".stack", delete=False) as file:
        file.write(text)
    return file.name
