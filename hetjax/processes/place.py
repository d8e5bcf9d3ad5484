"""The place of a process in a run apart: its seat, the members that live, and their rounds.

The processes of such a run have no runtime in common. The launcher gives each start of a process a
number, and writes in `roll`, a file that all have mapped, which starts are over. A `Decision` says
of a round which members are in its sum and in the next round. It is a key that is set once
(`files`): a process that comes second adopts what stands. So all have the same decisions, whichever
process dies.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import pathlib
import select
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from hetjax.processes import beacons, files

logger = logging.getLogger(__name__)

LEFT_OUT, REMOVED = 75, 76  # exit codes: to be started anew; its seat is empty now
OWN_WORK = ("starting", "evaluating", "reporting", "checkpointing")
LATE_SECS, BUSY_SECS = 10.0, 600.0  # unless `HETJAX_LATE_SECS`, `HETJAX_BUSY_SECS` say otherwise
SHARED = "HETJAX_SHARED_DIRECTORY"  # of the run, where not in /dev/shm
LOOK_SECS = 0.02  # a wake may be lost
FIRST = -1  # the decision that names the members that begin
RUNS, OVER, ASKED_TO_LEAVE, KILLED = 1, 2, 3, 4  # in `roll`, of a start; 0: there is none
_KEPT = 8  # decisions

_own: "Place | None" = None


class Member(NamedTuple):
    """A start of a process, in its seat; the worker of that number."""

    seat: int
    start: int


class Decision(NamedTuple):
    """What was decided of a round, before any member added."""

    number: int
    sum: tuple[Member, ...]  # whose contributions are in it, by seat
    members: tuple[Member, ...]  # of the next round; the one that came first is first
    donor: int  # the start that hands the state to new members
    since: int = 0  # the last round whose sum lacks a member of the sum before
    changes: tuple[tuple[int, str], ...] = ()  # (seat, what) that came or went

    @property
    def joining(self) -> list[Member]:
        """The new members; the first decision has none."""
        return [m for m in self.members if m not in self.sum and self.number != FIRST]


class Place:
    """Of this process; what `board.runtime` says of it too, in the words of JAX.

    Args:
        directory: of the attempt, that all its processes have.
        seat: of this process.
        start: its number.
        seats: of the run, taken or not.
        founders: the seats that begin it.
        beacons: where processes say what they do.
        late_secs: the least time until a member that is not ready, or says nothing new, is late.
        busy_secs: how long one may do work of its own.
    """

    coordinator_address = service = None

    def __init__(
        self,
        directory: pathlib.Path,
        seat: int,
        start: int,
        *,
        seats: int,
        founders: int,
        beacons: pathlib.Path,
        late_secs: float = LATE_SECS,
        busy_secs: float = BUSY_SECS,
    ) -> None:
        self.directory, self.start, self._beacons = directory, start, beacons
        self.process_id, self.num_processes, self.founders = seat, seats, founders
        self.late_secs, self._busy_secs = late_secs, busy_secs
        self.client = files.Files(directory / "board")
        self.last: Decision | None = None  # that this process has adopted
        self._is_taken = False
        with open(directory / "roll", "rb") as file:
            self._roll = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._address(start))
        self._woken = select.poll()
        self._woken.register(self._socket, select.POLLIN)
        self.is_newcomer = not self.founds(self.own) or self.newest() is not None

    @property
    def own(self) -> Member:
        return Member(self.process_id, self.start)

    @property
    def is_guest(self) -> bool:
        """Whether it has come to a run that goes on, and is no member yet."""
        return self.is_newcomer and self.last is None

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports: the first member that lives."""
        if self.last is None:
            return self.process_id == 0 and not self.is_newcomer
        return next((m for m in self.last.members if self.lives(m)), None) == self.own

    @property
    def adopted(self) -> Decision:
        """The decision that this process has adopted last, of which there is one."""
        assert self.last is not None
        return self.last

    def taken(self) -> "Place":
        """For the run of this process.

        Raises:
            ValueError: it has had one.
        """
        if self._is_taken:
            raise ValueError(
                "a process of a run apart trains once: put a second fit into a script of its own"
            )
        self._is_taken = True
        return self

    def founds(self, member: Member) -> bool:
        """Whether a start may begin the run. One that begins in the place of one that died joins
        later, but in seat 0, from which the others hear where the run begins."""
        return member.start < self.founders or member.seat == 0

    def lives(self, member: Member) -> bool:
        """As far as the launcher has seen."""
        return self._roll[member.start] not in (OVER, KILLED)

    def is_asked_to_leave(self, member: Member) -> bool:
        return self._roll[member.start] == ASKED_TO_LEAVE

    def how_gone(self, member: Member) -> str:
        """What is told of a member that is none any more."""
        known = {ASKED_TO_LEAVE: "left", KILLED: "was killed", OVER: "ended"}
        return known.get(self._roll[member.start], "was late")

    def others(self) -> set[int]:
        """The seats of other members that live; before anything is decided, of all founders."""
        if self.last is None:
            return set(range(self.founders)) - {self.process_id}
        return {m.seat for m in self.last.members if m != self.own and self.lives(m)}

    def is_busy(self, member: Member, now: float) -> bool:
        """Whether it says that it does work of its own, for not too long yet. A process that
        sleeps says nothing new."""
        said = beacons.read(self._beacons, member.seat)
        if said is None or now - said.alive > self.late_secs:
            return False
        return any(e.phase in OWN_WORK and now - e.since < self._busy_secs for e in said.entries)

    # --- What is decided ---

    def decided(self, number: int) -> Decision | None:
        """What stands of a round."""
        with contextlib.suppress(KeyError):
            return decision_of(json.loads(self.client.key_value_try_get(f"decision/{number}")))
        return None

    def newest(self) -> Decision | None:
        """The last that was decided; older ones than a few are gone."""
        return newest_on(self.client)

    def decide(self, decision: Decision) -> Decision:
        """Sets the decision of a round, unless another stands; returns what stands."""
        number = decision.number
        try:
            self.client.key_value_set(f"decision/{number}", json.dumps(decision))
        except FileExistsError:
            if (stands := self.decided(number)) is not None:
                return stands
        newest = self.newest()
        assert newest is not None
        if newest.number > number:  # what stood is gone: this process slept
            self.leave(number)
        self.client.key_value_delete(f"decision/{number - _KEPT}")
        return decision

    def asking(self) -> list[Member]:
        """Those that ask to become a member, and live; by seat."""
        asked = [json.loads(text) for _, text in self.client.key_value_dir_get("ask/")]
        return [m for m in sorted(Member(*each) for each in asked) if self.lives(m)]

    def ask(self) -> None:
        """Asks to become a member."""
        self.client.key_value_set(f"ask/{self.start}", json.dumps(self.own), allow_overwrite=True)

    def forget(self, members: Iterable[Member]) -> None:
        """Takes away the requests of those that have become members."""
        for member in members:
            self.client.key_value_delete(f"ask/{member.start}")

    def is_over(self) -> bool:
        """Whether the run has come to its end, and all of it is written."""
        return bool(self.client.key_value_dir_get("over"))

    def say_over(self) -> None:
        self.client.key_value_set("over", "", allow_overwrite=True)
        if self.last is not None:
            self.wake(self.last.members)

    def leave(self, number: int) -> NoReturn:
        """Ends this process, which others have left out of a round: to begin anew, or as asked."""
        if self.is_asked_to_leave(self.own):
            self.end(REMOVED, "leaves, as it was asked to")
        self.end(LEFT_OUT, f"was late in round {number} and is left out; it begins anew")

    def end(self, code: int, words: str) -> NoReturn:
        """Ends this process at once; the others go on."""
        logger.warning(f"worker {self.process_id} {words}")
        sys.stdout.flush()
        os._exit(code)

    # --- Waiting ---

    def wake(self, members: Iterable[Member]) -> None:
        """Lets others look at what has changed, but those that are gone or were told enough."""
        for member in members:
            if member != self.own:
                with contextlib.suppress(OSError):
                    self._socket.sendto(b".", self._address(member.start))

    def wait(self, secs: float) -> None:
        """Until another process wakes this one, or so long."""
        if self._woken.poll(1000 * secs):
            with contextlib.suppress(BlockingIOError):
                while self._socket.recv(1):
                    pass

    def _address(self, start: int) -> bytes:
        """Of a socket that is in no directory."""
        run = hashlib.blake2b(str(self.directory).encode(), digest_size=12).hexdigest()
        return f"\0hetjax-{run}-{start}".encode()


def decision_of(plain: Sequence[Any]) -> Decision:
    """From what JSON makes of it."""
    number, added, members, donor, since, changes = plain
    in_sum, members = (tuple(Member(*each) for each in some) for some in (added, members))
    return Decision(number, in_sum, members, donor, since, tuple(map(tuple, changes)))


def newest_on(board: files.Files) -> Decision | None:
    """The last decision on a board."""
    texts = [text for _, text in board.key_value_dir_get("decision/")]
    found = map(decision_of, map(json.loads, texts))
    return max(found, key=lambda decision: decision.number, default=None)


def of_environment() -> Place | None:
    """The place that the launcher gave this process; None where the run is not apart.

    Raises:
        ValueError: another than the launcher says that it is.
    """
    global _own
    runtime = os.environ.get("HETJAX_RUNTIME", "joined")
    if runtime not in ("joined", "apart"):
        raise ValueError(f"HETJAX_RUNTIME={runtime}: must be joined or apart")
    if _own is None and runtime == "apart":
        if "HETJAX_RUN" not in os.environ:
            raise ValueError(
                "HETJAX_RUNTIME=apart: only the launcher starts such runs: python -m hetjax.launch "
                "--runtime=apart"
            )
        names = ("PROCESS_ID", "START", "NUM_PROCESSES", "FOUNDERS")
        seat, start, seats, founders = (int(os.environ[f"HETJAX_{name}"]) for name in names)
        _own = Place(
            pathlib.Path(os.environ["HETJAX_RUN"]),
            seat,
            start,
            seats=seats,
            founders=founders,
            beacons=pathlib.Path(os.environ["HETJAX_BEACONS"]),
            late_secs=float(os.environ.get("HETJAX_LATE_SECS", LATE_SECS)),
            busy_secs=float(os.environ.get("HETJAX_BUSY_SECS", BUSY_SECS)),
        )
    return _own


def own() -> Place | None:
    """Of this process, once it has joined a run apart."""
    return _own


def living(others: set[int]) -> set[int]:
    """Those of the other processes that are members, where they come and go."""
    return others if _own is None else others & _own.others()
