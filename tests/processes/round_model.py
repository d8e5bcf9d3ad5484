"""A round of workers that come and go, as a model: one decision, set once, then everybody adds.

Workers have runtimes of their own. They share memory, which outlives whoever wrote it, and a board
on which a key is set once. A worker of round r

1. `write`: stamps half r % 2 of its buffer, 2. `fill`: writes its contribution there and stamps its
   end; it is ready;
3. `wait`: for the decision of r. Who is the first member that is neither dead nor late looks, when
   all members are ready, dead or late, who is ready and who asks to join, 4. `set`: and sets the
   decision, unless another has;
5. `add`: adds its slice of all contributions in its own memory;
6. `take`: takes the slices of the others, and adds those of the dead and the late;
7. `look`: looks at all stamps again. Where one was overwritten it throws all away and joins anew.
   Else it applies the round, hands its state on, and goes to round r + 1.

Late is who is stopped. `successors` has the next step of each worker, and what the world does:
a kill, a stop, a going on, a start of a killed one.
"""

from collections.abc import Iterator
from typing import NamedTuple

NONE = -9  # a stamp of no round
FIRST = -1  # the round whose decision says who begins


class Worker(NamedTuple):
    """One start of a seat's process, and what it has written: that is read after its death too."""

    life: str = "goes"  # "stopped", "dead"
    at: str = "write"
    round: int = 0
    plan: tuple = ()  # what it is about to set
    sums: tuple = ()  # what it has taken: of each contributor's slice whose contributions are in it
    halves: tuple = ((NONE, NONE), (NONE, NONE))  # the stamps before and behind what is written
    ready: int = NONE
    slice: tuple = (NONE, ())  # of which round, and of whom
    state: int = FIRST  # the last round in the state that it hands on


class Decision(NamedTuple):
    sum: tuple[str, ...]
    members: tuple[str, ...]  # of the next round


class World(NamedTuple):
    workers: dict[str, Worker]
    decisions: tuple[Decision, ...]  # of FIRST, and of each round
    faults: int = 0

    def of(self, number: int) -> Decision | None:
        """The decision of a round."""
        return self.decisions[number + 1] if number + 1 < len(self.decisions) else None

    def having(self, name: str, worker: Worker, **more) -> "World":
        return self._replace(workers={**self.workers, name: worker}, **more)

    @property
    def key(self) -> tuple:
        return tuple(sorted(self.workers.items())), self.decisions, self.faults


class WrongError(AssertionError):
    """What must not happen."""


def begun(seats: int) -> World:
    names = tuple(f"{seat}.0" for seat in range(seats))
    return World(dict.fromkeys(names, Worker()), (Decision((), names),))


def anew(name: str, world: World) -> World:
    """A process that begins to ask, as the next start of its seat."""
    seat, start = name.split(".")
    return world.having(f"{seat}.{int(start) + 1}", Worker(at="ask"))


def read(world: World, names: tuple, number: int) -> tuple:
    """Whose contributions of a round lie in the halves now: (name, round that is there)."""
    found = []
    for name in names:
        before, behind = world.workers[name].halves[number % 2]
        found.append((name, before if before == behind else NONE))
    return tuple(found)


def set_once(decisions: tuple[Decision, ...], number: int, made: Decision) -> tuple[Decision, ...]:
    """The decisions, with that of a round where there is none yet."""
    return decisions if number + 1 < len(decisions) else (*decisions, made)


def is_whole(world: World, decision: Decision, number: int) -> bool:
    """Whether no contribution to a round is overwritten yet."""
    halves = [world.workers[name].halves[number % 2] for name in decision.sum]
    return all(each == (number, number) for each in halves)


def step(world: World, name: str) -> Iterator[World]:
    """What a worker does next; nothing where it waits."""
    me, r = world.workers[name], world.workers[name].round
    decision, last = world.of(r), world.of(r - 1)
    if me.at == "ask":  # it holds no state yet; a decision takes it in
        for number, made in enumerate(world.decisions[1:]):
            if name in made.members and name not in (world.of(number - 1) or made).members:
                yield world.having(name, me._replace(at="state", round=number + 1))
                return
    elif me.at == "state":  # of the round before its first
        if any(w.state >= r - 1 and w.state >= 0 for w in world.workers.values()):
            yield world.having(name, me._replace(at="write", state=r - 1))
    elif me.at == "write":
        halves = list(me.halves)
        halves[r % 2] = (r, halves[r % 2][1])
        yield world.having(name, me._replace(at="fill", halves=tuple(halves)))
    elif me.at == "fill":
        halves = list(me.halves)
        halves[r % 2] = (r, r)
        yield world.having(name, me._replace(at="wait", halves=tuple(halves), ready=r))
    elif me.at == "wait":
        if decision is not None:
            is_in = name in decision.sum and name in decision.members
            now = me._replace(at="add" if is_in else "gone")
            yield world.having(name, now)
            return
        there = {m: world.workers[m] for m in last.members}
        fit = [m for m in last.members if there[m].life == "goes"]
        due = [m for m in fit if there[m].ready < r]
        if fit and fit[0] == name and not due:
            ready = tuple(m for m in last.members if there[m].ready >= r)
            stays = tuple(m for m in ready if there[m].life != "dead")
            asks = tuple(m for m, w in world.workers.items() if w.at == "ask" and w.life == "goes")
            asks = tuple(m for m in asks if all(m not in d.members for d in world.decisions))
            plan = Decision(ready, stays + asks)
            yield world.having(name, me._replace(at="set", plan=plan))
    elif me.at == "set":
        now = me._replace(at="wait", plan=())
        yield world.having(name, now, decisions=set_once(world.decisions, r, me.plan))
    elif me.at == "add":
        own = (r, read(world, decision.sum, r))
        yield world.having(name, me._replace(at="take", slice=own))
    elif me.at == "take":
        other = decision.sum[len(me.sums)]
        theirs = world.workers[other]
        if theirs.slice[0] == r:
            found = theirs.slice[1]
        elif theirs.life != "goes" or theirs.round > r:
            found = read(world, decision.sum, r)
        else:
            return
        sums = (*me.sums, found)
        at = "look" if len(sums) == len(decision.sum) else "take"
        yield world.having(name, me._replace(at=at, sums=sums))
    elif me.at == "look":
        if not is_whole(world, decision, r):
            yield world.having(name, me._replace(at="gone", sums=()))
            return
        right = tuple((m, r) for m in decision.sum)
        if any(found != right for found in me.sums):
            raise WrongError(f"{name} applies {me.sums} in round {r}, decided was {decision}")
        now = me._replace(at="write", round=r + 1, sums=(), state=r)
        yield world.having(name, now)
    elif me.at == "gone":  # it was left out, or read what was overwritten: it joins anew
        yield anew(name, world.having(name, me._replace(life="dead")))


def successors(world: World, *, rounds: int, faults: int) -> Iterator[World]:
    for name, worker in world.workers.items():
        if worker.life == "goes" and worker.round < rounds:
            yield from step(world, name)
        if worker.life == "stopped":
            yield world.having(name, worker._replace(life="goes"))
    if world.faults < faults:
        for name, worker in world.workers.items():
            more = {"faults": world.faults + 1}
            if worker.life == "goes" and worker.round < rounds:
                yield world.having(name, worker._replace(life="stopped"), **more)
            if worker.life != "dead" and worker.round < rounds:
                killed = world.having(name, worker._replace(life="dead"), **more)
                yield killed
                yield anew(name, killed)


def check(*, seats: int, rounds: int, faults: int) -> int:
    """Goes through all states; how many there are.

    Raises:
        WrongError: two survivors applied other sums, or everybody waits for ever.
    """
    first = begun(seats)
    seen, left = {hash(first.key)}, [first]
    while left:
        world = left.pop()
        after = list(successors(world, rounds=rounds, faults=faults))
        moved = [each for each in after if each.faults == world.faults]
        goes = [w for w in world.workers.values() if w.life != "dead"]
        # A run is over, or lost: nobody is left who has its state.
        is_over = all(w.round >= rounds or w.at in ("ask", "state") for w in goes)
        if not moved and not is_over:
            raise WrongError(f"nobody moves: {world}")
        for each in after:
            if (key := hash(each.key)) not in seen:
                seen.add(key)
                left.append(each)
    return len(seen)
