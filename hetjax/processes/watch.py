"""Is every process still part of the run? Each tells how it ends, and hears it of the others.

JAX has a process wait at its exit until all others have come to theirs. So one that raises would
stay there for minutes while the others wait for it in a round, and nobody would say why. From
`begin` on, which `join` calls:

- An exception that nobody catches is told at once, over the board and to the launcher.
- A process says that it leaves a round by an exception, which somebody may still catch, and that it
  has come to its exit, where it waits for the others.
- Each process looks several times a second at what was told. When one has raised, or when this one
  waits for one that has left, it says so and ends, too: by itself, by the `LostProcessError` of its
  wait, or else after a moment. Its exit waits for nobody then.
- Each tells what it does, and says every ten seconds whom it waits for, and who is silent
  (`notices`).
"""

import atexit
import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from hetjax.processes import beacons as beacons_lib
from hetjax.processes import board as board_lib
from hetjax.processes import endings, notices, waits

_LOOKS_PER_SEC = 4.0  # of a process
_MOST_LOOKS_PER_SEC = 128.0  # of all of them: process 0 answers each, in 0.1 ms
_EXIT_LOOK_SECS = 0.05
_LAST_MESSAGE_SECS = 0.75  # that what a process has sent before its exit may be on its way
_GRACE_SECS = 1.5  # for a process that has heard of an end to end by itself
_LONG_GRACE_SECS = 10.0  # where it is at it: process 0 writes the files of the run, too
_OWN_WORK = ("evaluating", "reporting", "checkpointing")
_EXIT_SECS = 300.0  # that a process waits at its exit for the others, as JAX does
_LAST_SECS = 2.0  # that process 0, which has the board, waits for those that end after a fault
_GONE_SECS = 0.5  # between a process's last word and its end
_MOST_BYTES = 3500  # of an ending on the board

_this: "Watch | None" = None


def begin() -> None:
    """Begins to watch, once, in a process that has joined its run."""
    global _this
    if _this is None:
        own, directory = board_lib.runtime(), os.environ.get("HETJAX_BEACONS")
        _this = Watch(
            own.process_id,
            own.num_processes,
            board_lib.Board("endings"),
            pathlib.Path(directory) if directory else None,
        )
        _this.begin()


def follow(beacons: beacons_lib.Beacons) -> None:
    """From now on the others may read what these beacons say."""
    if _this is not None:
        _this.follow(beacons)


def left(error: BaseException) -> None:
    """A run was left by this exception, which somebody may still catch."""
    if _this is not None:
        _this.left(error)


@contextlib.contextmanager
def taking_part() -> Iterator[None]:
    """Around what all processes do together: the others hear of who leaves it by an exception.

    Somebody may still catch that, in all processes alike, and go on with another call.
    """
    if _this is not None:
        _this.goes_on()
    try:
        yield
    except BaseException as error:
        left(error)
        raise


def tell(words: str, *, code: int) -> None:
    """This process is about to end, and the others cannot go on without it.

    Args:
        words: what it did, behind its name.
        code: the exit code of the others.
    """
    if _this is not None:
        _this.tell(words, code)


class Watch:
    """What one process tells and hears.

    Args:
        process: its number.
        num_processes: of the run.
        board: that all processes have, for endings alone.
        directory: where the launcher looks, if there is one.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        board: board_lib.Board,
        directory: pathlib.Path | None = None,
    ) -> None:
        self._process, self._num_processes = process, num_processes
        self._board, self._directory = board, directory
        self._pid = os.getpid()
        self._beacons = beacons_lib.Beacons()
        self._lock = threading.Lock()
        self._end: endings.Ending | None = None  # of the run: the first that was told or heard
        self._has_lost = False  # another process is gone, and nobody said why
        self._left_by: BaseException | None = None  # of the round that it has left
        self._reason: endings.Ending | None = None  # the same in words
        self._thread_error = ""
        self._left: dict[int, endings.Ending] = {}  # who has left a round, or come to its exit
        self._last_left = 0.0  # monotonic, when the last of them was seen
        self._is_unwinding = False  # by an exception
        self._is_leaving = False
        self._suspected: tuple[waits.Wait, float] | None = None  # since when, monotonic
        self._notices = notices.Notices(process, num_processes, board)
        self._wake, self._over, self._closed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="hetjax-watch", daemon=True)

    def begin(self) -> None:
        """Hooks itself into this process."""
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._thread_hook, threading.excepthook = threading.excepthook, self._thread_ended
        atexit.register(self._at_exit)  # after JAX's own, and so before it
        self._thread.start()
        self._notices.begin()

    def follow(self, beacons: beacons_lib.Beacons) -> None:
        self._beacons = beacons
        self.goes_on()

    def left(self, error: BaseException) -> None:
        """This process has left a round, and the others may wait for it there."""
        self._is_unwinding = True
        if self._end is None and self._left_by is not error and not _is_loss(error):
            self._left_by, self._reason = error, endings.of_error(self._process, error)
            self._say_left()

    def goes_on(self) -> None:
        """After all it takes part in rounds again; does nothing where it has left none."""
        self._is_unwinding = False
        if self._reason is not None:
            self._left_by = self._reason = None
            with contextlib.suppress(Exception):
                self._board.remove(f"left/{self._process}")

    def tell(self, words: str, code: int) -> None:
        words = " ".join(words.split())[: endings.MOST_CHARACTERS]
        self._tell(endings.Ending(self._process, words, "", code, time.monotonic()))

    # The own end

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """`sys.excepthook`: Python calls it before it waits for threads and at its exit."""
        if os.getpid() != self._pid:  # a fork is no process of the run
            self._hook(kind, error, trace)
            return
        if not _is_loss(error):
            self._hook(kind, error, trace)
        elif self._end_of_others() is None:  # else it was said in words who has ended, and how
            first_line = (str(error).splitlines() or [kind.__name__])[0]
            notices.say(f"process {self._process} has lost the others: {first_line}")
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._is_unwinding = True
        if _is_loss(error):
            self._has_lost = True
        else:
            ending = endings.of_error(self._process, error)
            if before := sorted(self._left.keys() - {self._process}):
                which = f"process {before[0]} {self._left[before[0]].words}"
                ending = ending._replace(words=f"{ending.words} (before, {which})")
            self._tell(ending)
        _after(_LONG_GRACE_SECS, self._end_now)

    def _tell(self, ending: endings.Ending) -> None:
        """Tells all others and the launcher, where nobody has told of another end before."""
        with self._lock:
            if self._end is not None:
                return
            self._end = ending
        self._publish(ending)

    def _publish(self, ending: endings.Ending) -> None:
        if self._directory is not None:
            endings.write(self._directory, self._process, ending)
        self._post(f"told/{self._process}", endings.shortened(ending, _MOST_BYTES))

    def _post(self, key: str, value: Any) -> None:
        with contextlib.suppress(Exception):  # process 0, which has the board, is gone
            self._board.post(key, value)

    def _thread_ended(self, args: threading.ExceptHookArgs) -> None:
        """`threading.excepthook`: a process goes on without a thread; what waits for it may not."""
        self._thread_hook(args)
        if args.exc_value is not None and args.exc_type is not SystemExit:
            name = "?" if args.thread is None else args.thread.name
            words = endings.of_error(self._process, args.exc_value).words
            self._thread_error = f", and its thread {name!r} {words}"[:300]

    def _at_exit(self) -> None:
        """Before JAX's own exit, which it lets wait for the others only where they will come."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and sys.excepthook != self._uncaught:
            self._fail(error)  # of the one that somebody has put in its place nobody heard
        self._is_leaving = True
        self._say_left()
        if not (self._end or self._has_lost):
            self._wait_for_others()
        is_fault = self._end is not None or self._has_lost
        if is_fault and self._process == 0:
            self._let_others_end()
        self._closed.set()
        self._wake.set()
        self._thread.join(_LAST_SECS)
        if is_fault:
            _after(_LONG_GRACE_SECS, self._end_now)
            is_other_code = self._has_lost and self._end is not None and self._end.code != 1
            if is_other_code or self._thread.is_alive():
                self._end_now()
            board_lib.leave_at_exit()

    def _wait_for_others(self) -> None:
        self._wake.set()
        try:
            with waits.Wait("come to its exit", self._others_left_behind):
                self._over.wait(_EXIT_SECS)
        except KeyboardInterrupt as error:
            self._fail(error)

    def _say_left(self) -> None:
        left = self._reason or endings.Ending(self._process, "has come to its exit")
        self._post(f"left/{self._process}", endings.shortened(left, _MOST_BYTES))

    def _others_left_behind(self) -> set[int]:
        return set(range(self._num_processes)) - {self._process} - self._left.keys()

    def _let_others_end(self) -> None:
        """Process 0 goes last: where the board is gone, JAX aborts a process."""
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
        """Once at all that was told."""
        self._notices.asks()
        self._notices.tell(self._beacons, self._thread_error)
        try:
            told = self._board.read_all()
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
        """This process may wait for one that will not come any more."""
        wait, others = waits.longest(), self._left.keys() - {self._process}
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

    def _hear(self, ending: endings.Ending) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = ending
        who = "this process" if ending.process == self._process else f"process {ending.process}"
        notices.say(
            f"{who} {ending.words}; so process {self._process} of {self._num_processes} ends, too"
        )
        if ending.trace and self._process == 0 and self._directory is None:
            notices.say(f"the traceback of process {ending.process}:\n{ending.trace.rstrip()}")
        waits.end_all(f"process {ending.process} {ending.words}")
        self._over.set()
        _after(_GRACE_SECS, self._end_if_stuck)

    def _end_of_others(self) -> endings.Ending | None:
        """Why another process is gone; waits a moment for its words."""
        deadline = time.monotonic() + _LAST_MESSAGE_SECS
        while self._end is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(_EXIT_LOOK_SECS)
        return self._end

    def _end_if_stuck(self) -> None:
        """In a collective, or whatever does not hear of it; else it has longer to end by itself."""
        busy = self._beacons.busy()
        is_at_work = busy is not None and busy.phase in _OWN_WORK
        if not (self._is_unwinding or self._is_leaving or is_at_work):
            self._end_now()
        _after(_LONG_GRACE_SECS, self._end_now)

    def _end_now(self) -> None:
        """Whatever this process still does: the others have ended."""
        self._say_left()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1 if self._end is None else self._end.code)


def _after(secs: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(secs, action)
    timer.daemon = True
    timer.start()


def _endings_of(told: Mapping[str, Any], kind: str) -> dict[int, endings.Ending]:
    """Those of one kind, by the process that told them."""
    return {
        int(key.removeprefix(kind)): endings.Ending(*value)
        for key, value in told.items()
        if key.startswith(kind)
    }


def _is_loss(error: BaseException | None) -> bool:
    """Whether the loss of another process led to an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if endings.is_loss_of_others(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
