"""Is every process still part of the run? Each tells how it ends, and hears how the others do.

JAX has a process wait at its exit until all others have come to theirs. So a process that raises
would stay there for minutes while the others wait for it in a round, and none would say why. `join`
calls `begin`, and from then on:

- A process tells at once, over the board and to the launcher, an exception that is not caught.
- It tells that an exception has left a round, although it may still be caught. It also tells
  that it has come to its exit, where it waits for the others.
- It looks several times a second at what the others told. If one has raised, or if it waits for one
  that has left, it says so and ends, too: by the `LostProcessError` of its wait, or else after a
  moment. Its exit then waits for no process.
- It tells what it does. Every ten seconds it says whom it waits for and who is silent
  (`stall_reporter`).
"""

import atexit
import contextlib
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from hetjax import process_info
from hetjax.liveness import blocking_waits, exit_reports, stall_reporter
from hetjax.liveness import heartbeats as heartbeats_lib

logger = logging.getLogger(__name__)

_LOOKS_PER_SEC = 4.0  # of one process
_MOST_LOOKS_PER_SEC = 128.0  # of all together: process 0 answers each look, in 0.1 ms
_EXIT_LOOK_SECS = 0.05
_LAST_MESSAGE_SECS = 0.75  # how long what a process sent before its exit may be on its way
_GRACE_SECS = 1.5  # in which a process that has heard of an end is to end by itself
_LONG_GRACE_SECS = 10.0  # the same once it is ending: process 0 writes the files of the run, too
_EXIT_SECS = 300.0  # how long a process waits at its exit for the others, as JAX does
_LAST_SECS = 2.0  # how long process 0, which holds the board, waits for others after a fault
_GONE_SECS = 0.5  # between a process's last word and its end


class Detector:
    """What a process that is alone tells others: nothing."""

    def follow(self, heartbeats: heartbeats_lib.Heartbeats) -> None:
        """From now on the others may read what these heartbeats say."""

    def left(self, error: BaseException) -> None:
        """Tells that this exception has left a round; it may still be caught."""

    def goes_on(self) -> None:
        """Tells that this process takes part in rounds again; nothing if it has left none."""

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Around what all processes do together: the others hear of one that leaves it by an
        exception. All processes alike may still catch that and go on with another call."""
        self.goes_on()
        try:
            yield
        except BaseException as error:
            self.left(error)
            raise

    def tell(self, words: str, *, code: int) -> None:
        """Tells that this process is about to end, and that the others cannot go on without it.

        Args:
            words: what it did, to stand behind its name.
            code: the exit code of the others.
        """


class FailureDetector(Detector):
    """What one process tells and hears.

    Args:
        process: its number.
        num_processes: of the run.
        store: one that all processes have, for exit reports alone.
        directory: where the launcher looks, if there is a launcher.
        roster: of the run.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        store: stall_reporter.Store,
        directory: pathlib.Path | None = None,
        roster: stall_reporter.Roster | None = None,
    ) -> None:
        self._process, self._num_processes = process, num_processes
        self._store, self._directory = store, directory
        self._roster = roster or stall_reporter.Roster()
        self._pid = os.getpid()
        self._heartbeats = heartbeats_lib.Heartbeats()
        self._lock = threading.Lock()
        # Of the run: the first that was told or heard.
        self._end: exit_reports.ExitReport | None = None
        self._has_lost = False  # another process is gone, and none said why
        self._left_by: BaseException | None = None  # what it has left a round by
        self._reason: exit_reports.ExitReport | None = None  # the same in words
        # Who has left a round, or come to its exit.
        self._left: dict[int, exit_reports.ExitReport] = {}
        self._last_left = 0.0  # monotonic, when the last of them was seen
        self._is_unwinding = False  # by an exception
        self._is_leaving = False
        self._suspected: tuple[blocking_waits.Wait, float] | None = None  # since when, monotonic
        self._notices = stall_reporter.StallReporter(process, num_processes, store, self._roster)
        self._wake, self._over, self._closed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="hetjax-watch", daemon=True)

    def begin(self) -> None:
        """Hooks itself into this process, whose children are none of the run from now on."""
        import asyncio  # the launcher, which imports this file, has no use for it

        # Begun early: Python 3.12 starts no thread at its exit.
        self._later = asyncio.new_event_loop()
        threading.Thread(target=self._later.run_forever, name="hetjax-later", daemon=True).start()
        os.environ[process_info.JOINED] = str(os.getpid())
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        atexit.register(self._at_exit)  # registered after JAX's own, so called before it
        self._thread.start()
        self._notices.begin()

    def follow(self, heartbeats: heartbeats_lib.Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._roster.follow(heartbeats)
        self.goes_on()

    def left(self, error: BaseException) -> None:
        self._is_unwinding = True
        is_known = self._end is not None or self._left_by is error or is_loss(error)
        if not (is_known or self._roster.is_guest):  # for whom no process waits
            self._left_by, self._reason = error, exit_reports.of_error(self._process, error)
            self._say_left()

    def goes_on(self) -> None:
        self._is_unwinding = False
        if self._reason is not None:
            self._left_by = self._reason = None
            with contextlib.suppress(Exception):
                self._store.remove(f"left/{self._process}")

    def tell(self, words: str, *, code: int) -> None:
        words = " ".join(words.split())[: exit_reports.MOST_CHARACTERS]
        self._tell(exit_reports.ExitReport(self._process, words, "", code, time.monotonic()))

    # The own end

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """`sys.excepthook`: Python calls it before it waits for threads and at its exit."""
        if os.getpid() != self._pid:  # this is a fork, which is no process of the run
            self._hook(kind, error, trace)
            return
        if not is_loss(error):
            self._hook(kind, error, trace)
        elif self._end_of_others() is None:  # else it was said in words who has ended, and how
            first_line = (str(error).splitlines() or [kind.__name__])[0]
            logger.error(f"process {self._process} has lost the others: {first_line}")
        self._roster.end_guest(exit_reports.of_error(self._process, error).words)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and hasattr(error, "result"):  # all end by it
            self._reason = exit_reports.of_error(self._process, error)
            return
        self._is_unwinding = True
        if is_loss(error):
            self._has_lost = True
        else:
            ending = exit_reports.of_error(self._process, error)
            if before := sorted(self._left.keys() - {self._process}):
                which = f"process {before[0]} {self._left[before[0]].words}"
                ending = ending._replace(words=f"{ending.words} (before, {which})")
            self._tell(ending)
        self._after(_LONG_GRACE_SECS, self._end_now)

    def _tell(self, ending: exit_reports.ExitReport) -> None:
        """Tells all others and the launcher, unless another end was told before."""
        with self._lock:
            if self._end is not None:
                return
            self._end = ending
        self._publish(ending)

    def _publish(self, ending: exit_reports.ExitReport) -> None:
        if self._directory is not None:
            exit_reports.write(self._directory, self._process, ending)
        self._post(f"told/{self._process}", ending)

    def _post(self, key: str, value: Any) -> None:
        with contextlib.suppress(Exception):  # process 0, which holds the board, is gone
            self._store.post(key, value)

    def _at_exit(self) -> None:
        """Called before JAX's own exit, which may wait for the others only if they will come."""
        if os.getpid() != self._pid:
            return
        self._roster.end_guest("has come to its exit")
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and sys.excepthook != self._uncaught:
            self._fail(error)  # another hook is in the place of ours, so no process has heard of it
        self._is_leaving = True
        self._say_left()
        if not (self._end or self._has_lost):
            self._wake.set()
            try:
                with blocking_waits.Wait("come to its exit", self._others_left_behind):
                    self._over.wait(_EXIT_SECS)
            except KeyboardInterrupt as interrupt:
                self._fail(interrupt)
        is_fault = self._end is not None or self._has_lost
        if is_fault and self._process == 0:
            self._let_others_end()
        self._closed.set()
        self._wake.set()
        self._thread.join(_LAST_SECS)
        if is_fault:
            self._after(_LONG_GRACE_SECS, self._end_now)
            is_other_code = self._has_lost and self._end is not None and self._end.code != 1
            if is_other_code or self._thread.is_alive():
                self._end_now()
            self._roster.leave_at_exit()

    def _say_left(self) -> None:
        left = self._reason or exit_reports.ExitReport(self._process, "has come to its exit")
        self._post(f"left/{self._process}", left)

    def _others_left_behind(self) -> set[int]:
        others = set(range(self._num_processes)) - {self._process}
        return self._roster.living(others) - self._left.keys()

    def _let_others_end(self) -> None:
        """Process 0 goes last, because JAX aborts a process when the board is gone."""
        deadline = time.monotonic() + _LAST_SECS
        while self._others_left_behind() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(_EXIT_LOOK_SECS)
        time.sleep(max(0.0, self._last_left + _GONE_SECS - time.monotonic()))

    # What is heard of the others

    def _run(self) -> None:
        period_secs = max(1 / _LOOKS_PER_SEC, self._num_processes / _MOST_LOOKS_PER_SEC)
        while not self._closed.is_set():
            self._wake.wait(_EXIT_LOOK_SECS if self._is_leaving else period_secs)
            self._wake.clear()
            if not self._closed.is_set():
                self._look()

    def _look(self) -> None:
        """Looks once at all that was told."""
        self._notices.asks()
        self._notices.tell(self._heartbeats)
        try:
            told = self._store.read_all()
        except Exception:  # process 0 is gone
            if self._is_leaving:
                self._has_lost = True
                self._over.set()
            return
        self._notices.hears(told)
        left = _endings_of(told, "left/")
        if left.keys() != self._left.keys():
            self._last_left = time.monotonic()
        self._left = left
        for ending in _endings_of(told, "told/").values():
            self._hear(ending)
        self._look_for_one_that_left()
        if self._is_leaving and not self._others_left_behind():
            self._over.set()

    def _look_for_one_that_left(self) -> None:
        """Looks whether this process waits for one that will not come any more."""
        wait, others = blocking_waits.longest(), self._left.keys() - {self._process}
        if self._is_leaving or self._end or not (wait and wait.is_vain and others):
            self._suspected = None
            return
        now = time.monotonic()
        if self._suspected is None or self._suspected[0] is not wait:
            self._suspected = (wait, now)
        elif now - self._suspected[1] >= _LAST_MESSAGE_SECS:
            left = self._left[min(others)]
            words = f"{left.words}, and process {self._process} waits for it to {wait.what}"
            ending = left._replace(words=words, time=now)
            self._publish(ending)
            self._hear(ending)

    def _hear(self, ending: exit_reports.ExitReport) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = ending
        who = "this process" if ending.process == self._process else f"process {ending.process}"
        logger.error(
            f"{who} {ending.words}; so process {self._process} of {self._num_processes} ends, too"
        )
        if ending.trace and self._process == 0 and self._directory is None:
            logger.error(f"the traceback of process {ending.process}:\n{ending.trace.rstrip()}")
        blocking_waits.end_all(f"process {ending.process} {ending.words}")
        self._over.set()
        self._after(_GRACE_SECS, self._end_if_stuck)

    def _end_of_others(self) -> exit_reports.ExitReport | None:
        """How another process ended; waits a moment for it to tell."""
        deadline = time.monotonic() + _LAST_MESSAGE_SECS
        while self._end is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(_EXIT_LOOK_SECS)
        return self._end

    def _end_if_stuck(self) -> None:
        """Ends a process stuck in a collective or the like; others have longer to end alone."""
        busy = self._heartbeats.busy()
        is_at_work = busy is not None and busy.phase in heartbeats_lib.OWN_WORK
        if not (self._is_unwinding or self._is_leaving or is_at_work):
            self._end_now()
        self._after(_LONG_GRACE_SECS, self._end_now)

    def _end_now(self) -> None:
        """Ends this process, whatever it still does: the others have ended."""
        self._say_left()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1 if self._end is None else self._end.code)

    def _after(self, secs: float, action: Callable[[], None]) -> None:
        self._later.call_soon_threadsafe(self._later.call_later, secs, action)


def _endings_of(told: Mapping[str, Any], kind: str) -> dict[int, exit_reports.ExitReport]:
    """The endings of one kind, by the process that told them."""
    return {
        int(key.removeprefix(kind)): exit_reports.ExitReport(*value)
        for key, value in told.items()
        if key.startswith(kind)
    }


def is_loss(error: BaseException | None) -> bool:
    """Whether the loss of another process led to an error."""
    if error is None or exit_reports.is_loss_of_others(error):
        return error is not None
    return is_loss(error.__cause__ or error.__context__)
