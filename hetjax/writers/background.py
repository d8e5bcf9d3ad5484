"""The thread in which a writer writes: a run only puts its line in a queue.

A slow writer gets the newest record every so often, evaluations always, and at the end the last
one. A writer that raises is told once and called no more.
"""

import collections
import contextlib
import logging
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetjax import paths
from hetjax.writers import naming, records

logger = logging.getLogger(__name__)

_BATCH_SECS = 0.2  # between two looks into the queue, where all records are written
_TOLD_AFTER_SECS = 5.0  # of waiting for a writer at the end

Line = Mapping[str, Any]


def check(writers: Any) -> list[records.Writer]:
    """The writers of a call, checked.

    Raises:
        ValueError: they are no list of objects with `write` and `close`.
    """
    is_list = isinstance(writers, Iterable) and not isinstance(writers, str)
    found = list(writers) if is_list else []
    for writer in found if is_list else [writers]:
        if not is_list or not all(hasattr(writer, name) for name in ("write", "close")):
            raise ValueError(
                f"writers: got {writer!r}; give a list of objects with write(record) and "
                "close(ended), such as [hetjax.writers.csv()]"
            )
    return found


class Background:
    """Writers that a run hands its lines to, each in a thread of its own.

    Args:
        writers: checked.
        run: that they write of.

    Raises:
        ValueError: one does not know where to write.
    """

    def __init__(self, writers: Sequence[records.Writer], run: records.RunInfo) -> None:
        self._threads = [_Thread(writer, run) for writer in writers]
        for one in self._threads:
            one.thread.start()

    def put(self, line: Line) -> None:
        """Hands a line over; returns at once."""
        for thread in self._threads:
            thread.lines.append(line)

    def close(
        self, status: str, *, summary: Line | None = None, report: Callable[[], str] = lambda: ""
    ) -> None:
        """Waits until all is written; may be called again.

        Args:
            status: how the run ended, as of `Ended`.
            summary: as `summary.json`.
            report: makes the page.
        """
        threads, self._threads = self._threads, []
        page = report() if any(thread.wants_report for thread in threads) else ""
        for thread in threads:
            thread.end(status, summary or {}, page)
        for thread in threads:
            thread.wait()


class _Thread:
    """One writer, and the lines that it has not written yet."""

    def __init__(self, writer: records.Writer, run: records.RunInfo) -> None:
        self.lines: collections.deque[Line] = collections.deque()
        self._writer, self._run = writer, run
        self._every_secs = float(getattr(writer, "every_secs", 0.0))
        self.wants_report = bool(getattr(writer, "wants_report", True))
        self._ended: records.Ended  # what `end` says, before it is over
        self._is_over = threading.Event()
        self._has_failed = False
        self._name = getattr(writer, "name", type(writer).__name__)
        if (begin := getattr(writer, "begin", None)) is not None:
            self._call(begin, run)
        name = f"hetjax-writer-{self._name}"
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def end(self, status: str, summary: Line, report: str) -> None:
        """Lets the thread write what is left, and end."""
        self._ended = records.Ended(self._run, status, summary, report)
        self._is_over.set()

    def wait(self) -> None:
        """Until the thread has ended; says so where that takes long."""
        self.thread.join(_TOLD_AFTER_SECS)
        if self.thread.is_alive():
            logger.info(f"waiting for the writer {self._name}; Ctrl-C gives up what it has not")
            self.thread.join()

    def _loop(self) -> None:
        while not self._is_over.wait(self._every_secs or _BATCH_SECS):
            self._write()
        self._write()
        self._call(self._writer.close, self._ended)

    def _write(self) -> None:
        """All lines that came; of a slow writer evaluations and the newest line."""
        came = [self.lines.popleft() for _ in range(len(self.lines))]
        for line in came:
            if not self._every_secs or line is came[-1] or "eval" in line:
                step = line["step"] if "step" in line else line["round"]
                found = naming.scalars(line, self._run.sets)
                self._call(self._writer.write, records.Record(step, found, line, self._run))

    def _call(self, function: Callable[[Any], None], given: Any) -> None:
        """Calls the writer; an error is told, and it is called no more."""
        if self._has_failed:
            return
        try:
            if self._run.lead is not None:
                self._run.lead.check()
            function(given)
        except records.Misplaced:
            raise
        except Exception as error:
            self._has_failed = True
            said = f"{type(error).__name__}: {error}"
            logger.warning(f"the writer {self._name} raised {said}; it gets no more records")


@contextlib.contextmanager
def sending(
    writers: Sequence[records.Writer],
    *,
    config: Line | None = None,
    workdir: str | pathlib.Path | None = None,
    first_step: int = 0,
    sets: Sequence[str] = (),
) -> Iterator[Callable[[Any], None]]:
    """Hands the reports of a loop of one's own to writers.

    Args:
        writers: as of `fit`.
        config: that the trackers show, such as `run.recorded` of a `hetjax.Run`.
        workdir: where writers put what has no other place.
        first_step: of a loop that goes on.
        sets: names of the evaluated sets, if the lines have any.

    Yields:
        a function that takes a report of a round, or a line: a dict with `round` or `step`. A
        report is waited for, so hand over that of the round before while the next one computes.

    Raises:
        ValueError: a writer is none, or does not know where to write.

    Example:
        >>> import hetjax, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers.csv"
        >>> with hetjax.writers.sending([hetjax.writers.csv(path)]) as send:
        ...     send({"round": 0, "loss": 0.5})
        >>> print(path.read_text())
        step,train/loss
        0,0.5
        <BLANKLINE>
    """
    place = None if workdir is None else paths.on_disk(workdir)
    run = records.RunInfo(config or {}, place, first_step, tuple(sets))
    background = Background(check(writers), run)

    def send(report: Any) -> None:
        line = report.read() if hasattr(report, "read") else report
        background.put(line.to_plain() if hasattr(line, "to_plain") else line)

    try:
        yield send
    except BaseException as error:
        background.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    background.close("finished")
