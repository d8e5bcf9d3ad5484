"""What happens before the first round: shows it in a line that moves, and measures its seconds."""

import contextlib
import importlib
import io
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_AFTER_SECS = 1.0  # a stage that is over sooner is not shown
_PERIOD_SECS = {True: 0.5, False: 10.0}  # between two lines, on a terminal or notebook; in a file

_COLUMNS = 110  # of a bar in a notebook


class Starting(contextlib.AbstractContextManager["Starting"]):
    """The stages of a run's start, one after another.

    Args:
        shown: show the line; it goes away when the run begins.

    Example:
        >>> starting = Starting()
        >>> with starting.stage("compiling"):
        ...     starting.detail("worker 1 of 4")
        >>> list(starting.secs)
        ['compiling']
    """

    def __init__(self, *, shown: bool = False) -> None:
        self.shown = shown
        self.secs: dict[str, float] = {}
        """Seconds of each stage, by name."""
        self._line = _CellLine() if in_notebook() else None  # which the bar takes over
        self._now: tuple[str, str, float] | None = None  # stage, detail, when it began
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __exit__(self, *error: object) -> None:
        self.over()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context; what is done inside it belongs to this stage."""
        began = time.perf_counter()
        self._now = name, "", began
        if self.shown and self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._show, name="hetjax-starting", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._now = None
            self.secs[name] = self.secs.get(name, 0.0) + time.perf_counter() - began

    def detail(self, text: str) -> None:
        """Says what of the stage is being done now; nothing outside a stage."""
        if self._now is not None:
            name, _, began = self._now
            self._now = name, text, began

    def bar(self, **options: Any) -> Any:
        """As `bar`, in the place of the line."""
        return bar(**({} if self._line is None else {"file": self._line}), **options)

    def over(self) -> None:
        """Takes the line away; may be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        lives = sys.stderr.isatty() or in_notebook()
        line = None
        while not self._ended.wait(_PERIOD_SECS[lives]):
            now = self._now
            secs = 0.0 if now is None else time.perf_counter() - now[2]
            if now is None or secs < _AFTER_SECS:
                continue
            if line is None:  # a bar without a total has no truth value
                line = self.bar(bar_format="{desc}", leave=False)
            line.set_description_str(f"hetjax: {now[0]} {now[1]}".rstrip() + f", {secs:.0f} s")
        if line is not None:
            line.close()


def bar(**options: Any) -> Any:
    """A progress bar of tqdm: a line of a notebook's cell that moves, else one of the terminal.

    Args:
        **options: of `tqdm.tqdm`.
    """
    if in_notebook():
        options = {"file": _CellLine(), "ncols": _COLUMNS, **options}
    return importlib.import_module("tqdm").tqdm(**{"dynamic_ncols": True, **options})


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this, which shows what cells display."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _CellLine(io.TextIOBase):
    """A file whose last line is one output of a cell, changed in place.

    Carriage returns would do that only while the notebook is looked at: a saved one has each line.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._display: Any = None

    def write(self, text: str) -> int:
        line = text.rpartition("\r")[2].strip()
        if text != "\n" and (line or self._display is not None):
            content = {"text/plain": line}
            if self._display is None:
                show = importlib.import_module("IPython.display").display
                self._display = show(content, raw=True, display_id=True)
            else:
                self._display.update(content, raw=True)
        return len(text)
