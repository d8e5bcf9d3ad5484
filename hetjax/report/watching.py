"""The page of a run while it goes on: written anew as lines come, until the run has ended."""

from __future__ import annotations

import datetime
import pathlib
import time
from collections.abc import Callable

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
    written: tuple[int, int] | None = None
    while True:
        ended = (directory / "summary.json").exists()
        state = _state(metrics)
        began = time.monotonic()
        if ended or state != written:
            if (run := _read(directory)) is None:
                time.sleep(_LOOK_SECS)
                continue
            if run.has_ended:
                write(run, path)
                say(f"the run has ended after {len(run.history):,} rounds: {path}")
                return
            write(run, path, every_secs=every_secs)
            written = state
        drawing_secs = time.monotonic() - began
        until = began + max(every_secs, drawing_secs / _DRAWING_SHARE)
        while time.monotonic() < until and not (directory / "summary.json").exists():
            time.sleep(_LOOK_SECS)


def write(run: files.Run, path: pathlib.Path, *, every_secs: int = 0) -> None:
    """The page of a run of training as it is now; one that goes on says so and loads itself anew.

    Raises:
        ValueError: it is another kind of run.
    """
    if not run.is_training:
        raise ValueError(no_training(run))
    summary, now = run.summary, None
    if not run.has_ended:
        summary = files.so_far(run.config, run.history)
        at = datetime.datetime.now().strftime("%H:%M:%S")
        now = page.Now("The run goes on, or was killed; the report covers what was done.", 0)
        if every_secs:
            told = f"The run goes on: {words.plural(len(run.history), 'round')} at {at}. This page "
            told += f"is written anew as it goes, and loads itself every {every_secs} s."
            now = page.Now(told, every_secs)
    text = page.render(config=run.config, summary=summary, history=run.history, now=now)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8", errors="replace")
    new.replace(path)


def no_training(run: files.Run) -> str:
    """Why the run in a directory is none of training, and what to do."""
    place = run.directory
    if run.is_bilevel:
        return (
            f"{place} is a run of a bilevel problem, whose lines are outer steps; --watch and "
            "several runs on one page are for runs of training. Its own report is written when "
            f"it ends: python -m hetjax.report {place}"
        )
    return (
        f"the lines of {place / 'metrics.jsonl'} are no rounds of training; give the workdir of a "
        "run of hetjax.fit or of experiments.train"
    )


def _state(path: pathlib.Path) -> tuple[int, int]:
    """Of a file: another one when it has changed."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _read(directory: pathlib.Path) -> files.Run | None:
    """The run; None while a run that begins anew replaces its files."""
    try:
        return files.read(directory)
    except ValueError:
        time.sleep(_LOOK_SECS)
        if (directory / "config.json").exists() and (directory / "metrics.jsonl").exists():
            return files.read(directory)
        return None
