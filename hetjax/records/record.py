"""The files of a workdir: they grow with the run, and the progress bar with them."""

import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from hetjax import report, starting
from hetjax.config import recorded
from hetjax.rounds.round_report import RoundReport, plain

_FILES = ("metrics.jsonl", "summary.json", "report.html")
_MOST_CHARACTERS = 32  # of metrics in the progress bar


class Recorder:
    """Keeps the history, writes `metrics.jsonl` as it grows, and moves the progress bar.

    Args:
        workdir: a directory of this run alone; None keeps everything in memory.
        config: plain values; written as `config.json`.
        num_examples: that the run will process, for the bar.
        progress: show the bar.
        lines: of the rounds before a resumed run goes on.

    Raises:
        ValueError: if the directory cannot be written.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path | None,
        config: dict[str, Any],
        *,
        num_examples: int,
        progress: bool,
        lines: Sequence[RoundReport] = (),
    ) -> None:
        self.history = [json.loads(line.to_json()) for line in lines]
        self.config = config
        self.workdir = None if workdir is None else pathlib.Path(workdir)
        self._lines: TextIO | None = None
        if self.workdir is not None:
            self._lines = _begin_files(self.workdir, self.config, lines)
        self._num_examples, self._progress = num_examples, progress
        self._bar: Any = None  # from the first round on

    def add(self, line: RoundReport) -> None:
        """One round more."""
        fields = line.to_plain()
        self.history.append(fields)
        if self._lines is not None:
            assert self.workdir is not None
            try:
                self._lines.write(json.dumps(fields, allow_nan=False) + "\n")
            except OSError as error:
                raise recorded.unusable(self.workdir, error) from error
        if not self._progress:
            return
        if self._bar is None:
            self._bar = self._begin_bar(line.examples_processed - line.examples)
        quotas = ",".join(map(str, line.quotas[:8])) + (",…" if len(line.quotas) > 8 else "")
        self._bar.set_postfix_str(
            f"{_loss(line.loss)}{_few(line.metrics)} quotas {quotas} "
            f"waiting {line.waiting_fraction:.0%}",
            refresh=False,
        )
        self._bar.update(line.examples)

    def _begin_bar(self, done: int) -> Any:
        return starting.bar_class()(
            total=self._num_examples,
            initial=done,
            unit="ex",
            unit_scale=True,
            mininterval=0.3,
            dynamic_ncols=True,
        )

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes `summary.json` and `report.html`; returns the summary as JSON holds it.

        Raises:
            ValueError: if the directory cannot be written any more, such as on a full disk.
        """
        summary = plain(summary)
        self.close()
        if self.workdir is not None:
            try:
                write_whole(self.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
                report.write_report(
                    self.workdir / "report.html",
                    config=self.config,
                    summary=summary,
                    history=self.history,
                )
            except OSError as error:
                raise recorded.unusable(self.workdir, error) from error
        return summary

    def close(self) -> None:
        """Ends the bar and the file; may be called twice."""
        if self._bar is not None:
            self._bar.close()
        if self._lines is not None:
            with contextlib.suppress(OSError):  # a line that could not be written has been told
                self._lines.close()


def _few(metrics: dict[str, float] | None) -> str:
    """As many metrics as the bar's line has room for."""
    text = ""
    for name, value in (metrics or {}).items():
        more = f" {name} {value:.3f}"
        if len(text + more) <= _MOST_CHARACTERS:
            text += more
    return text


def _loss(loss: float) -> str:
    return "no loss" if math.isnan(loss) else f"loss {loss:.3f}"


def made_directory(workdir: pathlib.Path) -> pathlib.Path:
    """The directory, made if it is missing; sees that it is a run's or nobody's.

    Raises:
        ValueError: it holds files of something else, or cannot be read or written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        strangers = [name for name in _FILES if (workdir / name).exists()]
    except OSError as error:
        raise recorded.unusable(workdir, error) from error
    if strangers and not (workdir / "config.json").exists():
        raise ValueError(
            f"workdir {str(workdir)!r} holds a {strangers[0]} but no config.json, so it is no "
            "directory of a run; give another directory"
        )
    return workdir


def _begin_files(
    workdir: pathlib.Path, config: dict[str, Any], lines: Sequence[RoundReport]
) -> TextIO:
    """Removes what an earlier run left, but these lines of it; `metrics.jsonl` to write to."""
    try:
        write_whole(workdir / "config.json", json.dumps(config, indent=2) + "\n")
        kept = "".join(line.to_json() + "\n" for line in lines)
        write_whole(workdir / "metrics.jsonl", kept)
        for name in _FILES[1:]:
            (workdir / name).unlink(missing_ok=True)
        return (workdir / "metrics.jsonl").open("a", buffering=1)
    except OSError as error:
        raise recorded.unusable(workdir, error) from error


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file: a kill now, or a full disk, leaves the file as it was."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def whole_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON up to the first that is not whole; none of no file."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        lines.extend(json.loads(text) for text in path.read_text().splitlines())
    return lines


def kept_lines(
    workdir: pathlib.Path, rounds_done: int, *, tells: bool = True
) -> tuple[list[RoundReport], int]:
    """The lines of the first rounds in `metrics.jsonl`, and the examples of those after them.

    A line that is not whole, as a kill may leave the last one, ends them; `tells` says so.
    """
    lines: list[RoundReport] = []
    try:
        for text in (workdir / "metrics.jsonl").read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            line |= {name: np.nan for name, value in line.items() if value is None}
            lines.append(RoundReport(**line))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if tells and len(lines) < rounds_done:
            print(
                f"hetjax: {str(workdir / 'metrics.jsonl')!r} has {len(lines)} whole lines of the "
                f"{rounds_done} rounds that are done ({error}); the report lacks the others",
                file=sys.stderr,
            )
    return lines[:rounds_done], sum(line.examples for line in lines[rounds_done:])
