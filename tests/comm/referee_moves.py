"""All that may happen next in the world of the referee: steps of processes, and faults.

A process tells the referee an event, or asks for its order and follows it, or ends a transfer, or
makes a checkpoint visible. It may stop between any two of these, for ever or until long after it
was left out: then it goes on with what it has in its hands. What may come between is what the
others do, and these faults, as many as `Faults` has:

- A process dies; the host sees it later. What it put up is gone, what it told may still arrive.
- The host counts a process as late, which only sleeps.
- A call is heard and its answer is lost: the process tells again. Or the call is heard once more,
  at any later time.
- A process comes, to a seat that is empty or new, also before the host has seen a death there.
- A process is asked to leave.
- The whole call is repeated: it reads the newest checkpoint that is readable, then registers. The
  old processes go on meanwhile; after that, all that they might still write is on the disk.

A step has all that a process does between two looks at what others write. What it does on its own,
such as applying a sum, commutes with all steps of others, and so needs no step of its own.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hetjax.comm.referee import Member
from tests.comm import referee_world
from tests.comm.referee_world import Checkpoint, Faults, Handle, Process, World, WrongError

# Where contributions outlive their members: after how many rounds memory is used again; and whether
# a process asks once more before it goes on with what it has read.
LIE, ASKS = 2, True
FOREIGN = "what an older generation went on with"


def moves(world: World) -> Iterator[tuple[Member | None, bool, World]]:
    """All that may happen next: which process does it, and whether it needs no luck."""
    for member, process in world.processes:
        if not process.end:
            for after in acts(world, member, process):
                yield member, process.out != "late", after
    for member in world.unseen:
        yield None, True, _seen(world, member)
    for after in _by_luck(world):
        yield None, False, after


# --- What comes from outside: each of the faults has been counted ---


def _by_luck(world: World) -> Iterator[World]:
    if world.again:
        yield world._replace(again=()).told(world.again)
    for each in world.asleep:
        yield world._replace(asleep=world.asleep - {each}).written(each)
    for call in world.calls:
        yield _registers(world, call)
    for kind, left in zip(Faults._fields, world.faults, strict=True):
        if left:
            yield from _FAULTS[kind](world.fault(kind))


def _seen(world: World, member: Member) -> World:
    """The host sees a death; in which round."""
    at = world.referee.round_index
    remains = tuple((m, p, at if m == member else seen) for m, p, seen in world.remains)
    unseen = tuple(m for m in world.unseen if m != member)
    return world._replace(unseen=unseen, remains=remains).told(("gone", member, "killed"))


def _deaths(world: World) -> Iterator[World]:
    """Not of a late process, nor of one that has ended: `referee_model` says why."""
    for member, process in world.processes:
        if process.end or process.out == "late":
            continue
        now = world.having(member, None)._replace(unseen=(*world.unseen, member))
        if world.outlives:
            remains = (*world.remains, (member, process._replace(hand=(), sum=None), None))
            now = now._replace(remains=remains)
        yield now
        if process.hand[:1] == ("tells",) and not now.again:
            yield now._replace(again=process.hand[1])  # it is still on its way


def _lates(world: World) -> Iterator[World]:
    for member, process in world.processes:
        if not process.end and not process.out and world.knows(member):
            yield world.having(member, process._replace(out="late")).told(("gone", member, "late"))


def _leaves(world: World) -> Iterator[World]:
    for member, process in world.processes:
        if not process.end and not process.out and member in world.referee.present:
            now = world.having(member, process._replace(out="asked"))
            yield now.told(("asked_to_leave", member))


def _joins(world: World) -> Iterator[World]:
    """It has compiled, and asks to join: until then no other knows of it."""
    taken = {m.rank for m, p in world.processes if not p.end and p.out != "late"}
    newest = dict(world.referee.newest)
    rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
    member = Member(rank, 1 + newest.get(rank, -1))
    now = world.having(member, Process()).told(("joins", member))
    yield now
    if world.faults.lost:
        yield now.having(member, Process(hand=("tells", ("joins", member)))).fault("lost")


def _repeats(world: World) -> Iterator[World]:
    newest = world.readable[-1].ledger if world.readable else world.line[0]
    yield world._replace(calls=world.calls | {(world.generation, newest)})


def _registers(world: World, call: tuple[int, referee_world.Ledger]) -> World:
    """A call that was repeated begins, with one worker less. It knows nothing of the old one. What
    that had begun to write may come at any time; what else it goes on to write is there at once."""
    world = world._replace(calls=world.calls - {call})
    if not referee_world.may_register(world, call[0]):
        return world  # it is refused
    founders = tuple(Member(r, 0) for r in range(max(1, len(world.line[0].members) - 1)))
    ledger = call[1]._replace(members=founders)
    hands = (p.ledger for _, p in world.processes if p.hand == ("writes",) and p.ledger is not None)
    old = {Checkpoint(world.generation, each.round_index, each.saved) for each in hands}
    later = range(ledger.round_index + 1, world.rounds + 1)
    began = World(
        referee_world.referee_lib.begun(founders, ledger.round_index - 1, outlives=world.outlives),
        tuple((m, Process(ledger, is_saved=True)) for m in founders),
        world.faults,
        world.rounds,
        world.saves,
        (*world.line[: ledger.round_index], ledger),
        (*world.began, ledger.round_index),
        world.disk,
        world.asleep | old,
        world.calls,
        sums=world.sums,
    )
    return began.written(*(Checkpoint(world.generation, step, FOREIGN) for step in later))


_FAULTS: dict[str, Callable[[World], Iterator[World]]] = {
    "deaths": _deaths,
    "late": _lates,
    "lost": lambda world: iter(()),  # where something is told
    "joins": _joins,
    "leaves": _leaves,
    "repeats": _repeats,
}

# --- What processes do ---


def acts(world: World, member: Member, me: Process) -> Iterator[World]:
    """The next step of a process; none where it waits."""
    kind, *what = me.hand or ("asks",)
    idle = me._replace(hand=())
    if kind == "tells":
        yield from _tells(world, member, me, *what)
    elif kind == "takes":
        yield world.having(member, _taken(world, member, idle, *what))
    elif kind == "gathers":
        yield world.having(member, _gathered(world, member, idle, *what))
    elif kind == "adds":
        yield world.having(member, _added(world, member, idle, *what))
    elif kind == "reads":
        totals = dict(world.memory_of(*what).totals)
        yield world.having(member, idle._replace(sum=totals.get(me.ledger.round_index, "another")))
    elif kind == "receives":
        yield world.having(member, _received(world, member, idle, *what))
    elif kind == "writes" and me.ledger is not None:
        made = Checkpoint(world.generation, me.ledger.round_index, me.ledger.saved)
        yield world.having(member, idle._replace(is_saved=True)).written(made)
    else:
        order = world.order(member)
        after = _ORDERS[order.kind](world, member, me, order.what)
        if after != me:
            yield world.having(member, after)


def _tells(world: World, member: Member, me: Process, event: Any) -> Iterator[World]:
    told = world.told(event)
    heard = told.having(member, me._replace(hand=()))
    yield heard
    if world.faults.lost:
        yield told.fault("lost")
        if not world.again:
            yield heard.fault("lost")._replace(again=event)


def _taken(world: World, member: Member, me: Process, *order: Any) -> Process:
    attempt, members = order
    at = me.ledger.round_index
    if (found := _found(world, members, at)) is None:
        return me
    if world.sums == "slices":
        where = Handle("slice", member, at, attempt)
        part = members.index(member), found
        return me._replace(slice=part, hand=("tells", ("added", member, at, attempt, where)))
    return me._replace(sum=found, hand=("tells", ("has", member, at, attempt)))


def _found(world: World, members: tuple[Member, ...], at: int) -> tuple[Any, ...] | None:
    """What lies where the contributions of a round do, or did."""
    lies = [(m, world.memory_of(m).lies) for m in members]
    if not all(rounds for _, rounds in lies):
        return None
    return tuple((m, at if at in rounds else rounds[-1]) for m, rounds in lies)


def _added(world: World, member: Member, me: Process, view: Any, for_all: bool) -> Process:
    at = me.ledger.round_index
    found = _found(world, view.sum, at)
    if not ASKS and found is not None:
        return _applies(world, member, me._replace(sum=found), view)
    if found is None or not for_all:
        return me._replace(sum=found)
    hand = ("tells", ("summed", member, at, Handle("sum", member, at)))
    return me._replace(sum=found, totals=(*me.totals, (at, found)), hand=hand)


def _gathered(world: World, member: Member, me: Process, *order: Any) -> Process:
    """Reads one slice after the other. Those that do not fit make a sum that is none of a round."""
    attempt, owners, found = order
    if owners:
        part = dict(world.processes).get(owners[len(found)], Process()).slice
        found = (*found, part)
        if part is None:
            return me
    if len(found) < len(owners):
        return me._replace(hand=("gathers", attempt, owners, found))
    added = found[0][1] if found else ()
    fits = found == tuple((place, added) for place in range(len(added)))
    has = ("has", member, me.ledger.round_index, attempt)
    return me._replace(sum=added if fits else found, hand=("tells", has))


def _received(world: World, member: Member, me: Process, *order: Any) -> Process:
    (where,) = order
    its, round_index = world.memory_of(where.owner), where.round_index
    if not its.gives or its.ledger is None or its.ledger.round_index != round_index:
        return me
    holds = ("tells", ("holds", member, round_index))
    return Process(world.held(its.ledger), hand=holds, out=me.out)


# How a process follows an order. Only what others can see is left for a step of its own.


def _computes(world: World, member: Member, me: Process, what: Any) -> Process:
    at = me.ledger.round_index
    if at == world.rounds:
        return _finishes(world, member, me)
    if world.saves and not me.is_saved and world.referee.leader == member:
        return me._replace(hand=("writes",))
    units = referee_world.planned(me.ledger)[0][member]
    where = Handle("contribution", member, at)
    cost = -member.rank if world.sums == "one" else None
    return me._replace(
        lies=(*(old for old in me.lies if old > at - LIE), at),
        totals=tuple(old for old in me.totals if old[0] > at - LIE),
        hand=("tells", ("ready", member, at, units, where, cost)),
    )


def _takes(world: World, member: Member, me: Process, what: Any) -> Process:
    attempt, members, told, where = what
    at = me.ledger.round_index
    if at == world.rounds:
        return _finishes(world, member, me)
    units = referee_world.planned(me.ledger)[0]
    if told != tuple(units.get(m) for m in members):
        raise WrongError(f"{member} hears of {told}, planned are {units}")
    if where != tuple(Handle("contribution", m, at) for m in members):
        raise WrongError(f"{member} is to take {where} of {members} in round {at}")
    if world.sums == "slices" and member not in members:
        return me._replace(hand=("tells", ("added", member, at, attempt, None)))
    return me._replace(hand=("takes", attempt, members))


def _gathers(world: World, member: Member, me: Process, what: Any) -> Process:
    attempt, members, where = what
    at = me.ledger.round_index
    if where != tuple(Handle("slice", m, at, attempt) for m in members):
        raise WrongError(f"{member} is to gather {where} of {members} in round {at}, {attempt}")
    return me._replace(hand=("gathers", attempt, members, ()))


def _finishes(world: World, member: Member, me: Process) -> Process:
    """The run is done; the leader writes what it leaves, and the others wait."""
    if world.referee.is_over:
        return _ends("over", world, member, me, None)
    if world.referee.leader == member:
        return me._replace(hand=("tells", ("finished", member)) if me.is_saved else ("writes",))
    return me if me.ends else me._replace(ends=True, hand=("tells", ("ends", member)))


def _applies(world: World, member: Member, me: Process, view: Any) -> Process:
    """Its contribution, its slice and the state that it gave are put away with the round, or when
    the memory is used again."""
    if me.sum != tuple((m, view.round_index) for m in view.sum):
        raise WrongError(f"{member} is to apply {view}, and holds {me.sum}")
    lies, totals = (me.lies, me.totals) if world.outlives else ((), ())
    ledger = world.held(referee_world.behind(me.ledger, view))
    return Process(ledger, lies, totals, out=me.out)


def _adds(world: World, member: Member, me: Process, what: Any) -> Process:
    """It adds, or has added, and hears that it was no other round's that it has read."""
    view, where, for_all = what
    if me.ledger.round_index == world.rounds:  # it has got the state of a run that is done
        return _finishes(world, member, me)
    if where != tuple(Handle("contribution", m, view.round_index) for m in view.sum):
        raise WrongError(f"{member} is to add {where} by {view}")
    if me.sum is not None:
        return _applies(world, member, me, view)
    return me._replace(hand=("adds", view, for_all))


def _reads(world: World, member: Member, me: Process, what: Any) -> Process:
    view, where = what
    if getattr(where, "kind", None) != "sum":
        raise WrongError(f"{member} is to read {where} by {view}")
    if me.sum is not None:
        return _applies(world, member, me, view)
    return me._replace(hand=("reads", where.owner))


def _donates(world: World, member: Member, me: Process, what: Any) -> Process:
    at = me.ledger.round_index
    where = Handle("state", member, at)
    return me._replace(gives=True, hand=("tells", ("donated", member, at, where)))


def _receives(world: World, member: Member, me: Process, what: Any) -> Process:
    return me._replace(hand=("receives", what[1]))


def _lacks(world: World, member: Member, me: Process, what: Any) -> Process:
    return me._replace(hand=("tells", ("lacks", member, what)))


def _ends(kind: str, world: World, member: Member, me: Process, what: Any) -> Process:
    if kind == "leave" and not me.out:
        raise WrongError(f"{member} is left out, though it is neither late nor asked to leave")
    if kind == "over" and not any(each.step == world.rounds for each in world.readable):
        raise WrongError(f"{member} ends before the run is written")
    return me._replace(end=kind, hand=())


_ORDERS = {
    "compute": _computes,
    "wait": lambda world, member, me, what: me,
    "donate": _donates,
    "receive": _receives,
    "take": _takes,
    "gather": _gathers,
    "apply": _applies,
    "add": _adds,
    "read": _reads,
    "lack": _lacks,
    **{kind: functools.partial(_ends, kind) for kind in ("leave", "ended", "over")},
}
