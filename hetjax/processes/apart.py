"""Processes of one machine, each with a JAX of its own, that come and go while the run goes on.

A round of theirs, of which `tests/processes/round_model.py` is the model:

1. Each member writes what its worker contributes into one half of a buffer that the others have
   mapped (`post`), and what it did into one half of another (`tell`): rounds use the halves in
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
from hetjax.processes import apart_sums, halves, handing, waits
from hetjax.processes import meeting as meeting_lib
from hetjax.processes import place as place_lib
from hetjax.processes.place import Decision, Member

logger = logging.getLogger(__name__)

_LOST_SECS = 1.0  # after which a newcomer that waits looks whether a member is left
_JUDGED = "judged"  # begins the name of the file of each that leads, or has led
_STATE_BYTES = 16  # of the kind of a device, and of a digest
JOINED = "joined"
_ROUNDS = 5  # median rounds in which no member is late


class Apart(meeting_lib.Meeting):
    """A member of a run apart, which has one worker.

    Args:
        place: of this process.
        mesh: of its device.
    """

    alone = has_collectives = False
    no_collectives = "the processes of this run are apart (--runtime=apart). "
    carries_more = True

    def __init__(self, place: place_lib.Place, mesh: Mesh) -> None:
        super().__init__(place.num_processes)
        self.place, self.mesh = place, mesh
        self.process_of = np.arange(place.num_processes)
        self.turn = halves.Turn()
        self._sums: list[apart_sums.ApartSums] = []  # of each kind of rounds
        self._point: types.PyTree = None
        self._told: dict[Member, halves.Halves] = {}
        self._num_bytes = 0  # of a message
        self._since = time.monotonic()  # when this process was ready
        self._rounds: list[float] = []  # seconds between the last decisions

    @property
    def present(self) -> np.ndarray:
        last, seats = self.place.last, range(self.place.founders)
        return np.isin(self.process_of, [m.seat for m in last.members] if last else seats)

    @property
    def joins(self) -> bool:
        return self.place.is_guest

    def begins(self, round_index: int | None, point: types.PyTree) -> None:
        self.turn.is_warm_up, self._point = round_index is None, point
        own = -1 - self.place.start  # each warms up for itself
        self.turn.number = self.round_number = own if round_index is None else round_index

    def meets(self, state: types.PyTree = ()) -> None:
        """Waits until all founders that live are there; they begin the run together.

        Raises:
            ValueError: the run has begun without this process, or lacks memory.
        """
        place = self.place
        if place.last is not None:
            return
        if self.joins:
            raise ValueError("fit: only fit takes newcomers into a run apart; Run has no way to")
        apart_sums.check_room(place, self._sums, state)
        place.ask()
        with waits.Wait("begin", lambda: self._missing(place.asking())) as wait:
            while (first := place.decided(place_lib.FIRST)) is None:
                wait.check()
                there = [m for m in place.asking() if place.founds(m)]
                if not self._missing(there):
                    first = place.decide(Decision(place_lib.FIRST, (), tuple(there), -1))
                    place.forget(first.members)
                    break
                place.wait(place_lib.LOOK_SECS)
        if place.own not in first.members:
            place.leave(0)
        absent = sorted(set(range(place.founders)) - {m.seat for m in first.members})
        if absent and place.own == first.members[0]:
            who = ", ".join(map(str, absent))
            logger.warning(f"the run begins without worker {who}: it has ended before")
        place.last = first
        place.wake(first.members)

    def _missing(self, there: Sequence[Member]) -> set[int]:
        place = self.place
        starts = [Member(k, k) for k in range(place.founders)]  # in each seat the first
        return {m.seat for m in starts if m.seat == 0 or place.lives(m)} - {m.seat for m in there}

    # --- What is told, and decided ---

    def tell(self, messages: np.ndarray) -> np.ndarray:
        if self.turn.is_warm_up:
            return self._spread(messages, [(self.place.process_id, messages[0])])
        place, number = self.place, self.turn.number
        self._num_bytes = _STATE_BYTES + messages.nbytes
        told = self._of(place.own)
        half, device = told.begin(number), self.mesh.devices[0].device_kind.encode()
        half[:_STATE_BYTES].view(np.int64)[:] = zlib.crc32(device), halves.digest(self._point)
        half[_STATE_BYTES : self._num_bytes] = np.frombuffer(messages.tobytes(), np.uint8)
        told.end(number)
        told.marks[halves.READY] = number
        began, self._since = self._since, time.monotonic()
        place.wake(place.adopted.members)
        decision = self._decision()
        self._rounds = [*self._rounds[-99:], time.monotonic() - began]
        if place.own not in decision.sum or place.own not in decision.members:
            place.leave(number)
        heard = {m: self._heard_of(m, decision) for m in decision.sum}
        self._check(heard)
        self._tell_changes(place.adopted, decision)
        for gone in self._told.keys() - {*decision.sum, *decision.members}:
            del self._told[gone]
        place.last, self.changes = decision, decision.changes
        rows = [(m.seat, told[_STATE_BYTES:].view(messages.dtype)[0]) for m, told in heard.items()]
        return self._spread(messages, rows)

    def _spread(self, like: np.ndarray, rows: list[tuple[int, Any]]) -> np.ndarray:
        """[W], zeros of the members that have told nothing."""
        heard = self.heard = np.zeros(len(self.process_of), bool)
        spread = np.zeros(len(self.process_of), like.dtype)
        for seat, row in rows:
            spread[seat], heard[seat] = row, True
        return spread

    def _heard_of(self, member: Member, decision: Decision) -> np.ndarray:
        """What a member has told of this round, behind its device and the digest of its state."""
        told = self._of(member)
        half = told.halves[self.turn.number % 2][: self._num_bytes].copy()
        if not told.has(self.turn.number):
            self.place.leave(decision.number)
        return half

    def _of(self, member: Member) -> halves.Halves:
        """Where a member writes what it tells."""
        if member not in self._told:
            self._told[member] = halves.of(member, "told", self._num_bytes, self.place)
        return self._told[member]

    def is_ready(self, member: Member) -> bool:
        try:
            return bool(self._of(member).marks[halves.READY] >= self.turn.number)
        except FileNotFoundError:
            return False

    def is_late(self, member: Member, now: float) -> bool:
        """Whether no process waits for a member any more, to be ready or to decide."""
        usual = statistics.median(self._rounds) if self._rounds else 0.0
        patience = max(self.place.late_secs, _ROUNDS * usual)
        return now - self._since > patience and not self.place.is_busy(member, now)

    def _decision(self) -> Decision:
        """What stands of this round. Which member decides, and when, is said above."""
        place, number = self.place, self.turn.number
        members = place.adopted.members

        def due() -> list[Member]:
            return [m for m in members if place.lives(m) and not self.is_ready(m)]

        looked = time.monotonic()
        with waits.Wait("end the round", lambda: {m.seat for m in due()}) as wait:
            while (stands := place.decided(number)) is None:
                wait.check()
                now = time.monotonic()
                others = [m for m in members if m != place.own and place.lives(m)]
                late = {m for m in others if self.is_late(m, now)}  # one may sleep that is ready
                if late or now - looked > _LOST_SECS:
                    newest, looked = place.newest(), now
                    if newest is not None and newest.number > number:  # this process has slept
                        place.leave(number)
                fit = [m for m in members if place.lives(m) and m not in late]
                if fit[0] == place.own and late.issuperset(due()):
                    stands = place.decide(self._plan())
                    place.wake((*members, *stands.joining))
                    break
                place.wait(place_lib.LOOK_SECS)
        return stands

    def _plan(self) -> Decision:
        """What this process decides: a member that is ready is in the sum, and stays if it lives.
        One that is asked to leave stays until another has the state."""
        place, number, last = self.place, self.turn.number, self.place.adopted
        ready = [m for m in last.members if self.is_ready(m)]
        living = [m for m in ready if place.lives(m)]
        stay = [m for m in living if not place.is_asked_to_leave(m)] or living
        taken = {m.seat for m in last.members if place.lives(m)}
        new = [m for m in place.asking() if m.seat not in taken and m not in last.members]
        since = last.since if set(ready).issuperset(last.sum) else number
        donor = place.own if place.own in stay else stay[0]
        changes = [(m.seat, place.how_gone(m)) for m in last.members if m not in stay]
        told = (*changes, *((m.seat, JOINED) for m in new))
        return Decision(number, tuple(sorted(ready)), (*stay, *new), donor.start, since, told)

    def _check(self, heard: Mapping[Member, np.ndarray]) -> None:
        """Compares the digests of what the members made of the round before, on devices of a kind:
        those of another kind round an update in another way.

        Raises:
            RuntimeError: they have different states.
        """
        first: dict[int, tuple[int, int]] = {}
        for member, told in heard.items():
            device, digest = told[:_STATE_BYTES].view(np.int64).tolist()
            seat, found = first.setdefault(device, (member.seat, digest))
            if found != digest:
                raise RuntimeError(
                    f"worker {member.seat} has another state than worker {seat} after round "
                    f"{self.turn.number - 1}"
                )

    def _tell_changes(self, before: Decision, decision: Decision) -> None:
        """Says which workers have come and gone, and puts away what the gone have left."""
        place = self.place
        if decision.donor != place.start:
            return
        counted = {member.seat for member in decision.sum}
        for seat, what in decision.changes:
            did = "what it did counts" if seat in counted else "the others do its part"
            text = f"{self.turn.number}: worker {seat} {what}; {did}"
            if what == JOINED:
                text = f"{self.turn.number + 1}: worker {seat} joins"
            logger.info(f"round {text}")
        place.forget(decision.joining)
        for path in place.directory.glob("*.*"):
            kind, start = path.name.lstrip(".").split(".")[:2]  # "." begins what is half written
            if kind == "state" and int(start) < self.turn.number - 1:
                path.unlink(missing_ok=True)
            here = {m.start for m in (*decision.sum, *decision.members, *before.sum)}
            is_over = start.isdecimal() and not place.lives(Member(-1, int(start)))
            if kind.startswith(("told", "sums")) and is_over and int(start) not in here:
                path.unlink(missing_ok=True)

    def sums(self, like: types.PyTree) -> meeting_lib.Sums:
        kind = len(self._sums) + 1
        self._sums.append(apart_sums.ApartSums(self.place, self.mesh, self.turn, like, kind))
        return self._sums[-1]

    # --- Coming ---

    def hands_on(self) -> bool:
        """Whether this process is to hand the state of the last round to newcomers."""
        last = self.place.last
        return last is not None and last.donor == self.place.start and bool(last.joining)

    def hand_on(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Hands the state of the last round to the members from the next one on."""
        path = self.place.directory / f"state.{self.place.adopted.number}"
        try:
            handing.write(path, arrays, about)
        except OSError as error:
            logger.warning(f"no newcomer is taken in: {self.place.directory}: {error.strerror}")
            path.touch()  # so that no newcomer waits for it
        self.place.wake(self.place.adopted.joining)

    def take_in(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Waits until this newcomer, which has compiled, is a member; the state that it is handed.

        Raises:
            RuntimeError: no process with the state is left.
        """
        place = self.place
        place.ask()
        taken, looked = None, time.monotonic()
        with waits.Wait("take it in", lambda: {m.seat for m in self._holders()} or {0}) as wait:
            while True:
                wait.check()
                if place.is_over():
                    place.end(place_lib.REMOVED, "came when the run had ended")
                asks, newest = place.own in place.asking(), place.newest()  # in this order
                if newest is None:  # the run has not begun
                    place.wait(place_lib.LOOK_SECS)
                    continue
                if taken is None and place.own in newest.members:
                    taken = newest
                if taken is None and not asks:  # it slept while it was a member
                    place.leave(newest.number)
                if taken is not None:
                    path = place.directory / f"state.{taken.number}"
                    if path.exists():
                        break
                    if newest.number > taken.number or not place.lives(Member(-1, taken.donor)):
                        place.end(place_lib.LEFT_OUT, "was handed no state; it begins anew")
                if time.monotonic() - looked > _LOST_SECS:
                    if not self._holders():
                        raise RuntimeError(
                            "all workers that had the state of the run are gone, and none has "
                            "joined since"
                        )
                    looked = time.monotonic()
                place.wait(place_lib.LOOK_SECS)
        try:
            found = handing.read(path)
        except EOFError:
            place.end(place_lib.REMOVED, "was handed no state, for which there is no room")
        except FileNotFoundError:  # it slept: the others have put it away
            place.leave(taken.number + 1)
        place.forget([place.own])  # the member that decided may have died before it did
        place.last = taken
        return found

    def _holders(self) -> list[Member]:
        """The members that have the state of the run, and live."""
        newest = self.place.newest()
        members = [] if newest is None else set(newest.members) - set(newest.joining)
        return [m for m in members if self.place.lives(m)]

    def keep(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        place = self.place
        try:
            path = place.directory / f"{_JUDGED}.{place.start}"
            handing.write(path, arrays, about | {"number": self.turn.number})
        except OSError as error:
            logger.warning(f"the next leader will not know the best: {path}: {error.strerror}")
            return
        for path in list(place.directory.glob(f"{_JUDGED}.*")):
            start = int(path.suffix[1:])
            if start != place.start and not place.lives(Member(-1, start)):
                path.unlink(missing_ok=True)

    def kept(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        found = []
        for path in self.place.directory.glob(f"{_JUDGED}.*"):
            with contextlib.suppress(FileNotFoundError):
                found.append(handing.read(path))
        return max(found, key=lambda each: each[1]["number"], default=None)

    def outlives_leader(self) -> bool:
        place = self.place
        with waits.Wait("write what the run leaves", place.others) as wait:
            while not place.leads:
                if place.is_over():
                    return False
                wait.check()
                place.wait(place_lib.LOOK_SECS)
        return not place.is_over()

    def close(self) -> None:
        """Says that all is written."""
        if self.place.leads:
            self.place.say_over()
