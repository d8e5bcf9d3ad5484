"""Processes of one machine, each with a JAX of its own, that come and go while the run goes on.

A round of theirs, of which `tests/comm/round_model.py` is the model:

1. Each member writes what its worker contributes into one half of a buffer that the others have
   mapped (`post`), and what it did into one half of another (`allgather`): rounds use the halves in
   turn. A half carries its round before and behind what is written. Then it is ready.
2. The first member that is neither dead nor late, when all are ready, dead or late, decides which
   members are in the sum and in the next round. No member applies anything before.
3. One of those in the sum adds all contributions, in the order of the seats; the others read what
   it has added. Where it is dead or late, each adds on its own, to the same bytes (`total`).
4. A member that has added looks at the marks again. It throws away what was overwritten while it
   slept, and begins anew.
5. A digest of the state that it made of the sum is beside what it tells of the next round.

Contributions outlive the process that wrote them. A newcomer gets the state of the round before
from the member that decided.
"""

import contextlib
import logging
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hetjax import types
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import double_buffer, elastic_sums, state_transfer
from hetjax.comm import membership as membership_lib
from hetjax.comm.membership import Member, MembershipView
from hetjax.liveness import blocking_waits

logger = logging.getLogger(__name__)

_LOST_SECS = 1.0  # after which a newcomer that waits looks whether a member is left
_JUDGED = "judged"  # begins the name of the file of each that leads, or has led
_STATE_BYTES = 16  # of the kind of a device, and of a digest
JOINED = "joined"
_ROUNDS = 5  # median rounds in which no member is late


class Elastic(communicator_lib.Communicator):
    """A member of a run apart, which has one worker.

    Args:
        roster: of this process.
        mesh: of its device.
    """

    alone = has_collectives = False
    no_collectives = "the processes of this run are apart (--runtime=apart). "
    carries_more = True

    def __init__(self, roster: membership_lib.MembershipClient, mesh: Mesh) -> None:
        super().__init__(roster.num_processes)
        self.roster, self.mesh = roster, mesh
        self.incarnation, self.run_id = roster.incarnation, str(roster.directory)
        self.process_of = np.arange(roster.num_processes)
        self.turn = double_buffer.Turn()
        self._sums: list[elastic_sums.ElasticSums] = []  # of each kind of rounds
        self._point: types.PyTree = None
        self._told: dict[Member, double_buffer.DoubleBuffer] = {}
        self._num_bytes = 0  # of a message
        self._since = time.monotonic()  # when this process was ready
        self._rounds: list[float] = []  # seconds between the last decisions

    @property
    def present(self) -> np.ndarray:
        last, seats = self.roster.last, range(self.roster.founders)
        return np.isin(self.process_of, [m.rank for m in last.members] if last else seats)

    @property
    def joins(self) -> bool:
        return self.roster.is_guest

    def begins(self, round_index: int | None, point: types.PyTree) -> None:
        self.turn.is_warm_up, self._point = round_index is None, point
        own = -1 - self.roster.incarnation  # each warms up for itself
        self.turn.number = self.round_number = own if round_index is None else round_index

    def start_barrier(self, state: types.PyTree = ()) -> None:
        """Waits until all founders that live are there; they begin the run together.

        Raises:
            ValueError: the run has begun without this process, or lacks memory.
        """
        roster = self.roster
        if roster.last is not None:
            return
        if self.joins:
            raise ValueError("fit: only fit takes newcomers into a run apart; Run has no way to")
        elastic_sums.check_room(roster, self._sums, state)
        roster.ask()
        with blocking_waits.Wait("begin", lambda: self._missing(roster.asking())) as wait:
            while (first := roster.decided(membership_lib.FIRST)) is None:
                wait.check()
                there = [m for m in roster.asking() if roster.founds(m)]
                if not self._missing(there):
                    begin = MembershipView(membership_lib.FIRST, (), tuple(there), -1)
                    first = roster.decide(begin)
                    roster.forget(first.members)
                    break
                roster.wait(membership_lib.LOOK_SECS)
        if roster.own not in first.members:
            roster.leave(0)
        absent = sorted(set(range(roster.founders)) - {m.rank for m in first.members})
        if absent and roster.own == first.members[0]:
            who = ", ".join(map(str, absent))
            logger.warning(f"the run begins without worker {who}: it has ended before")
        roster.last = first
        roster.wake(first.members)

    def _missing(self, there: Sequence[Member]) -> set[int]:
        roster = self.roster
        starts = [Member(k, k) for k in range(roster.founders)]  # in each rank the first
        return {m.rank for m in starts if m.rank == 0 or roster.lives(m)} - {m.rank for m in there}

    # --- What is told, and decided ---

    def allgather(self, messages: np.ndarray) -> np.ndarray:
        if self.turn.is_warm_up:
            return self._spread(messages, [(self.roster.process_id, messages[0])])
        roster, number = self.roster, self.turn.number
        self._num_bytes = _STATE_BYTES + messages.nbytes
        told = self._of(roster.own)
        half, device = told.begin(number), self.mesh.devices[0].device_kind.encode()
        state = zlib.crc32(device), double_buffer.digest(self._point)
        half[:_STATE_BYTES].view(np.int64)[:] = state
        half[_STATE_BYTES : self._num_bytes] = np.frombuffer(messages.tobytes(), np.uint8)
        told.end(number)
        told.marks[double_buffer.READY] = number
        began, self._since = self._since, time.monotonic()
        roster.wake(roster.adopted.members)
        view = self._decision()
        self._rounds = [*self._rounds[-99:], time.monotonic() - began]
        if roster.own not in view.sum or roster.own not in view.members:
            roster.leave(number)
        heard = {m: self._heard_of(m, view) for m in view.sum}
        self._check(heard)
        self._tell_changes(roster.adopted, view)
        for gone in self._told.keys() - {*view.sum, *view.members}:
            del self._told[gone]
        roster.last, self.changes = view, view.changes
        rows = [(m.rank, told[_STATE_BYTES:].view(messages.dtype)[0]) for m, told in heard.items()]
        return self._spread(messages, rows)

    def _spread(self, like: np.ndarray, rows: list[tuple[int, Any]]) -> np.ndarray:
        """[W], zeros of the members that have told nothing."""
        heard = self.responded = np.zeros(len(self.process_of), bool)
        spread = np.zeros(len(self.process_of), like.dtype)
        for rank, row in rows:
            spread[rank], heard[rank] = row, True
        return spread

    def _heard_of(self, member: Member, view: MembershipView) -> np.ndarray:
        """What a member has told of this round, behind its device and the digest of its state."""
        told = self._of(member)
        half = told.halves[self.turn.number % 2][: self._num_bytes].copy()
        if not told.has(self.turn.number):
            self.roster.leave(view.number)
        return half

    def _of(self, member: Member) -> double_buffer.DoubleBuffer:
        """Where a member writes what it tells."""
        if member not in self._told:
            self._told[member] = double_buffer.of(member, "told", self._num_bytes, self.roster)
        return self._told[member]

    def is_ready(self, member: Member) -> bool:
        try:
            return bool(self._of(member).marks[double_buffer.READY] >= self.turn.number)
        except FileNotFoundError:
            return False

    def is_late(self, member: Member, now: float) -> bool:
        """Whether no process waits for a member any more, to be ready or to decide."""
        usual = statistics.median(self._rounds) if self._rounds else 0.0
        patience = max(self.roster.late_secs, _ROUNDS * usual)
        return now - self._since > patience and not self.roster.is_busy(member, now)

    def _decision(self) -> MembershipView:
        """What stands of this round. Which member decides, and when, is said above."""
        roster, number = self.roster, self.turn.number
        members = roster.adopted.members

        def due() -> list[Member]:
            return [m for m in members if roster.lives(m) and not self.is_ready(m)]

        looked = time.monotonic()
        with blocking_waits.Wait("end the round", lambda: {m.rank for m in due()}) as wait:
            while (stands := roster.decided(number)) is None:
                wait.check()
                now = time.monotonic()
                others = [m for m in members if m != roster.own and roster.lives(m)]
                late = {m for m in others if self.is_late(m, now)}  # one may sleep that is ready
                if late or now - looked > _LOST_SECS:
                    newest, looked = roster.newest(), now
                    if newest is not None and newest.number > number:  # this process has slept
                        roster.leave(number)
                fit = [m for m in members if roster.lives(m) and m not in late]
                if fit[0] == roster.own and late.issuperset(due()):
                    stands = roster.decide(self._plan())
                    roster.wake((*members, *stands.joining))
                    break
                roster.wait(membership_lib.LOOK_SECS)
        return stands

    def _plan(self) -> MembershipView:
        """What this process decides: a member that is ready is in the sum, and stays if it lives.
        One that is asked to leave stays until another has the state."""
        roster, number, last = self.roster, self.turn.number, self.roster.adopted
        ready = [m for m in last.members if self.is_ready(m)]
        living = [m for m in ready if roster.lives(m)]
        stay = [m for m in living if not roster.is_asked_to_leave(m)] or living
        taken = {m.rank for m in last.members if roster.lives(m)}
        new = [m for m in roster.asking() if m.rank not in taken and m not in last.members]
        since = last.since if set(ready).issuperset(last.sum) else number
        donor = roster.own if roster.own in stay else stay[0]
        changes = [(m.rank, roster.how_gone(m)) for m in last.members if m not in stay]
        told = (*changes, *((m.rank, JOINED) for m in new))
        return MembershipView(
            number, tuple(sorted(ready)), (*stay, *new), donor.incarnation, since, told
        )

    def _check(self, heard: Mapping[Member, np.ndarray]) -> None:
        """Compares the digests of what the members made of the round before, on devices of a kind:
        those of another kind round an update in another way.

        Raises:
            RuntimeError: they have different states.
        """
        first: dict[int, tuple[int, int]] = {}
        for member, told in heard.items():
            device, digest = told[:_STATE_BYTES].view(np.int64).tolist()
            rank, found = first.setdefault(device, (member.rank, digest))
            if found != digest:
                raise RuntimeError(
                    f"worker {member.rank} has another state than worker {rank} after round "
                    f"{self.turn.number - 1}"
                )

    def _tell_changes(self, before: MembershipView, view: MembershipView) -> None:
        """Says which workers have come and gone, and puts away what the gone have left."""
        roster = self.roster
        if view.donor != roster.incarnation:
            return
        counted = {member.rank for member in view.sum}
        for rank, what in view.changes:
            did = "what it did counts" if rank in counted else "the others do its part"
            text = f"{self.turn.number}: worker {rank} {what}; {did}"
            if what == JOINED:
                text = f"{self.turn.number + 1}: worker {rank} joins"
            logger.info(f"round {text}")
        roster.forget(view.joining)
        for path in roster.directory.glob("*.*"):
            kind, start = path.name.lstrip(".").split(".")[:2]  # "." begins what is half written
            if kind == "state" and int(start) < self.turn.number - 1:
                path.unlink(missing_ok=True)
            here = {m.incarnation for m in (*view.sum, *view.members, *before.sum)}
            is_over = start.isdecimal() and not roster.lives(Member(-1, int(start)))
            if kind.startswith(("told", "sums")) and is_over and int(start) not in here:
                path.unlink(missing_ok=True)

    def sums(self, like: types.PyTree) -> communicator_lib.Sums:
        kind = len(self._sums) + 1
        self._sums.append(elastic_sums.ElasticSums(self.roster, self.mesh, self.turn, like, kind))
        return self._sums[-1]

    # --- Coming ---

    def sends_state(self) -> bool:
        """Whether this process is to hand the state of the last round to newcomers."""
        last = self.roster.last
        return last is not None and last.donor == self.roster.incarnation and bool(last.joining)

    def send_state(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Hands the state of the last round to the members from the next one on."""
        path = self.roster.directory / f"state.{self.roster.adopted.number}"
        try:
            state_transfer.write(path, arrays, about)
        except OSError as error:
            logger.warning(f"no newcomer is taken in: {self.roster.directory}: {error.strerror}")
            path.touch()  # so that no newcomer waits for it
        self.roster.wake(self.roster.adopted.joining)

    def receive_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Waits until this newcomer, which has compiled, is a member; the state that it is handed.

        Raises:
            RuntimeError: no process with the state is left.
        """
        roster = self.roster
        roster.ask()
        taken, looked = None, time.monotonic()
        with blocking_waits.Wait("take it in", lambda: self._holders() or {0}) as wait:
            while True:
                wait.check()
                if roster.is_over():
                    roster.end(membership_lib.REMOVED, "came when the run had ended")
                asks, newest = (roster.own in roster.asking(), roster.newest())  # in this order
                if newest is None:  # the run has not begun
                    roster.wait(membership_lib.LOOK_SECS)
                    continue
                if taken is None and roster.own in newest.members:
                    taken = newest
                if taken is None and not asks:  # it slept while it was a member
                    roster.leave(newest.number)
                if taken is not None:
                    path = roster.directory / f"state.{taken.number}"
                    if path.exists():
                        break
                    if newest.number > taken.number or not roster.lives(Member(-1, taken.donor)):
                        roster.end(membership_lib.LEFT_OUT, "was handed no state; it begins anew")
                if time.monotonic() - looked > _LOST_SECS:
                    if not self._holders():
                        raise RuntimeError(
                            "all workers that had the state of the run are gone, and none has "
                            "joined since"
                        )
                    looked = time.monotonic()
                roster.wait(membership_lib.LOOK_SECS)
        try:
            found = state_transfer.read(path)
        except EOFError:
            roster.end(membership_lib.REMOVED, "was handed no state, for which there is no room")
        except FileNotFoundError:  # it slept: the others have put it away
            roster.leave(taken.number + 1)
        roster.forget([roster.own])  # the member that decided may have died before it did
        roster.last = taken
        return found

    def _holders(self) -> set[int]:
        """The ranks of the members that have the state of the run, and live."""
        if (newest := self.roster.newest()) is None:
            return set()
        holders = set(newest.members) - set(newest.joining)
        return {m.rank for m in holders if self.roster.lives(m)}

    def keep(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        roster = self.roster
        try:
            path = roster.directory / f"{_JUDGED}.{roster.incarnation}"
            state_transfer.write(path, arrays, about | {"number": self.turn.number})
        except OSError as error:
            logger.warning(f"the next leader will not know the best: {path}: {error.strerror}")
            return
        for path in list(roster.directory.glob(f"{_JUDGED}.*")):
            start = int(path.suffix[1:])
            if start != roster.incarnation and not roster.lives(Member(-1, start)):
                path.unlink(missing_ok=True)

    def kept(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        found = []
        for path in self.roster.directory.glob(f"{_JUDGED}.*"):
            with contextlib.suppress(FileNotFoundError):
                found.append(state_transfer.read(path))
        return max(found, key=lambda each: each[1]["number"], default=None)

    def outlives_leader(self) -> bool:
        roster = self.roster
        with blocking_waits.Wait("write what the run leaves", roster.others) as wait:
            while not roster.leads:
                if roster.is_over():
                    return False
                wait.check()
                roster.wait(membership_lib.LOOK_SECS)
        return not roster.is_over()

    def close(self) -> None:
        """Says that all is written."""
        if self.roster.leads:
            self.roster.say_over()
