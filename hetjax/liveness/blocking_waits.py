"""What do the threads of this process wait for, and can it still come?

A wait for other processes is a context. `watch` reads them all. It says every ten seconds who is
waited for, and ends waits that would last for ever.
"""

import threading
import time
from collections.abc import Callable, Collection

_waits: dict[int, "Wait"] = {}  # by thread
_lost: list[str] = []  # why no thread needs to wait any more


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
        self._outer, _waits[thread] = _waits.get(thread), self
        return self

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if self._outer is None:
            del _waits[thread]
        else:
            _waits[thread] = self._outer

    def check(self) -> None:
        """Call it about once a second, where the wait allows it.

        Raises:
            LostProcessError: a process has ended, so the wait would have no end.
        """
        if _lost:
            raise LostProcessError(_lost[0])


def longest() -> Wait | None:
    """The wait of this process that has lasted longest."""
    return min(list(_waits.values()), key=lambda wait: wait.since, default=None)


def end_all(reason: str) -> None:
    """Has every wait of this process raise a LostProcessError at its next `check`."""
    _lost.append(reason)
