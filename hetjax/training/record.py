"""What a run leaves behind: the line a round, the progress bar, the summary, the files."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import tqdm

from hetjax import config as config_lib
from hetjax import kinds, report


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """One round, on the host: a line of `metrics.jsonl`, and what callbacks are given.

    Times are seconds of the run's clock, which stands still during evaluations.
    """

    round: int
    epoch: int
    examples: int  # processed in this round, by all workers
    examples_processed: int  # since the run began
    skipped_examples: int  # of `examples`: in microbatches that were not finite
    loss: float  # mean over the round
    quotas: list[int]  # microbatches, [W]
    microbatches_done: list[int]  # [W]; what is left of the quotas went back to the order
    examples_counted: list[int]  # [W], that entered the sums
    present: list[bool]  # [W]
    compute_secs: list[float]  # each worker's own, [W]
    start_secs: float
    local_secs: float  # the longest local phase
    round_secs: float  # to the start of the next round
    waiting_fraction: float  # of the present workers' time of compute and lead
    full: bool  # of the whole budget; the last round of an epoch is smaller
    overruns: int  # microbatches slower than the emulated worker
    optimal_round_secs: float | None = None  # exact optimum for the true speeds, if known
    lead_secs: list[float] | None = None  # of its process, beside compute_secs; None: unknown, [W]
    eval: dict[str, float] | None = None
    bytes_sent: int = 0  # by all workers, as the reducer counts them
    consensus: dict[str, float] | None = None  # distance of the replicas from their mean
    herding: dict[str, float] | None = None  # bounds of the order to come and of a random one

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, without fields that are None; not-finite numbers are None."""
        return {name: _plain(value) for name, value in vars(self).items() if value is not None}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_plain(), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON's own types, numbers to 9 digits, not-finite ones as None."""
    if type(value) in (int, bool, str):
        return value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def versions() -> dict[str, str]:
    """Of what computes a run."""
    return {name: importlib.metadata.version(name) for name in ("hetjax", "jax")}


_FILES = ("metrics.jsonl", "summary.json", "report.html")


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
        plain = line.to_plain()
        self.history.append(plain)
        if self._lines is not None:
            assert self._workdir is not None
            try:
                self._lines.write(json.dumps(plain, allow_nan=False) + "\n")
            except OSError as error:
                raise _unusable(self._workdir, error) from error
        if self._bar.disable:
            return
        if line.round == 0:
            self._bar.unpause()  # compiling says nothing of the pace
        quotas = ",".join(map(str, line.quotas[:8])) + (",…" if len(line.quotas) > 8 else "")
        self._bar.set_postfix_str(
            f"loss {line.loss:.3f} quotas {quotas} waiting {line.waiting_fraction:.0%}",
            refresh=False,
        )
        self._bar.update(line.examples)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes `summary.json` and `report.html`; returns the summary as JSON holds it.

        Raises:
            ValueError: if the directory cannot be written any more, such as on a full disk.
        """
        summary = _plain(summary)
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
                raise _unusable(self._workdir, error) from error
        return summary

    def close(self) -> None:
        """Ends the bar and the file; may be called twice."""
        self._bar.close()
        if self._lines is not None:
            with contextlib.suppress(OSError):  # a line that could not be written has been told
                self._lines.close()


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
        if path.exists():
            theirs = config_lib.completed(json.loads(path.read_text()), config)
            _check_given(theirs, config)
            different = _differences(
                {k: v for k, v in theirs.items() if k not in may_differ},
                {k: v for k, v in config.items() if k not in may_differ},
            )
            if different:
                more = f" and {len(different) - 3} more" if len(different) > 3 else ""
                raise ValueError(
                    f"workdir {str(workdir)!r} belongs to another configuration "
                    f"({'; '.join(different[:3])}{more}); give another directory"
                )
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise _unusable(workdir, error) from error


def _check_given(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuses a run whose part could not be written down there, and is another here."""
    for group, kind in kinds.KINDS.items():
        name, mine = theirs.get(group, {}).get(kind.key), ours.get(group, {}).get(kind.key)
        if isinstance(name, str) and name.startswith(kinds.GIVEN) and name != mine:
            raise ValueError(
                f"the run in this workdir has the {kind.title} {name.removeprefix(kinds.GIVEN)!r}, "
                f"which could not be written down; here it is {mine!r}. Give the same object again "
                f"to go on, as {group}=…, or give another directory"
            )


def _unusable(workdir: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(
        f"workdir {str(workdir)!r} cannot be used: {error}; give a directory that can be written"
    )


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
        raise _unusable(workdir, error) from error


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return [f"{name}: {_short(theirs)} there, {_short(ours)} here"]
    return [
        line
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
        for line in _differences(theirs.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
    ]
