"""Whom does this process wait for, and what do they do meanwhile? Said every ten seconds.

Each process tells on the board what lasts long in it; who waits reads that.
"""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from hetjax.processes import beacons as beacons_lib
from hetjax.processes import board as board_lib
from hetjax.processes import waits

PERIOD_SECS = 10.0

_LONG_SECS = 3.0  # others are told of what lasts so long
_DOING = {
    "starting": "is starting (it reads data, or compiles)",
    "loading": "waits for its data",
    "computing": "computes",
    "evaluating": "evaluates",
    "reporting": "is in a callback",
    "checkpointing": "saves",
}


class Notices:
    """Of one process.

    Args:
        process: its number.
        board: that all processes have.
    """

    def __init__(self, process: int, board: board_lib.Board) -> None:
        self._process, self._board = process, board
        self._said: tuple[waits.Wait | None, int] = (None, 0)  # of a wait: how often
        self._told: beacons_lib.Entry | None = None

    def tell_what_lasts(self, beacons: beacons_lib.Beacons, more: str = "") -> None:
        """Others may wait for this process: what takes it so long?

        Args:
            beacons: of this process.
            more: is added to it.
        """
        busy = beacons.busy()
        is_long = busy is not None and time.monotonic() - busy.since >= _LONG_SECS
        told = busy if is_long else None
        if told == self._told:
            return
        key = f"doing/{self._process}"
        with contextlib.suppress(Exception):  # process 0, which has the board, is gone
            if told is None:
                self._board.remove(key)
            else:
                self._board.post(key, _DOING.get(told.phase, told.phase) + more)
        self._told = told

    def say_waiting(self, told: Mapping[str, Any]) -> None:
        """Says whom this process waits for, where it is time to.

        Args:
            told: all that is on the board.
        """
        wait = waits.longest()
        if wait is None:
            return
        secs = time.monotonic() - wait.since
        times = self._said[1] if self._said[0] is wait else 0
        if secs < PERIOD_SECS * (times + 1):
            return
        self._said = (wait, int(secs / PERIOD_SECS))
        doing = {
            int(key.removeprefix("doing/")): str(value)
            for key, value in told.items()
            if key.startswith("doing/")
        }
        missing = None if wait.processes is None else set(wait.processes())
        say(
            f"process {self._process} has waited {secs:.0f} s for "
            f"{waited_for(missing, doing, self._process)} to {wait.what}"
        )


def waited_for(missing: set[int] | None, doing: Mapping[int, str], own: int) -> str:
    """Who is waited for, and what they do, as far as it is known.

    Example:
        >>> waited_for({0}, {0: "evaluates"}, 1)
        'process 0 (process 0 evaluates)'
        >>> waited_for({0, 2, 3}, {}, 1)
        'processes 0, 2, 3'
        >>> waited_for(None, {1: "computes", 2: "saves"}, 1)
        'the other processes (process 2 saves)'
    """
    if missing is None:
        who = "the other processes"
    else:
        who = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
    known = sorted(doing.keys() - {own} if missing is None else doing.keys() & missing)
    what = "; ".join(f"process {process} {doing[process]}" for process in known)
    return f"{who} ({what})" if what else who


def say(text: str) -> None:
    """A line of its own, also beside a progress bar."""
    line = f"hetjax: {text}"
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is None:
        print(line, file=sys.stderr, flush=True)
    else:
        bar.write(line, file=sys.stderr)
        sys.stderr.flush()
