"""The page of a run while it goes on: written anew as lines come, until the run has ended."""

import contextlib
import datetime
import pathlib
import time
from collections.abc import Callable

from hetjax import whole
from hetjax.report import files, page, words

_DRAWING_SHARE = 0.2  # of the time, at most: drawing takes what the run could use
_LOOK_SECS = 0.5  # between two looks whether there is something new


def watch(
    directory: pathlib.Path,
    path: pathlib.Path,
    *,
    every_secs: int,
    say: Callable[[str], object] = print,
) -> None:
    """Writes the page of a run again and again, until its summary is there.

    A run that is not there yet is waited for. One that was killed has no summary: it may go on.

    Args:
        directory: the workdir of the run.
        path: of the page.
        every_secs: between two pages at least, and after which the page loads itself anew.
        say: gets what the user is told.

    Raises:
        ValueError: a file is broken, or the run is none of training.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.exists():
        say(f"waiting for a run in {directory}: it has no metrics.jsonl yet; Ctrl-C ends this")
        while not metrics.exists():
            time.sleep(_LOOK_SECS)
    say(f"writing {path} while the run goes on; open it in a browser. Ctrl-C ends this")
    written, until = -1, 0.0  # lines of the page, and when the next one may be drawn
    while True:
        ended = (directory / "summary.json").exists()
        began = time.monotonic()
        run = _read(directory) if ended or began >= until else None
        if run is not None and run.has_ended:
            write(run, path)
            say(f"the run has ended after {len(run.history):,} rounds: {path}")
            return
        if run is not None:
            if len(run.history) != written:
                write(run, path, every_secs=every_secs)
                written = len(run.history)
            until = began + max(every_secs, (time.monotonic() - began) / _DRAWING_SHARE)
        time.sleep(_LOOK_SECS)


def write(run: files.Written, path: pathlib.Path, *, every_secs: int = 0) -> None:
    """The page of a run of training as it is now; one that goes on says so and loads itself anew.

    Raises:
        ValueError: it is another kind of run.
    """
    run.check_training()
    notes = []
    if not run.has_ended:
        notes.append("The run goes on, or was killed; the report covers what was done.")
        if every_secs:
            at = datetime.datetime.now().strftime("%H:%M:%S")
            told = f"The run goes on: {words.plural(len(run.history), 'round')} at {at}."
            notes = [f"{told} This page loads itself every {every_secs} s."]
    text = page.render(
        config=run.config,
        summary=run.numbers,
        history=run.history,
        notes=notes,
        every_secs=0 if run.has_ended else every_secs,
    )
    with whole.written(path) as new:
        new.write_text(text, encoding="utf-8", errors="replace")


def _read(directory: pathlib.Path) -> files.Written | None:
    """The run; None while a run that begins anew replaces its files."""
    with contextlib.suppress(ValueError, OSError):
        return files.read(directory)
    time.sleep(_LOOK_SECS)
    is_there = all((directory / name).exists() for name in ("config.json", "metrics.jsonl"))
    return files.read(directory) if is_there else None
