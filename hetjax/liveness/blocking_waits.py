"""What do the threads of this process wait for, and can it still come?

A wait for other processes is a context. `failure_detector` reads them all. It says every ten
seconds who is waited for, and ends waits that would last for ever.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection


class LostProcessError(RuntimeError):
    """A process of the run has ended."""


class Wait:
    """A wait of this thread for other processes, from `with` to its end.

    Args:
        what: they are to do, to stand behind "to": "send their numbers of round 3".
        processes: gives those that are still missing. None: the wait is in a collective, so only
            what the others tell of themselves says who is missing.
        is_vain: whether the wait has no end once another process has come to its exit.
    """

    def __init__(
        self,
        what: str,
        processes: Callable[[], Collection[int]] | None = None,
        *,
        is_vain: bool = True,
    ) -> None:
        self.what, self.processes, self.is_vain = what, processes, is_vain
        self.since = 0.0
        """When it began, monotonic seconds."""
        self._outer: Wait | None = None

    def __enter__(self) -> "Wait":
        self.since = time.monotonic()
        thread = threading.get_ident()
        waits = self._waits = of_process()
        self._outer, waits.by_thread[thread] = waits.by_thread.get(thread), self
        return self

    def __exit__(self, *error: object) -> None:
        self._waits.by_thread[threading.get_ident()] = self._outer

    def check(self) -> None:
        """Call it about once a second, where the wait allows it.

        Raises:
            LostProcessError: a process has ended, so the wait would have no end.
        """
        if self._waits.lost:
            raise LostProcessError(self._waits.lost[0])


class Waits:
    """Those of a process."""

    def __init__(self) -> None:
        self.by_thread: dict[int, Wait | None] = {}
        self.lost: list[str] = []  # why no thread needs to wait any more


@functools.cache
def of_process() -> Waits:
    """Those of this process."""
    return Waits()


def longest() -> Wait | None:
    """The wait of this process that has lasted longest."""
    waits = [wait for wait in list(of_process().by_thread.values()) if wait is not None]
    return min(waits, key=lambda wait: wait.since, default=None)


def end_all(reason: str) -> None:
    """Has every wait of this process raise a LostProcessError at its next `check`."""
    of_process().lost.append(reason)
