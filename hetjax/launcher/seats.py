"""The seats of a run apart: their starts, which are over, and what users ask for while it runs.

The workers read `roll`, a byte for each start of a process. Users ask by files in the directory of
the run: `--add`, `--remove` of `hetjax.launch`.
"""

import json
import mmap
import os
import pathlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

from hetjax.comm import file_store, membership

_MOST_STARTS = 1 << 16
_PATIENCE_MILLISECS = 10_000
ASKS = "asks"  # the directory in that of the run in which users ask


def directory_of_runs() -> str | None:
    """Where memory is shared; None: where other temporary files are."""
    is_usual = os.access("/dev/shm", os.W_OK | os.X_OK)
    return os.environ.get(membership.SHARED, "/dev/shm" if is_usual else None)


class Seats:
    """The seats of one attempt.

    Args:
        directory: of the attempt; it is made.
        founders: seats that begin the run.
        seats: of the run, taken or not.
    """

    def __init__(self, directory: pathlib.Path, founders: int, seats: int) -> None:
        self._directory, self._founders = directory, founders
        self.start_of: dict[int, int] = {}
        """The newest start in each seat that is taken."""
        self.began: dict[int, float] = {}
        """When that was started, monotonic seconds."""
        self._seats, self._starts = seats, 0
        for each in (directory, directory / "board"):
            each.mkdir(mode=0o700)
        self._board = file_store.FileStore(directory / "board")
        (directory / "roll").write_bytes(bytes(_MOST_STARTS))
        with open(directory / "roll", "r+b") as file:
            self._roll = mmap.mmap(file.fileno(), 0)

    def take(self, seat: int) -> dict[str, str]:
        """The variables of the process that is to be started in a seat."""
        start, self._starts = self._starts, self._starts + 1
        self._roll[start] = membership.RUNS
        self.start_of[seat], self.began[seat] = start, time.monotonic()
        return {
            "HETJAX_RUNTIME": "apart",
            "HETJAX_RUN": str(self._directory),
            "HETJAX_START": str(start),
            "HETJAX_PROCESS_ID": str(seat),
            "HETJAX_NUM_PROCESSES": str(self._seats),
            "HETJAX_FOUNDERS": str(self._founders),
        }

    def over(self, seat: int, *, killed: bool) -> None:
        """Writes where all look that the start in it is over; the seat is free."""
        self._roll[self.start_of.pop(seat)] = membership.KILLED if killed else membership.OVER

    def has_begun(self) -> bool:
        """Whether the workers have decided which of them begin the run."""
        return bool(self._board.key_value_dir_get("decision/"))

    def has_ended(self) -> bool:
        """Whether the workers have said that all is written."""
        return bool(self._board.key_value_dir_get("over"))

    def hold_state(self) -> bool:
        """Whether a member of the last decision runs."""
        newest, starts = membership.newest_on(self._board), self.start_of.values()
        return newest is not None and any(member.incarnation in starts for member in newest.members)

    def free(self) -> int | None:
        """The first free seat."""
        return next((seat for seat in range(self._seats) if seat not in self.start_of), None)

    def staying(self) -> set[int]:
        """The seats of those that are not asked to leave."""
        return {k for k, start in self.start_of.items() if self._roll[start] == membership.RUNS}

    def ask_to_leave(self, seat: int) -> None:
        self._roll[self.start_of[seat]] = membership.ASKED_TO_LEAVE


# --- What users ask ---


def ask(directory: str, request: Mapping[str, Any]) -> str:
    """Asks the launcher of a run; what it says.

    Raises:
        ValueError: there is no such run, or it refuses.
    """
    name, asks = secrets.token_hex(8), file_store.FileStore(pathlib.Path(directory, ASKS))
    try:
        asks.key_value_set(f"ask/{name}", json.dumps(request))
        answer = asks.blocking_key_value_get(f"answer/{name}", _PATIENCE_MILLISECS)
    except TimeoutError:
        asks.key_value_delete(f"ask/{name}")  # or it would be done when it is not expected
        raise ValueError(f"{directory}: the launcher does not answer, or has ended") from None
    except OSError:
        raise ValueError(f"{directory}: there is no such run, or it has ended") from None
    is_done, text = json.loads(answer)
    if not is_done:
        raise ValueError(text)
    return text
