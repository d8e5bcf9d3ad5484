"""The files of a workdir: they grow with the run, and the progress bar with them."""

import contextlib
import json
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from hetjax import paths, whole
from hetjax.checkpoints import generations
from hetjax.comm import key_value_store as store_lib
from hetjax.config import recorded
from hetjax.reported import plain

METRICS, SUMMARY, REPORT = "metrics.jsonl", "summary.json", "report.html"

PATIENCE_SECS = 60.0
"""How long the disk of a network may not show a new file."""

_BEGIN_SECS = 600.0
Line = dict[str, Any]


class Recorder:
    """Keeps the lines of a run, writes them as they come, and moves the progress bar.

    Args:
        workdir: a directory of only this run; None keeps everything in memory.
        config: plain values; written as `config.json`.
        files: names of the files of lines, by what they hold.
        lines: of each file, those of the steps before a resumed run goes on.
        bar: makes the bar, when the first step is done; None: no bar is shown.
        lead: of this process, where others may lead before and after it.

    Raises:
        ValueError: if the directory cannot be written, as where another process leads.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path | None,
        config: dict[str, Any],
        *,
        files: Mapping[str, str],
        lines: Mapping[str, list[Line]],
        bar: Callable[[], Any] | None = None,
        lead: generations.Lead | None = None,
    ) -> None:
        self.config, self.lines = config, {name: list(lines[name]) for name in files}
        self.workdir = None if workdir is None else pathlib.Path(workdir)
        self.page = ""  # report.html, when it is written
        self._files: dict[str, TextIO] = {}
        self._make_bar, self._bar = bar, None
        self._lead, self._written = lead, whole.written if lead is None else lead.written
        if self.workdir is None:
            return
        with recorded.usable(self.workdir, lead):
            self._write("config.json", _as_json(config))
            for name, file in files.items():
                with self._written(self.workdir / file) as new:
                    self._files[name] = new.open("w", buffering=1)  # whatever takes its place
                    self._files[name].write("".join(json.dumps(x) + "\n" for x in lines[name]))
            for name in (SUMMARY, REPORT):
                (generations.put_away if lead is None else lead.remove)(self.workdir / name)

    @property
    def history(self) -> list[Line]:
        """A line a step."""
        return self.lines["metrics"]

    def add(self, lines: Sequence[tuple[str, Line]], text: str, amount: int) -> None:
        """Takes what a step leaves.

        Args:
            lines: each with the name of its file.
            text: behind the bar.
            amount: by how much the bar moves.
        """
        if self._make_bar is not None and self._bar is None:
            self._bar = self._make_bar()
        for name, line in lines:
            self.lines[name].append(line)
            if self.workdir is not None:
                with recorded.usable(self.workdir, self._lead):
                    self._files[name].write(json.dumps(line, allow_nan=False) + "\n")
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(amount)

    def finish(
        self, summary: dict[str, Any], page: Callable[[dict[str, Any], "Recorder"], str]
    ) -> dict[str, Any]:
        """Writes `summary.json` and `report.html`; returns the summary as JSON holds it.

        Args:
            summary: of the run.
            page: makes the report of it and the lines.

        Raises:
            ValueError: if the directory cannot be written any more, such as on a full disk.
        """
        summary = plain(summary)
        self.close()
        if self.workdir is not None:
            with recorded.usable(self.workdir, self._lead):
                self._write(SUMMARY, _as_json(summary))
                self.page = page(summary, self)
                self._write(REPORT, self.page)
        return summary

    def _write(self, name: str, text: str) -> None:
        assert self.workdir is not None
        with self._written(self.workdir / name) as new:
            new.write_text(text, encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Ends the bar and the files; may be called twice."""
        if self._bar is not None:
            self._bar.close()
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a line that could not be written has been told
                file.close()


def absolute(workdir: str | pathlib.Path | None) -> pathlib.Path | None:
    """Where it is; one of no run is None.

    Raises:
        ValueError: it is no directory of a disk.
    """
    return None if workdir is None else paths.on_disk(workdir)


def made_directory(workdir: pathlib.Path) -> pathlib.Path:
    """The directory, made if it is missing; sees that it is a run's, or has no files of one.

    Raises:
        ValueError: it holds files of something else, or cannot be read or written.
    """
    workdir = paths.on_disk(workdir)
    with recorded.usable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        strangers = [name for name in (METRICS, SUMMARY, REPORT) if (workdir / name).exists()]
    if strangers and not (workdir / "config.json").exists():
        raise ValueError(
            f"workdir {str(workdir)!r} holds a {strangers[0]} but no config.json: it is no run's"
        )
    return workdir


def check_shared(directory: pathlib.Path, own: int, *, leads: bool) -> None:
    """Sees that this process has the workdir of the one that leads, on a disk that both see: the
    generation of its run is there.

    Args:
        directory: the workdir, as this process knows it.
        own: this process.
        leads: whether it leads; it has begun there.

    Raises:
        ValueError: this process does not see the generation.
    """
    store, root = store_lib.KeyValueStore("workdir"), directory / generations.DIRECTORY
    said = f"process {own} ({socket.gethostname()}, {str(directory)!r})"
    if leads:
        store.post("leader", [said.replace("process", "workdir of process", 1), _begun(root)])
    leader, begun = store.wait("leader", _BEGIN_SECS, what="begin in the workdir")
    ends = time.monotonic() + PATIENCE_SECS
    while _begun(root) != begun:
        if time.monotonic() > ends:
            raise ValueError(
                f"{said} does not see the {leader}; give one on a disk that all processes see"
            )
        time.sleep(0.05)


def _begun(root: pathlib.Path) -> Any:
    """What is alike for all leaders of a run, and for no other run."""
    newest = generations.newest(root)
    return newest["run_id"] or newest


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def whole_lines(
    path: pathlib.Path, check: Callable[[Line], Any] = lambda line: None
) -> tuple[list[Line], str]:
    """The lines of a file of JSON up to the first that is not whole; none of no file.

    Args:
        path: of the file.
        check: raises a ValueError, KeyError or TypeError of a line that is not whole.

    Returns:
        the lines, and what is wrong with the next one, or ''.
    """
    lines: list[Line] = []
    try:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            check(line)
            lines.append(line)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return lines, str(error)
    return lines, ""
