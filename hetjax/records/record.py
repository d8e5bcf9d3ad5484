"""The files of a workdir: they grow with the run, and the progress bar with them."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import tqdm

from hetjax import report
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
        self._config = config
        self._workdir = None if workdir is None else pathlib.Path(workdir)
        self._lines: TextIO | None = None
        if self._workdir is not None:
            self._lines = _begin_files(self._workdir, self._config, lines)
        self._bar = tqdm.tqdm(
            total=num_examples,
            initial=lines[-1].examples_processed if lines else 0,
            disable=not progress,
            unit="ex",
            unit_scale=True,
            mininterval=0.3,
            dynamic_ncols=True,
        )
        self._bar.set_postfix_str("compiling")

    def add(self, line: RoundReport) -> None:
        """One round more."""
        fields = line.to_plain()
        self.history.append(fields)
        if self._lines is not None:
            assert self._workdir is not None
            try:
                self._lines.write(json.dumps(fields, allow_nan=False) + "\n")
            except OSError as error:
                raise recorded.unusable(self._workdir, error) from error
        if self._bar.disable:
            return
        if line.round == 0:
            self._bar.unpause()  # compiling says nothing of the pace
        quotas = ",".join(map(str, line.quotas[:8])) + (",…" if len(line.quotas) > 8 else "")
        self._bar.set_postfix_str(
            f"loss {line.loss:.3f}{_few(line.metrics)} quotas {quotas} "
            f"waiting {line.waiting_fraction:.0%}",
            refresh=False,
        )
        self._bar.update(line.examples)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes `summary.json` and `report.html`; returns the summary as JSON holds it.

        Raises:
            ValueError: if the directory cannot be written any more, such as on a full disk.
        """
        summary = plain(summary)
        self.close()
        if self._workdir is not None:
            try:
                _write_whole(self._workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
                report.write_report(
                    self._workdir / "report.html",
                    config=self._config,
                    summary=summary,
                    history=self.history,
                )
            except OSError as error:
                raise recorded.unusable(self._workdir, error) from error
        return summary

    def close(self) -> None:
        """Ends the bar and the file; may be called twice."""
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


def check_workdir(
    workdir: pathlib.Path, config: dict[str, Any], *, may_differ: Sequence[str] = ()
) -> None:
    """Sees that the directory is this configuration's, or nobody's; changes nothing in it.

    Args:
        workdir: made if it is missing.
        config: plain values.
        may_differ: groups of fields that may have other values there.

    Raises:
        ValueError: if it holds another configuration's run, or cannot be read.
    """
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        strangers = [name for name in _FILES if (workdir / name).exists()]
        if strangers and not path.exists():
            raise ValueError(
                f"workdir {str(workdir)!r} holds a {strangers[0]} but no config.json, so it is "
                "no directory of a run; give another directory"
            )
    except OSError as error:
        raise recorded.unusable(workdir, error) from error
    recorded.check(workdir, config, may_differ=may_differ)


def _begin_files(
    workdir: pathlib.Path, config: dict[str, Any], lines: Sequence[RoundReport]
) -> TextIO:
    """Removes what an earlier run left, but these lines of it; `metrics.jsonl` to write to."""
    try:
        _write_whole(workdir / "config.json", json.dumps(config, indent=2) + "\n")
        kept = "".join(line.to_json() + "\n" for line in lines)
        _write_whole(workdir / "metrics.jsonl", kept)
        for name in _FILES[1:]:
            (workdir / name).unlink(missing_ok=True)
        return (workdir / "metrics.jsonl").open("a", buffering=1)
    except OSError as error:
        raise recorded.unusable(workdir, error) from error


def _write_whole(path: pathlib.Path, text: str) -> None:
    """A kill now, or a full disk, leaves the file as it was."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def kept_lines(workdir: pathlib.Path, rounds_done: int) -> tuple[list[RoundReport], int]:
    """The lines of the first rounds in `metrics.jsonl`, and the examples of those after them.

    A line that is not whole, as a kill may leave the last one, ends them.
    """
    lines: list[RoundReport] = []
    try:
        for text in (workdir / "metrics.jsonl").read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            line |= {name: np.nan for name, value in line.items() if value is None}
            lines.append(RoundReport(**line))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if len(lines) < rounds_done:
            print(
                f"hetjax: {str(workdir / 'metrics.jsonl')!r} has {len(lines)} whole lines of the "
                f"{rounds_done} rounds that are done ({error}); the report lacks the others",
                file=sys.stderr,
            )
    return lines[:rounds_done], sum(line.examples for line in lines[rounds_done:])
