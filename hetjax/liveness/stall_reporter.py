"""Which processes does this one wait for, and what do they do meanwhile? Said every ten seconds.

Every other second each process tells on the board what it does or waits for: its position. So a
process that waits can say who has not come, even where it waits in a collective, which cannot be
asked. Whether it waits or not, it also says which processes are silent. Process 0 holds the board:
where the board does not answer, it is process 0 that is silent.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Set
from typing import Any, NamedTuple, Protocol

from hetjax.liveness import blocking_waits
from hetjax.liveness import heartbeats as heartbeats_lib

logger = logging.getLogger(__name__)

PERIOD_SECS = 10.0

_TELL_SECS = 2.0
_MOST_TOLD_PER_SEC = 64.0  # by all processes together
_SILENT_SECS = 8.0  # a process that tells nothing new for so long is silent
_SPEAK_SECS = 1.0
_MOST_NAMED = 8  # in one line


class Store(Protocol):
    """Values that all processes see: `comm.key_value_store.KeyValueStore`."""

    def post(self, key: str, value: Any) -> None: ...

    def read_all(self) -> dict[str, Any]: ...

    def remove(self, key: str) -> None: ...


class Roster:
    """Who takes part in a run: all that began it. Where processes come and go, a subclass knows."""

    is_guest = False
    """Whether this process wants to join a run that goes on, and is no member yet."""

    def living(self, others: set[int]) -> set[int]:
        """Those of the other processes that take part."""
        return others

    def follow(self, heartbeats: heartbeats_lib.Heartbeats) -> None:
        """A run begins in this process; these say what it does."""

    def end_guest(self, words: str) -> None:
        """Ends this process at once if it is a guest, which nobody waits for."""

    def leave_at_exit(self) -> None:
        """Has this process exit without waiting for the others."""


class Activity(NamedTuple):
    """What a process last told of itself."""

    where: str  # "pid 4711 on node3"
    beat: int  # a new number each time
    phase: str = ""  # "": it is in no round
    round: int | None = None
    secs: float = 0.0  # how long it has been in this phase
    waits: str = ""  # for whom it waits, and for what

    def told(self, secs: float, *, is_silent: bool) -> str:
        """The position in words.

        Args:
            secs: since it was told.
            is_silent: nothing has been heard since, although something should have been.

        Example:
            >>> Activity("pid 7 on a", 3, "reporting", 6, 12.0).told(2.0, is_silent=False)
            'pid 7 on a: in a callback in round 6 for 14 s'
        """
        said = {
            "starting": "starting (reading data, or compiling)",
            "waiting": "at its own work",  # if it waited for others, it would say for whom
            "loading": "waiting for its data",
            "reporting": "in a callback",
            "checkpointing": "saving",
        }
        does = said.get(self.phase, self.phase) or "in no round of hetjax"
        does += "" if self.round is None else f" in round {self.round}"
        if self.waits:
            does = f"waiting for {self.waits}"
        if is_silent:
            does = f"no sign of life for {secs:.0f} s, last seen {does}"
        elif self.phase or self.waits:
            does += f" for {self.secs + secs:.0f} s"
        return f"{self.where}: {does}"


class StallReporter:
    """What one process tells of its position, and says of the others'.

    Args:
        process: its number.
        num_processes: of the run.
        store: the one that all processes have.
        roster: of the run.
    """

    def __init__(
        self, process: int, num_processes: int, store: Store, roster: Roster | None = None
    ) -> None:
        self._process, self._store, self._roster = process, store, roster or Roster()
        self._others = set(range(num_processes)) - {process}
        self._tell_secs = max(_TELL_SECS, num_processes / _MOST_TOLD_PER_SEC)
        self._silent_secs = _SILENT_SECS + self._tell_secs - _TELL_SECS
        now = time.monotonic()
        self._own = Activity(f"pid {os.getpid()} on {socket.gethostname()}", 0)
        self._told = -self._tell_secs  # monotonic, when this process told its own position
        self._asked: float | None = None  # monotonic, since when the board has not answered
        self._heard_at = now  # when the board last answered
        nothing: tuple[Activity | None, float] = None, now
        self._heard = dict.fromkeys(self._others, nothing)
        """What was told last, and when that was new."""
        self._said: tuple[object, int] = (None, 0)  # a wait, and how often it was spoken of
        self._spoke_at = now

    def begin(self) -> None:
        """Speaks from now on, in a thread of its own, since the board may not answer."""
        threading.Thread(target=self._speak, name="hetjax-notices", daemon=True).start()

    def tell(self, heartbeats: heartbeats_lib.Heartbeats) -> None:
        """Tells the others what this process does.

        Args:
            heartbeats: of this process.
        """
        now = time.monotonic()
        if now - self._told < self._tell_secs:
            return
        self._told = now
        entry, wait = heartbeats.now(), blocking_waits.longest()
        own = Activity(self._own.where, self._own.beat + 1)
        if entry is not None:
            secs = round(now - entry.since, 1)
            own = own._replace(phase=entry.phase, round=entry.round_index, secs=secs)
        if wait is not None:
            who = named(self._missing(wait))
            own = own._replace(waits=f"{who} to {wait.what}", secs=round(now - wait.since, 1))
        self._own = own
        with contextlib.suppress(Exception):  # process 0, which holds the board, is gone
            self._store.post(f"at/{self._process}", own)

    def asks(self) -> None:
        """Notes that this process asks the board for all that is told."""
        self._asked = self._asked or time.monotonic()

    def hears(self, told: Mapping[str, Any]) -> None:
        """Takes the board's answer."""
        now, asked = time.monotonic(), self._asked
        was_deaf = asked is not None and now - asked > self._tell_secs
        self._asked, self._heard_at = None, now
        for other in self._others:
            value = told.get(f"at/{other}")
            position = None if value is None else Activity(*value)
            before, since = self._heard[other]
            # While the board did not answer, no process could tell anything.
            if was_deaf or position != before:
                since = now
            self._heard[other] = (position, since)

    def speak(self) -> None:
        """Names the processes that this one waits for and the silent ones, when it is time to."""
        now = time.monotonic()
        late, self._spoke_at = now - self._spoke_at > 3 * _SPEAK_SECS, now
        if late:  # this process itself was stopped, or had no processor
            return
        wait = blocking_waits.longest()
        missing = None if wait is None else self._missing(wait)
        silent = {p for p in self._roster.living(self._others) if self._silence(p) >= PERIOD_SECS}
        secs = now - wait.since if wait else max(map(self._silence, silent), default=0.0)
        subject: object = wait or "silent"
        times = self._said[1] if self._said[0] is subject else 0
        if secs < PERIOD_SECS:
            self._said = (subject, 0)
        elif secs >= PERIOD_SECS * (times + 1):
            self._said = (subject, int(secs / PERIOD_SECS))
            this = f"process {self._process}"
            if wait is not None:
                others = self._described(missing)
                logger.warning(f"{this} has waited {secs:.0f} s for {others} to {wait.what}")
            if unnamed := silent - (missing or set()):
                logger.warning(f"{this} hears nothing of {self._described(unnamed)}")

    def _speak(self) -> None:
        while True:
            time.sleep(_SPEAK_SECS)
            with contextlib.suppress(Exception):
                self.speak()

    def _silence(self, other: int) -> float:
        """Seconds in which another process should have told something new and did not."""
        if other == 0 and self._asked is not None:
            return time.monotonic() - self._heard[0][1]
        return self._heard_at - self._heard[other][1]

    def _missing(self, wait: blocking_waits.Wait) -> set[int] | None:
        """The processes that a wait is for; None: nothing is known but that all of them wait."""
        if wait.processes is not None:
            return set(wait.processes())
        now, found = time.monotonic(), set()
        if self._process and now - (self._asked or now) >= self._silent_secs:
            return {0}  # what the others do meanwhile is not known
        for other, (position, _) in self._heard.items():
            if not (position and position.waits) or self._silence(other) >= self._silent_secs:
                found.add(other)
        return found or None

    def _described(self, missing: Set[int] | None) -> str:
        """Who is waited for, and what they do, as far as it is known."""
        now, told = time.monotonic(), []
        for other in sorted(self._others if missing is None else missing)[:_MOST_NAMED]:
            if other not in self._others:
                continue
            position, since = self._heard[other]
            is_silent = self._silence(other) >= self._silent_secs
            does = position and position.told(now - since, is_silent=is_silent)
            does = does or f"no word of it for {now - since:.0f} s"
            is_one = missing is not None and len(missing) == 1
            told.append(does if is_one else f"process {other}, {does}")
        return named(missing) + (f" ({'; '.join(told)})" if told else "")


def named(processes: Set[int] | None) -> str:
    """The words for some of the others; None: for all of them.

    Example:
        >>> named({3, 1})
        'processes 1, 3'
    """
    if processes is None:
        return "the other processes"
    first = sorted(processes)[:_MOST_NAMED]
    more = f" and {len(processes) - len(first)} more" if len(processes) > len(first) else ""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, first))}{more}"
