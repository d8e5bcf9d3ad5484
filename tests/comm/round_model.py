"""A round of workers that come and go, as a model: one decision, set once, then one adds for all.

Workers have runtimes of their own. They share memory, which outlives whoever wrote it, and a board
on which a key is set once. A worker of round r

1. `write`: stamps half r % 2 of its buffer, 2. `fill`: writes its contribution there and stamps its
   end; it is ready;
3. `wait`: for the decision of r. Who is the first member that is neither dead nor late looks, when
   all members are ready, dead or late, who is ready and who asks to join, 4. `set`: and sets the
   decision, unless another has;
5. `take`: is it the adder, it begins; else it waits for what the adder has added, unless that is
   dead or late: then it adds on its own;
6. `add`: adds all contributions, 7. `look`: looks at all stamps again. Where one was overwritten it
   throws all away and joins anew. Else, as the adder, it stamps the end of what it has added;
8. `apply`: reads the sums where they were added, and applies them. It hands its state on, and goes
   to round r + 1.

What is added lies in half r % 2 of memory of the adder. Since a round whose sum lacks somebody who
was in that of the round before, it lies in new memory: that one may sleep and read the old.

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
    sums: tuple = ()  # what it has added on its own: whose contributions, of which rounds
    reads: str = ""  # where it reads the sums else
    halves: tuple = ((NONE, NONE), (NONE, NONE))  # the stamps before and behind what is written
    ready: int = NONE
    added: tuple = ()  # of each half of its memories: (since, half), stamps, sums
    state: int = FIRST  # the last round in the state that it hands on


class Decision(NamedTuple):
    sum: tuple[str, ...]
    members: tuple[str, ...]  # of the next round
    since: int = 0  # the last round whose sum lacks somebody of the one before


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


def place_of(decision: Decision, number: int) -> tuple[int, int]:
    """Which memory of the adder the sums are added in."""
    return decision.since, number % 2


def there(worker: Worker, place: tuple[int, int]) -> tuple:
    """The stamps and the sums that lie in a place of a worker's memory."""
    return dict(worker.added).get(place, (NONE, NONE, ()))


def writes(worker: Worker, place: tuple[int, int], *what) -> Worker:
    return worker._replace(added=tuple(sorted({**dict(worker.added), place: what}.items())))


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
            now = me._replace(at="take" if is_in else "gone")
            yield world.having(name, now)
            return
        of = {m: world.workers[m] for m in last.members}
        fit = [m for m in last.members if of[m].life == "goes"]
        due = [m for m in fit if of[m].ready < r]
        if fit and fit[0] == name and not due:
            ready = tuple(m for m in last.members if of[m].ready >= r)
            stays = tuple(m for m in ready if of[m].life != "dead")
            asks = tuple(m for m, w in world.workers.items() if w.at == "ask" and w.life == "goes")
            asks = tuple(m for m in asks if all(m not in d.members for d in world.decisions))
            since = last.since if set(last.sum) <= set(ready) else r
            plan = Decision(ready, stays + asks, since)
            yield world.having(name, me._replace(at="set", plan=plan))
    elif me.at == "set":
        now = me._replace(at="wait", plan=())
        yield world.having(name, now, decisions=set_once(world.decisions, r, me.plan))
    elif me.at in ("take", "add", "look", "apply"):
        yield from _sum(world, name, decision)
    elif me.at == "gone":  # it was left out, or read what was overwritten: it joins anew
        yield anew(name, world.having(name, me._replace(life="dead")))


def _sum(world: World, name: str, decision: Decision) -> Iterator[World]:
    """The steps of a worker that is in the sum of its round."""
    me, r = world.workers[name], world.workers[name].round
    adder, place = decision.sum[r % len(decision.sum)], place_of(decision, r)
    if me.at == "take":
        theirs = world.workers[adder]
        if name == adder:
            begun = writes(me, place, r, *there(me, place)[1:])
            yield world.having(name, begun._replace(at="add"))
        elif there(theirs, place)[:2] == (r, r):
            yield world.having(name, me._replace(at="apply", reads=adder))
        elif theirs.life != "goes" or theirs.round > r:
            yield world.having(name, me._replace(at="add"))
    elif me.at == "add":
        found = read(world, decision.sum, r)
        if name == adder:
            me = writes(me, place, *there(me, place)[:2], found)
        else:
            me = me._replace(sums=found)
        yield world.having(name, me._replace(at="look"))
    elif me.at == "look":
        if not is_whole(world, decision, r):
            yield world.having(name, me._replace(at="gone", sums=()))
            return
        if name == adder:
            me = writes(me, place, r, r, there(me, place)[2])._replace(reads=name)
        yield world.having(name, me._replace(at="apply"))
    else:
        found = there(world.workers[me.reads], place)[2] if me.reads else me.sums
        if found != tuple((m, r) for m in decision.sum):
            raise WrongError(f"{name} applies {found} in round {r}, decided was {decision}")
        now = me._replace(at="write", round=r + 1, sums=(), reads="", state=r)
        yield world.having(name, now)


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
