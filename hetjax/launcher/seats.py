"""The seats of a run apart: their starts, which are over, and what users ask for while it runs.

The launcher has the referee of the run in a thread (`comm/local_carrier.py`), and tells it who has
ended. Users ask by a socket in the directory of the run: `--add`, `--remove` of `hetjax.launch`.
"""

import asyncio
import os
import pathlib
import queue
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from hetjax.comm import carrier, local_carrier, membership, referee_host
from hetjax.comm.referee import Member

_PATIENCE_SECS = 10.0
_MOST_OF_NAME = 70  # bytes of a directory: the system takes 103 of a socket's


def directory_of_runs() -> str:
    """Where memory is shared.

    Raises:
        ValueError: a socket of a run there would have too long a name, or cannot be made.
    """
    usual = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    where = os.environ.get(local_carrier.SHARED, usual)
    if len(os.fsencode(where)) > _MOST_OF_NAME:
        raise ValueError(
            f"{local_carrier.SHARED}={where}: {_MOST_OF_NAME} bytes at most; sockets lie there"
        )
    if not os.access(where, os.W_OK | os.X_OK):
        raise ValueError(
            f"{local_carrier.SHARED}={where}: no directory in which this user can write"
        )
    return where


class Seats:
    """The seats of one attempt.

    Args:
        directory: of the attempt; it is made.
        founders: seats that begin the run.
        seats: of the run, taken or not.
        late_secs: how long, at least, a worker without progress is waited for; 0: not said.
    """

    def __init__(
        self, directory: pathlib.Path, founders: int, seats: int, late_secs: float
    ) -> None:
        self._directory, self._seats, self._starts = directory, seats, 0
        self.start_of: dict[int, int] = {}
        """The newest start in each seat that is taken."""
        self._leaving: set[int] = set()
        directory.mkdir(mode=0o700)
        self.host = referee_host.RefereeHost(
            *membership.patience(late_secs or None), outlives=local_carrier.LocalCarrier.outlives
        )
        self.server = local_carrier.Server(directory, self.host)
        self.server.call("found", [Member(seat, seat) for seat in range(founders)])

    def take(self, seat: int) -> dict[str, str]:
        """The variables of the process that is to be started in a seat."""
        start, self._starts = self._starts, self._starts + 1
        self.start_of[seat] = start
        return {
            "HETJAX_RUNTIME": "apart",
            "HETJAX_RUN": str(self._directory),
            "HETJAX_START": str(start),
            "HETJAX_PROCESS_ID": str(seat),
            "HETJAX_NUM_PROCESSES": str(self._seats),
        }

    def over(self, seat: int, *, killed: bool) -> None:
        """Tells the referee that the start in it is over; the seat is free."""
        start = self.start_of.pop(seat)
        self._leaving.discard(seat)
        self.server.call("gone", Member(seat, start), "was killed" if killed else "ended")
        pieces = list(self._directory.glob(f"{local_carrier.PIECE}.{start}.*"))
        self.server.begin(self._remove(pieces))

    async def _remove(self, pieces: list[pathlib.Path]) -> None:
        """Removes what a worker has put up, when no other is about to read it."""
        await self.host.decides(rounds=2)
        for path in pieces:
            path.unlink(missing_ok=True)

    def staying(self) -> set[int]:
        """The seats of those that are not asked to leave."""
        return self.start_of.keys() - self._leaving

    def ask_to_leave(self, seat: int) -> None:
        self._leaving.add(seat)
        self.server.call("ask_to_leave", Member(seat, self.start_of[seat]))

    def free(self) -> int | None:
        """The first free seat."""
        return next((seat for seat in range(self._seats) if seat not in self.start_of), None)


# --- What users ask ---


class Asks:
    """Requests of users, until the launcher answers them.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._asked: queue.SimpleQueue[tuple[Any, asyncio.Future, Any]] = queue.SimpleQueue()
        local_carrier.Server(directory, self)

    async def ask(self, request: Mapping[str, Any]) -> tuple[bool, str]:
        answer, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()
        self._asked.put((request, answer, loop))
        return await answer

    def answer(self, do: Callable[[Mapping[str, Any]], str]) -> None:
        """Answers all that were asked by what a function returns, or refuses in a ValueError."""
        while not self._asked.empty():
            request, answer, loop = self._asked.get()
            try:
                done = True, do(request)
            except ValueError as error:
                done = False, str(error)
            loop.call_soon_threadsafe(answer.set_result, done)


def ask(directory: str, request: Mapping[str, Any]) -> str:
    """Asks the launcher of a run; what it says.

    Raises:
        ValueError: there is no such run, or it refuses.
    """
    to_launcher = local_carrier.LocalCarrier(pathlib.Path(directory), answer_secs=_PATIENCE_SECS)
    try:
        is_done, text = to_launcher.call("ask", request)
    except carrier.LostRefereeError as error:
        text = "there is no such run" if error.is_final else "the launcher does not answer"
        raise ValueError(f"{directory}: {text}, or it has ended") from None
    to_launcher.close()
    if not is_done:
        raise ValueError(text)
    return text
