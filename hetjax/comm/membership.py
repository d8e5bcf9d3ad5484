"""Who takes part in a run apart, as one of its processes sees it: its rank, who lives, the views.

`Membership` is what the rest of hetjax asks; `MembershipClient` is that of one machine.
The processes of such a run have no runtime in common. The launcher gives each start of a process a
number, and writes in `roll`, a file that all have mapped, which starts are over. A `MembershipView`
says of a round which members are in its sum and in the next round. It is a key that is set once
(`file_store`): a process that comes second adopts what stands. So all have the same decisions,
whichever process dies.
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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from hetjax.comm import file_store
from hetjax.liveness import heartbeats, stall_reporter

if TYPE_CHECKING:  # the launcher needs no JAX
    from jax.sharding import Mesh

    from hetjax.comm import communicator as communicator_lib

logger = logging.getLogger(__name__)

LEFT_OUT, REMOVED = 75, 76  # exit codes: to be started anew; its seat is empty now
_OWN_WORK = ("starting", *heartbeats.OWN_WORK)
LATE_SECS, BUSY_SECS = 10.0, 600.0  # unless `HETJAX_LATE_SECS`, `HETJAX_BUSY_SECS` say otherwise
SHARED = "HETJAX_SHARED_DIRECTORY"  # of the run, where not in /dev/shm
LOOK_SECS = 0.02  # a wake may be lost
FIRST = -1  # the decision that names the members that begin
RUNS, OVER, ASKED_TO_LEAVE, KILLED = 1, 2, 3, 4  # in `roll`, of a start; 0: there is none
_KEPT = 8  # decisions


class Member(NamedTuple):
    """A start of a process; the worker of that rank. Each start has a higher incarnation."""

    rank: int
    incarnation: int


class MembershipView(NamedTuple):
    """What was decided of a round, before any member added."""

    number: int
    sum: tuple[Member, ...]  # whose contributions are in it, by rank
    members: tuple[Member, ...]  # of the next round; the one that came first is first
    donor: int  # the incarnation that hands the state to new members
    since: int = 0  # the last round whose sum lacks a member of the sum before
    changes: tuple[tuple[int, str], ...] = ()  # (rank, what) that came or went

    @property
    def joining(self) -> list[Member]:
        """The new members; the first decision has none."""
        return [m for m in self.members if m not in self.sum and self.number != FIRST]


class Membership(stall_reporter.Roster):
    """Who takes part in a run whose processes come and go, as one of them sees it.

    What the rest of hetjax asks of it. `client` is that of JAX's coordination service, or has its
    interface.

    Args:
        rank: of this process, which is its seat.
        incarnation: the number of its start.
        seats: of the run, taken or not.
        founders: the seats that begin it.
    """

    client: Any
    coordinator_address = None
    is_newcomer = False
    """Whether the run goes on without this process, or begins so."""

    def __init__(self, rank: int, incarnation: int, *, seats: int, founders: int) -> None:
        self.process_id, self.num_processes, self.founders = rank, seats, founders
        self.incarnation = incarnation
        self.last: MembershipView | None = None  # that this process has adopted
        self._is_taken = False

    @property
    def own(self) -> Member:
        return Member(self.process_id, self.incarnation)

    @property
    def is_guest(self) -> bool:  # type: ignore[override]
        """Whether it has come to a run that goes on, and is no member yet."""
        return self.is_newcomer and self.last is None

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports: the first member that lives."""
        if self.last is None:
            return self.process_id == 0 and not self.is_newcomer
        return next((m for m in self.last.members if self.lives(m)), None) == self.own

    def lives(self, member: Member) -> bool:
        """As far as is known here."""
        raise NotImplementedError

    def is_asked_to_leave(self, member: Member) -> bool:
        return False

    def others(self) -> set[int]:
        """The ranks of other members that live; before anything is decided, of all founders."""
        if self.last is None:
            return set(range(self.founders)) - {self.process_id}
        return {m.rank for m in self.last.members if m != self.own and self.lives(m)}

    def living(self, others: set[int]) -> set[int]:
        return others & self.others()

    def communicator(self, mesh: "Mesh") -> "communicator_lib.Communicator":
        """Of the one run that this process takes part in.

        Args:
            mesh: of its device.
        """
        raise NotImplementedError

    def taken(self) -> Self:
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

    def end_guest(self, words: str) -> None:
        if self.is_guest:
            self.end(REMOVED, f"{words}, before it had joined; the others go on")

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


class MembershipClient(Membership):
    """Of a process whose run keeps what it decides in files; the launcher says who lives.

    Args:
        directory: of the attempt, that all its processes have.
        rank: of this process, which is its seat.
        incarnation: the number of its start.
        seats: of the run, taken or not.
        founders: the seats that begin it.
        heartbeats: where processes say what they do.
        late_secs: the least time until a member that is not ready, or says nothing new, is late.
        busy_secs: how long one may do work of its own.
        communicator: makes what this process communicates by.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        rank: int,
        incarnation: int,
        *,
        seats: int,
        founders: int,
        heartbeats: pathlib.Path,
        late_secs: float = LATE_SECS,
        busy_secs: float = BUSY_SECS,
        communicator: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(rank, incarnation, seats=seats, founders=founders)
        self.directory, self._heartbeats, self._communicator = directory, heartbeats, communicator
        self.late_secs, self._busy_secs = late_secs, busy_secs
        self.client = file_store.FileStore(directory / "board")
        with open(directory / "roll", "rb") as file:
            self._roll = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._address(incarnation))
        self._woken = select.poll()
        self._woken.register(self._socket, select.POLLIN)
        self.is_newcomer = not self.founds(self.own) or self.newest() is not None

    @property
    def adopted(self) -> MembershipView:
        """The decision that this process has adopted last, of which there is one."""
        assert self.last is not None
        return self.last

    def communicator(self, mesh: "Mesh") -> "communicator_lib.Communicator":
        assert self._communicator is not None
        return self._communicator(self.taken(), mesh)

    def founds(self, member: Member) -> bool:
        """Whether a start may begin the run. One that begins in the place of one that died joins
        later, but in seat 0, from which the others hear where the run begins."""
        return member.incarnation < self.founders or member.rank == 0

    def lives(self, member: Member) -> bool:
        """As far as the launcher has seen."""
        return self._roll[member.incarnation] not in (OVER, KILLED)

    def is_asked_to_leave(self, member: Member) -> bool:
        return self._roll[member.incarnation] == ASKED_TO_LEAVE

    def how_gone(self, member: Member) -> str:
        """What is told of a member that is none any more."""
        known = {ASKED_TO_LEAVE: "left", KILLED: "was killed", OVER: "ended"}
        return known.get(self._roll[member.incarnation], "was late")

    def is_busy(self, member: Member, now: float) -> bool:
        """Whether it says that it does work of its own, for not too long yet. A process that
        sleeps says nothing new."""
        said = heartbeats.read(self._heartbeats, member.rank)
        if said is None or now - said.alive > self.late_secs:
            return False
        return any(e.phase in _OWN_WORK and now - e.since < self._busy_secs for e in said.entries)

    # --- What is decided ---

    def decided(self, number: int) -> MembershipView | None:
        """What stands of a round."""
        with contextlib.suppress(KeyError):
            return view_of(json.loads(self.client.key_value_try_get(f"decision/{number}")))
        return None

    def newest(self) -> MembershipView | None:
        """The last that was decided; older ones than a few are gone."""
        return newest_on(self.client)

    def decide(self, decision: MembershipView) -> MembershipView:
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
        """Those that ask to become a member, and live; by rank."""
        asked = [json.loads(text) for _, text in self.client.key_value_dir_get("ask/")]
        return [m for m in sorted(Member(*each) for each in asked) if self.lives(m)]

    def ask(self) -> None:
        """Asks to become a member."""
        own = json.dumps(self.own)
        self.client.key_value_set(f"ask/{self.incarnation}", own, allow_overwrite=True)

    def forget(self, members: Iterable[Member]) -> None:
        """Takes away the requests of those that have become members."""
        for member in members:
            self.client.key_value_delete(f"ask/{member.incarnation}")

    def is_over(self) -> bool:
        """Whether the run has come to its end, and all of it is written."""
        return bool(self.client.key_value_dir_get("over"))

    def say_over(self) -> None:
        self.client.key_value_set("over", "", allow_overwrite=True)
        if self.last is not None:
            self.wake(self.last.members)

    # --- Waiting ---

    def wake(self, members: Iterable[Member]) -> None:
        """Lets others look at what has changed, but those that are gone or were told enough."""
        for member in members:
            if member != self.own:
                with contextlib.suppress(OSError):
                    self._socket.sendto(b".", self._address(member.incarnation))

    def wait(self, secs: float) -> None:
        """Until another process wakes this one, or so long."""
        if self._woken.poll(1000 * secs):
            with contextlib.suppress(BlockingIOError):
                while self._socket.recv(1):
                    pass

    def _address(self, incarnation: int) -> bytes:
        """Of a socket that is in no directory."""
        run = hashlib.blake2b(str(self.directory).encode(), digest_size=12).hexdigest()
        return f"\0hetjax-{run}-{incarnation}".encode()


def view_of(plain: Sequence[Any]) -> MembershipView:
    """From what JSON makes of it."""
    number, added, members, donor, since, changes = plain
    in_sum, members = (tuple(Member(*each) for each in some) for some in (added, members))
    return MembershipView(number, in_sum, members, donor, since, tuple(map(tuple, changes)))


def newest_on(board: file_store.FileStore) -> MembershipView | None:
    """The last decision on a board."""
    texts = [text for _, text in board.key_value_dir_get("decision/")]
    found = map(view_of, map(json.loads, texts))
    return max(found, key=lambda decision: decision.number, default=None)


def of_environment(communicator: Callable[..., Any]) -> MembershipClient | None:
    """The membership that the launcher gives this process; None where the run is not apart.

    Args:
        communicator: as of `MembershipClient`.

    Raises:
        ValueError: another than the launcher says that it is.
    """
    runtime = os.environ.get("HETJAX_RUNTIME", "joined")
    if runtime not in ("joined", "apart"):
        raise ValueError(f"HETJAX_RUNTIME={runtime}: must be joined or apart")
    if runtime == "joined":
        return None
    if "HETJAX_RUN" not in os.environ:
        raise ValueError(
            "HETJAX_RUNTIME=apart: only the launcher starts such runs: python -m hetjax.launch "
            "--runtime=apart"
        )
    names = ("PROCESS_ID", "START", "NUM_PROCESSES", "FOUNDERS")
    rank, incarnation, seats, founders = (int(os.environ[f"HETJAX_{name}"]) for name in names)
    return MembershipClient(
        pathlib.Path(os.environ["HETJAX_RUN"]),
        rank,
        incarnation,
        seats=seats,
        founders=founders,
        heartbeats=pathlib.Path(os.environ["HETJAX_BEACONS"]),
        late_secs=float(os.environ.get("HETJAX_LATE_SECS", LATE_SECS)),
        busy_secs=float(os.environ.get("HETJAX_BUSY_SECS", BUSY_SECS)),
        communicator=communicator,
    )
