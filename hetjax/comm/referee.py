"""Decides rounds of workers that come and go over machines; a pure function of what it is told.

`step(state, event)` is the state after an event, `order(state, member, round_index)` what a member
is to do in it. Both know no clock, no socket and no engine. An event may come twice, and an answer
may be lost: the same question has the same answer. The host of the referee tells it which members
have died, and which are late by the host's own clock. The members tell the rest.

Over machines a contribution dies with the one that made it. So a round is decided only when all
living members have its sum:

1. Each member computes, and tells that it is `ready`, with what all are to know of its work, and
   where its contribution lies. The view keeps the former; the latter is forgotten with the round.
2. When all are, each takes the contributions of all, adds them in the order of the ranks, and
   tells that it `has` the sum. No member applies it before the round is decided.
3. When all living members have the sum, the round is decided. A `MembershipView` names the members
   in the sum, the members of the next round, and the newcomers that get the state. Then all apply
   the sum.

A large sum is made in slices: each member of the sum adds one slice of all contributions, and tells
that it has `added` it, and where it lies. When all have, each member gathers the slices, and then
`has` the sum. All choose alike, by the size of the sum.

When a member dies before all have the sum, the others begin another attempt without it, and without
its slice; its microbatches go to the head of the order. A newcomer gets the state in which a round
begins, takes the sum of that round like the others, and computes from the next round on. When its
donor dies, the next view names another.

On one machine contributions outlive their members (`State.outlives`). There a round is decided when
all are ready, and added afterwards. A large sum is added by the member whose time costs the least;
the others read it, or add for themselves where that one is lost. They have read all that lies there
for a round before the next one is decided. One that was left out, and reads what lies there
later, hears so before it goes on.

`tests/comm/referee_model.py` runs every interleaving of calls, deaths and sleep on this module.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hetjax.comm.views import FIRST, JOINED, Member, MembershipView, Order

ByMember = tuple[tuple[Member, Any], ...]  # sorted; one of each


class State(NamedTuple):
    """What the referee knows of the round behind its last view."""

    view: MembershipView
    members: tuple[Member, ...]  # of the view, and alive
    joining: tuple[Member, ...] = ()
    holding: frozenset[Member] = frozenset()  # of those that join: they have the state
    donor: Member | None = None  # hands it to them
    handed: Any = None  # where the donor has put it
    lacking: frozenset[Member] = frozenset()  # of those that join: they have told so
    ready: ByMember = ()  # (what each has told, where its contribution lies)
    adding: tuple[Member, ...] = ()  # of the sum; none: not all are ready
    attempt: int = 0  # of adding
    added: ByMember = ()  # where the slice of each lies that waits for those of this attempt
    has: frozenset[Member] = frozenset()  # the sum of this attempt
    asking: tuple[Member, ...] = ()  # to become members
    leaving: frozenset[Member] = frozenset()  # asked to leave
    gone: tuple[tuple[Member, str], ...] = ()  # since the view, and how
    newest: tuple[tuple[int, int], ...] = ()  # the newest incarnation that came to each rank
    ending: frozenset[Member] = frozenset()  # wait until all that the run leaves is written
    is_over: bool = False  # all that the run leaves is written
    outlives: bool = False  # contributions outlive their members: decided first, then added
    lying: tuple[Any, ...] = ()  # then: where those of the view's sum lie
    adder: Member | None = None  # then: adds it for all; None: each does
    summed: Any = None  # then: where the adder has put the sum

    @property
    def round_index(self) -> int:
        return self.view.round_index + 1

    @property
    def present(self) -> tuple[Member, ...]:
        """Those that must have the sum before the round is decided."""
        return (*self.members, *self.joining)

    @property
    def holders(self) -> tuple[Member, ...]:
        """The members that have the state of the run, as they have told."""
        return (*self.members, *(m for m in self.joining if m in self.holding))

    @property
    def leader(self) -> Member | None:
        """Evaluates, writes and reports: of those that have the state, the one that came first."""
        return next(iter(self.holders), None)

    @property
    def is_adding(self) -> bool:
        """Whether the sum is known: where newcomers alone have the state it is empty."""
        return bool(self.adding) or not self.members

    @property
    def is_lost(self) -> bool:
        """Whether no member has the state, so that the run goes on from a checkpoint. A newcomer
        may have got it just before the donor died."""
        return not self.holders and self.lacking.issuperset(self.joining)


def begun(members: Iterable[Member], round_index: int = FIRST, *, outlives: bool = False) -> State:
    """Of members that have one state, the one behind a round."""
    members = tuple(members)
    newest = tuple(sorted(members))
    view = MembershipView(round_index, (), (), members)
    return State(view, members, newest=newest, outlives=outlives)


def step(state: State, event: tuple[Any, ...]) -> State:
    """What follows of an event.

    Args:
        state: before it.
        event: one of these, with a member.

            `("joins", member)`: it has compiled, and wants the state.
            `("ready", member, round_index, what, where[, cost])`: it has computed; `what` goes to
                all, and is kept by the view; its contribution lies at `where` until the round is
                decided; `cost` is that of its time, where one member may add for all.
            `("added", member, round_index, attempt, where)`: its slice of the sum lies there; it
                waits for those of the others. A newcomer adds none; it tells so with None.
            `("has", member, round_index, attempt)`: it has the sum.
            `("summed", member, round_index, where)`: the sum of the view lies there.
            `("donated", member, round_index, where)`: the state lies there.
            `("holds", member, round_index)`: it has the state in which the round begins.
            `("lacks", member, round_index)`: it joins in this round, and has no state.
            `("ends", member)`: it has done its last round, and waits until all is written.
            `("finished", member)`: all that the run leaves is written.
            `("asked_to_leave", member)`: by a user.
            `("gone", member, how)`: it has died, is late, or has ended.
    """
    by_members = (_joins, _ready, _added, _has, _summed, _donated, _holds, _lacks, _ends, _finished)
    steps: dict[str, Callable[..., State]] = {
        each.__name__[1:]: each for each in (*by_members, _asked_to_leave, _gone)
    }
    kind, member, *given = event
    return _decided(steps[kind](state, member, *given))


def _joins(state: State, member: Member) -> State:
    if member.incarnation <= dict(state.newest).get(member.rank, -1):
        return state  # it is known, or was left out
    newest = {**dict(state.newest), member.rank: member.incarnation}
    others = (m for m in state.asking if m.rank != member.rank)  # an earlier start of its seat
    return state._replace(asking=(*others, member), newest=tuple(sorted(newest.items())))


def _ready(
    state: State, member: Member, round_index: int, what: Any, where: Any, cost: Any = None
) -> State:
    is_due = member in state.members and member not in dict(state.ready)
    if not is_due or round_index != state.round_index:
        return state
    return state._replace(ready=_with(state.ready, member, (what, where, cost)))


def _added(state: State, member: Member, round_index: int, attempt: int, where: Any) -> State:
    if not _may_add(state, member, round_index, attempt) or member in dict(state.added):
        return state
    return state._replace(added=_with(state.added, member, where))


def _has(state: State, member: Member, round_index: int, attempt: int) -> State:
    if not _may_add(state, member, round_index, attempt):
        return state
    return state._replace(has=state.has | {member})


def _may_add(state: State, member: Member, round_index: int, attempt: int) -> bool:
    is_of_now = (round_index, attempt) == (state.round_index, state.attempt)
    return is_of_now and state.is_adding and member in state.holders


def _summed(state: State, member: Member, round_index: int, where: Any) -> State:
    if (member, round_index) != (state.adder, state.view.round_index):
        return state
    return state._replace(summed=where)


def _donated(state: State, member: Member, round_index: int, where: Any) -> State:
    if (member, round_index) != (state.donor, state.round_index) or state.handed is not None:
        return state
    return state._replace(handed=where)


def _holds(state: State, member: Member, round_index: int) -> State:
    if member not in state.joining or round_index != state.round_index:
        return state
    return state._replace(holding=state.holding | {member})


def _lacks(state: State, member: Member, round_index: int) -> State:
    if member not in state.joining or round_index != state.round_index:
        return state
    return state._replace(lacking=state.lacking | {member})


def _ends(state: State, member: Member) -> State:
    return state._replace(ending=state.ending | ({member} & {*state.holders}))


def _finished(state: State, member: Member) -> State:
    return state._replace(is_over=True) if member == state.leader else state


def _asked_to_leave(state: State, member: Member) -> State:
    return state._replace(leaving=state.leaving | ({member} & set(state.present)))


def _gone(state: State, member: Member, how: str) -> State:
    if member in state.asking:
        return state._replace(asking=_without(state.asking, member))
    if member not in state.present:
        return state
    state = state._replace(
        members=_without(state.members, member),
        joining=_without(state.joining, member),
        holding=state.holding - {member},
        leaving=state.leaving - {member},
        ending=state.ending - {member},
        gone=(*state.gone, (member, how)),
    )
    if member == state.donor:  # what it handed dies with it; the next view names another
        state = state._replace(donor=None, handed=None)
    if state.outlives:  # what it has told counts
        gone = state.summed is None and member == state.adder
        return state._replace(adder=None) if gone else state
    ready = tuple(each for each in state.ready if each[0] != member)
    if not state.adding:
        return state._replace(ready=ready)
    if member not in state.adding or state.has.issuperset(state.present):
        return state  # all that live have a sum with its contribution
    return state._replace(
        ready=ready,
        adding=_without(state.adding, member),
        attempt=state.attempt + 1,
        added=(),
        has=frozenset(),
    )


def _without(members: tuple[Member, ...], member: Member) -> tuple[Member, ...]:
    return tuple(m for m in members if m != member)


def _with(told: ByMember, member: Member, what: Any) -> ByMember:
    return tuple(sorted((*told, (member, what)), key=lambda each: each[0]))


def _decided(state: State) -> State:
    """Goes on where no member is waited for."""
    if state.is_over or not state.holders:
        return state
    if state.outlives:
        comes = set() if state.donor is None else set(state.joining) - state.holding
        if comes or set(state.members) - dict(state.ready).keys():
            return state
        return _with_view(state._replace(adding=tuple(m for m, _ in state.ready)))
    if not state.adding and state.members and len(state.ready) == len(state.members):
        state = state._replace(adding=tuple(sorted(state.members)))
    if state.is_adding and state.has.issuperset(needed(state)):
        return _with_view(state)
    return state


def needed(state: State) -> tuple[Member, ...]:
    """The members that must have the sum before the round is decided: they have the state, or are
    about to have it. Where its donor is gone, or there is no sum, a newcomer gets the state of the
    next round."""
    if state.adding and state.donor is not None:
        return state.present
    return state.holders


def waited_for(state: State) -> tuple[Member, ...]:
    """The members that others wait for. Where all compute, there are none."""
    if state.is_over:
        return ()
    if not state.holders:
        return tuple(m for m in state.joining if m not in state.lacking)
    if state.adder is not None and state.summed is None:
        return (state.adder,)
    is_there = state.handed is not None
    if state.is_adding:
        due = {*state.adding} - dict(state.added).keys() if state.added else set()
        if not due:
            left = tuple(m for m in needed(state) if m not in state.has)
            due = {m for m in left if m in state.holders or is_there}
    elif state.ready or state.holding:
        due = {*state.members} - dict(state.ready).keys()
        if state.outlives and not due and is_there:
            due = {*state.joining} - state.holding
    else:
        due = set()
    due -= state.ending
    if state.donor is not None and not is_there and set(state.joining) - state.holding:
        due.add(state.donor)
    if state.leader is not None and state.ending:
        due.add(state.leader)
    return tuple(sorted(due))


def _with_view(state: State) -> State:
    """The round is decided."""
    holders = state.holders
    stay = tuple(m for m in holders if m not in state.leaving) or holders[:1]
    coming = tuple(m for m in state.joining if m not in state.holding)
    taken = {m.rank for m in (*stay, *coming)}
    new = tuple(m for m in state.asking if m.rank not in taken)
    joined = tuple((m, JOINED) for m in stay if m in state.joining)
    left = tuple((m, "left") for m in holders if m not in stay)
    told, lying, costs = _of_sum(state)
    adders = [each for each in zip(costs, state.adding, strict=True) if each[1] in stay]
    view = MembershipView(
        state.round_index, state.adding, told, stay, (*coming, *new), (*state.gone, *left, *joined)
    )
    return State(
        view,
        stay,
        view.joining,
        donor=stay[0] if view.joining else None,
        asking=tuple(m for m in state.asking if m not in new),
        leaving=state.leaving & {*stay, *coming},
        newest=state.newest,
        outlives=state.outlives,
        lying=lying if state.outlives else (),
        adder=min(adders)[1] if adders and None not in costs else None,
    )


def order(state: State, member: Member, round_index: int | None) -> Order:
    """What a member is to do.

    Args:
        state: of the referee.
        member: that asks.
        round_index: of the round in which it is; None: it has no state yet, or waits for the end.
    """
    if member in state.holders and round_index == state.view.round_index:
        return _of_view(state, member)
    if member not in (*state.present, *state.asking):
        return Order("leave")
    if state.is_over:
        return Order("over")
    if state.is_lost:
        return Order("ended")
    if member in state.holders and round_index is None:
        waits = member in state.ending and member != state.leader
        return Order("wait" if waits else "held")
    if not state.holders:
        lacks = member in {*state.joining} - state.lacking
        return Order("lack", state.round_index) if lacks else Order("wait")
    if member in state.joining and member not in state.holding:
        is_there = state.handed is not None
        return Order("receive", (state.round_index, state.handed)) if is_there else Order("wait")
    if member in state.asking:
        return Order("wait")
    if member == state.donor and state.handed is None and set(state.joining) - state.holding:
        return Order("donate")
    if state.is_adding and member not in state.has:
        return _to_add(state, member)
    is_due = member in state.members and member not in dict(state.ready)
    return Order("compute" if is_due else "wait")


def _of_view(state: State, member: Member) -> Order:
    if not state.outlives:
        return Order("apply", state.view)
    if state.adder in (None, member):
        return Order("add", (state.view, state.lying, state.adder == member))
    return Order("wait") if state.summed is None else Order("read", (state.view, state.summed))


def _to_add(state: State, member: Member) -> Order:
    added = dict(state.added)
    if member not in added:
        return Order("take", (state.attempt, state.adding, *_of_sum(state)[:2]))
    slices = tuple(added[m] for m in state.adding if m in added)
    if len(slices) < len(state.adding):
        return Order("wait")
    return Order("gather", (state.attempt, state.adding, slices))


def _of_sum(state: State) -> tuple[tuple[Any, ...], ...]:
    """What the members of the sum told, where their contributions lie, what their time costs."""
    ready = dict(state.ready)
    told = tuple(ready[m] for m in state.adding)
    return tuple(zip(*told, strict=True)) or ((), (), ())
