"""What the referee is checked in: processes, their memory, a disk that all see; and what is wrong.

A process takes one step at a time. What it has in its hands between two steps stands in
`Process.hand`: an event that it is about to tell, a transfer, a checkpoint that is not visible yet.
Nothing marks memory: a process that takes a contribution reads what lies there when its transfer
ends.

`World` raises a `WrongError` where what has happened must not happen.
"""

import functools
from typing import Any, NamedTuple

from hetjax.comm import referee as referee_lib
from hetjax.comm.referee import Member, MembershipView

REMAIN = 2  # decisions after which what one has put up is removed, whose end was seen


class WrongError(AssertionError):
    """What must not happen."""

    found: Any = None  # by `referee_model`: the state's number, the world, where each came from


class Ledger(NamedTuple):
    """The state of a run: what it counted, and what is next. All that hold it have it alike."""

    round_index: int
    members: tuple[Member, ...]
    counted: tuple[int, ...] = ()  # units of work, as they were applied
    back: tuple[int, ...] = ()  # of members that were lost; these come first
    cursor: int = 0

    @property
    def saved(self) -> "Ledger":
        """In a checkpoint; a run that goes on from it has members of its own."""
        return self._replace(members=())


@functools.cache
def planned(ledger: Ledger) -> tuple[dict[Member, tuple[int, ...]], Ledger]:
    """The units of each member by its quota, here two of the first and one of the others."""
    left, cursor, units = list(ledger.back), ledger.cursor, {}
    for member in ledger.members:
        own = []
        for _ in range(1 + (member == ledger.members[0])):
            own.append(left.pop(0) if left else cursor)
            cursor += own[-1] == cursor
        units[member] = tuple(own)
    return units, ledger._replace(back=tuple(left), cursor=cursor)


@functools.cache
def behind(ledger: Ledger, view: MembershipView) -> Ledger:
    """The state after a view is applied; what is not in the sum goes to the head of the order."""
    units, rest = planned(ledger)
    if view.told != tuple(units.get(m) for m in view.sum):
        raise WrongError(f"{view} tells of other units than {units}")
    lost = [u for m in ledger.members if m not in view.sum for u in units[m]]
    after = rest._replace(
        round_index=view.round_index + 1,
        members=view.members,
        counted=(*ledger.counted, *(u for m in view.sum for u in units[m])),
        back=(*lost, *rest.back),
    )
    if sorted((*after.counted, *after.back)) != list(range(after.cursor)):
        raise WrongError(f"units are missing or doubled: {after}")
    return after


class Handle(NamedTuple):
    """Says where something lies. An engine keeps what it stands for as long as the handle is known,
    but not longer than its owner lives."""

    kind: str  # "contribution", "slice", "sum" or "state"
    owner: Member
    round_index: int
    attempt: int = 0


class Process(NamedTuple):
    ledger: Ledger | None = None  # None: it has no state yet
    lies: tuple[int, ...] = ()  # the rounds whose contributions lie in its memory
    totals: tuple[tuple[int, Any], ...] = ()  # the sums that lie there, by their rounds
    slice: tuple[int, Any] | None = None  # lies there: its place in the sum, of what it is the sum
    gives: bool = False  # its state lies there for newcomers
    sum: tuple[Any, ...] | None = None  # what it has added: of which members and rounds
    hand: tuple[Any, ...] = ()
    is_saved: bool = False  # it has written the checkpoint of its state, or read it
    ends: bool = False  # it has told that it waits for the end
    out: str = ""  # "late" or "asked" to leave, as the host has told the referee
    end: str = ""


class Faults(NamedTuple):
    """How many may come."""

    deaths: int = 0
    late: int = 0
    lost: int = 0  # answers
    joins: int = 0
    leaves: int = 0
    repeats: int = 0  # of the whole call


class Checkpoint(NamedTuple):
    """As a reader sees it. Which incarnation wrote it makes no difference to any rule: that all of
    a generation write the same for a step is what `World.written` holds each of them to."""

    generation: int
    step: int
    ledger: Any


class World(NamedTuple):
    referee: referee_lib.State
    processes: tuple[tuple[Member, Process], ...]
    faults: Faults
    rounds: int
    saves: bool  # whether the leader writes a checkpoint each round, and not at the end alone
    line: tuple[Ledger, ...]  # the state behind each round, of the newest generation
    began: tuple[int, ...] = (0,)  # of each generation that registered: its first step
    disk: frozenset[Checkpoint] = frozenset()  # what is visible
    asleep: frozenset[Checkpoint] = frozenset()  # in the hands of processes of older generations
    calls: frozenset[tuple[int, Ledger]] = frozenset()  # repeated, not registered: what they read
    unseen: tuple[Member, ...] = ()  # dead, and the host has not seen it
    again: tuple[Any, ...] = ()  # a call that may be heard once more
    sums: str = "whole"  # or in "slices"; or contributions outlive, and "each" adds, or "one" does
    remains: tuple[
        tuple[Member, Process, int | None], ...
    ] = ()  # and the round of the end, if seen

    @property
    def generation(self) -> int:
        return len(self.began) - 1

    @property
    def outlives(self) -> bool:
        return self.sums in ("each", "one")

    def memory_of(self, member: Member) -> Process:
        """Also of one that has died, where that outlives it."""
        return dict(self.processes).get(member) or next(
            (process for dead, process, _ in self.remains if dead == member), Process()
        )

    def having(self, member: Member, process: Process | None) -> "World":
        others = tuple(each for each in self.processes if each[0] != member)
        own = () if process is None else ((member, process),)
        return self._replace(processes=tuple(sorted((*others, *own), key=lambda each: each[0])))

    def fault(self, kind: str) -> "World":
        left = getattr(self.faults, kind) - 1
        return self._replace(faults=self.faults._replace(**{kind: left}))

    def told(self, event: tuple[Any, ...]) -> "World":
        """The referee has heard an event."""
        try:
            after = referee_lib.step(self.referee, event)
        except Exception as error:
            raise WrongError(f"the referee fails: {event}, {self.referee}") from error
        if after.view == self.referee.view:
            return self._replace(referee=after)
        for wrong, is_so in _wrong_of(self, self.referee.view, after.view).items():
            if is_so:
                raise WrongError(f"{wrong}: {after.view} follows {self.referee.view}")
        if _has_handle(after._replace(lying=()) if self.outlives else after):
            raise WrongError(f"a handle outlives its round: {after}")
        last = after.view.round_index + 1 - REMAIN
        remains = tuple(each for each in self.remains if each[2] is None or each[2] > last)
        line = (*self.line, behind(self.line[-1], after.view))
        return self._replace(referee=after, line=line, remains=remains)

    def order(self, member: Member) -> referee_lib.Order:
        """What the referee has a process do."""
        ledger = dict(self.processes)[member].ledger
        at = None if ledger is None else ledger.round_index
        try:
            order = referee_lib.order(self.referee, member, at)
        except Exception as error:
            raise WrongError(f"the referee fails: {member}, {self.referee}") from error
        needs = ("compute", "donate", "take", "gather", "apply", "add", "read", "held")
        if ledger is None and order.kind in needs:
            raise WrongError(f"{member} is to {order.kind}, and has no state")
        return order

    def knows(self, member: Member) -> bool:
        """Whether the referee counts on a process."""
        return member in self.referee.present or member in self.referee.asking

    def goes_on(self, member: Member, process: Process) -> bool:
        """Whether a process is known, and has the state of now or what makes it of that before."""
        if process.ledger is None or not self.knows(member):
            return False
        missing = self.referee.round_index - process.ledger.round_index
        has_next = process.sum is not None or (self.outlives and member in self.referee.holders)
        return missing == 0 or (missing == 1 and has_next)

    def held(self, ledger: Ledger) -> Ledger:
        """The state that a process of now has: that of all others."""
        if ledger != self.line[ledger.round_index]:
            raise WrongError(f"a process has {ledger}, not {self.line[ledger.round_index]}")
        return ledger

    def written(self, *made: Checkpoint) -> "World":
        """With checkpoints that have become visible."""
        now = self._replace(disk=self.disk.union(made))
        for each in now.readable:
            if each.step >= len(self.line) or each.ledger != self.line[each.step].saved:
                raise WrongError(f"readable is {each}, which is no state of the run")
        return now

    @property
    def readable(self) -> list[Checkpoint]:
        """What a reader does not ignore, the newest last."""
        fit = (each for each in self.disk if is_readable(each, self.began))
        return sorted(fit, key=lambda each: each[:2])


def _wrong_of(world: World, before: MembershipView, view: MembershipView) -> dict[str, bool]:
    """What must not be so of a view that follows another."""
    were, are = ({*each.members, *each.joining} for each in (before, view))
    came = [m for m, how in view.changes if how == referee_lib.JOINED]
    went = {m for m, how in view.changes if how != referee_lib.JOINED}
    left = {m for m, how in view.changes if how == "left"}
    asked = {m for m, p in world.processes if p.out == "asked"}
    stay = [m for m in before.members if m in view.members]
    return {
        "a round was left out, or decided twice": view.round_index != before.round_index + 1,
        "no member has the state": not view.members,
        "a seat is taken twice": len({m.rank for m in are}) < len(are),
        "older members come first": [*view.members] != stay + came,
        "changes are not told": were - are != went,
        "a newcomer was not handed the state": bool(
            view.sum and not went and {*before.joining} & {*view.joining}
        ),
        "one leaves before its round is over": not left & {*before.members} <= {*view.sum},
        "one that was asked to leave stays": bool(asked & {*view.members})
        and not asked >= {*view.members},
    }


def _has_handle(found: Any) -> bool:
    if isinstance(found, tuple | frozenset):
        return isinstance(found, Handle) or any(map(_has_handle, found))
    return False


def is_readable(checkpoint: Checkpoint, began: tuple[int, ...]) -> bool:
    """Not of an older generation, beyond the step where a newer one began."""
    return all(checkpoint.step <= step for step in began[checkpoint.generation + 1 :])


def may_register(world: World, generation: int) -> bool:
    """Whether no other call has registered since one has looked which generation is the newest."""
    return world.generation == generation


def begun(
    workers: int, *, rounds: int, faults: Faults, saves: bool = False, sums: str = "whole"
) -> World:
    members = tuple(Member(rank, 0) for rank in range(workers))
    ledger = Ledger(0, members)
    processes = tuple((m, Process(ledger, is_saved=True)) for m in members)
    state = referee_lib.begun(members, outlives=sums in ("each", "one"))
    return World(state, processes, faults, rounds, saves, (ledger,), sums=sums)
