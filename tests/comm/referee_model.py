"""Every interleaving of calls, deaths, lateness and sleep, on the referee that runs.

    python -m tests.comm.referee_model

prints how many states there are within the bounds of the tests, and within larger ones. `check`
goes through all states of a world (`referee_world`) that its moves (`referee_moves`) lead to;
`trail` shows the steps to a wrong one. In each state this holds:

- Each round is decided once. A process applies a sum that it holds, and no other. So all processes
  with the state of a round have the same, those that were left out too, and write the same
  checkpoint.
- Each unit of work is counted once, or waits at the head of the order.
- What is readable on the disk is a state of the newest run, whichever sleeper goes on to write.
- The run can come to its end without any luck: the host sees the dead, late processes sleep for
  ever. While a member has the state, the run ends by `over`, and is written.
- No process is told that the state is lost while a living one has it, or has what makes it.
- There is a leader; members that came earlier lead before those that came later.
- Each member that `waited_for` names can go on. Where one waits that has the state or is to get it,
  another is named. So a host that counts those as late is not held up by a process that is stopped.
- A newcomer gets the state in a round in which no member is lost. No process is left out but those
  that were late or were asked to leave, the latter after their round.

What is not told apart, and why that hides nothing:

- What a process does on its own (compute, add, apply, load) is part of the step before it. It reads
  and writes nothing that others see. So it commutes with all that others do, and with its own being
  late. Its own death erases it, done or not.
- A slice is put up in the step in which the last contribution comes. A read between the two finds
  the slice of an older attempt. That attempt is over, as no member knows the new slice yet.
- What is read where contributions outlive their members is read at once. What is written meanwhile
  makes it a sum of no round, as what was written before does; the process hears that it is out.
- Slices are read one by one, in the order of ranks. Contributions stay the same for a round, and
  are read at once.
- An order is followed when it is heard, but for the part that others can see. An answer that comes
  late is a question that is asked late, or a transfer or an event that stays in hand. What is put
  away with a round could lie there longer: then a transfer ends well that fails here. A transfer
  that fails is begun anew, and the referee hears nothing of a round that is over.
- A newcomer is first seen when it asks to join: before, no other process knows of it.
- A late process does not die. Its death before transfers from it have ended is as a death that the
  host has seen; a later one is as a sleep for ever. A process that has ended does not die either.
- Units are numbers, and the state of a run is its ledger: equal parameters follow from equal sums
  in an equal order. Quotas are those of one plan.
- Checkpoints are neither damaged nor removed. What an older run could go on to write without the
  newer one is on the disk as soon as that registers, since it is never to be read.
- States are known by hashes of 64 bits: two of a million are equal by a chance of 1e-7.

A stop is a step that comes late, or a lateness; a stopped process wakes with what it has in its
hands. Memory that is used again is read without a look at any stamp: only a process
that was left out, or one whose attempt is over, can meet it. What such a one tells does not count.
An adder is a member that adds its slice for all.
"""

import array
import collections
import itertools
import time
from collections.abc import Iterator

import numpy as np

from hetjax.comm.referee import Member
from tests.comm import referee_moves, referee_world
from tests.comm.referee_world import Faults, World, WrongError

# Workers, rounds, faults, whether a checkpoint is written each round, how sums are made.
SMALL = (
    (2, 2, Faults(deaths=1, lost=1, joins=1), False),
    (2, 2, Faults(late=1, joins=1), True),
    (2, 3, Faults(deaths=1, joins=1), False),
    (2, 2, Faults(deaths=1, joins=1, leaves=1), False),
    (2, 2, Faults(late=1, repeats=1), True),
    (1, 1, Faults(deaths=2, joins=2), False),
    (3, 2, Faults(deaths=2), False),
    (3, 1, Faults(deaths=1, joins=1), False),
    (4, 1, Faults(deaths=1), True),
    (2, 2, Faults(deaths=1, joins=1), False, "slices"),
    (2, 2, Faults(deaths=1, lost=1), False, "slices"),
    (2, 2, Faults(late=1, joins=1), True, "slices"),
    (2, 2, Faults(late=1, repeats=1), True, "slices"),
    (1, 1, Faults(deaths=2, joins=2), False, "slices"),
    (3, 2, Faults(deaths=2), False, "slices"),
    (3, 1, Faults(deaths=1, joins=1), False, "slices"),
    *(
        (*bounds, sums)
        for sums in ("each", "one")
        for bounds in (
            (2, 3, Faults(deaths=1, joins=1), False),
            (2, 3, Faults(late=1, joins=1), False),
            (2, 2, Faults(late=1, joins=1), True),
            (2, 2, Faults(deaths=1, lost=1), False),
            (2, 2, Faults(deaths=1, joins=1, leaves=1), False),
            (2, 2, Faults(late=1, repeats=1), True),
            (1, 1, Faults(deaths=2, joins=2), False),
            (3, 2, Faults(deaths=2), False),
            (3, 1, Faults(deaths=1, joins=1), False),
            (4, 2, Faults(deaths=1), False),
        )
    ),
)
LARGE = (
    (1, 2, Faults(deaths=2, lost=1, joins=2), False),
    (3, 2, Faults(deaths=1, late=1), True),
    (2, 2, Faults(deaths=1, late=1, joins=1), True),
    (2, 1, Faults(deaths=1, late=1, lost=1, joins=1), False),
    (2, 2, Faults(deaths=1, late=1, repeats=2), True),
    (3, 2, Faults(late=2), True),
    (4, 2, Faults(late=1), True),
    (4, 1, Faults(deaths=1, joins=1), False),
    (4, 1, Faults(deaths=2), False),
    (2, 2, Faults(deaths=1, lost=1, joins=1), False, "slices"),
    (2, 2, Faults(deaths=1, joins=1, leaves=1), False, "slices"),
    (3, 2, Faults(deaths=1, lost=1), False, "slices"),
    (3, 2, Faults(deaths=1, joins=1), False, "slices"),
    (3, 2, Faults(late=1), True, "slices"),
    (3, 1, Faults(deaths=1, late=1), False, "slices"),
    (4, 1, Faults(deaths=1), True, "slices"),
    *(
        (*bounds, sums)
        for sums in ("each", "one")
        for bounds in (
            (2, 4, Faults(late=1, joins=1), False),
            (3, 3, Faults(late=1), False),
            (3, 3, Faults(deaths=1, lost=1), False),
            (4, 2, Faults(late=1), True),
        )
    ),
)
HUGE = (  # a quarter of a minute each, or more: no test has these
    (2, 2, Faults(deaths=2, joins=2), False),
    (2, 3, Faults(lost=1, joins=2), False),
    (3, 2, Faults(deaths=1, lost=1, joins=1), False),
    (3, 2, Faults(deaths=2, joins=1), False),
    (4, 2, Faults(deaths=1, lost=1), False),
    (2, 2, Faults(deaths=2, joins=2), False, "slices"),
    *(
        (*bounds, sums)
        for sums in ("each", "one")
        for bounds in (
            (2, 3, Faults(deaths=1, late=1, joins=1), False),
            (2, 2, Faults(deaths=2, joins=2), False),
            (3, 2, Faults(deaths=1, late=1, joins=1), False),
        )
    ),
)


def is_end(world: World) -> bool:
    """Whether all has come to its end that may not sleep for ever."""
    return not world.unseen and all(p.end or p.out == "late" for _, p in world.processes)


def judge(world: World, can: set[Member | None]) -> None:
    """Raises what is wrong in a state of the world, where some processes `can` go on."""
    state = world.referee
    if state.is_lost and (able := [m for m, p in world.processes if world.goes_on(m, p)]):
        raise WrongError(f"the run counts as lost, though {able} can go on: {state}")
    there = {m for m, p in world.processes if p.out != "late"}
    if state.holders and state.leader not in there.union(world.unseen):
        raise WrongError(f"no process leads: {state}")
    blamed = {m for m in referee_world.referee_lib.waited_for(state) if m not in world.unseen}
    able = {*state.holders, *(state.joining if state.donor is not None else ())}
    waits = {m for m, p in world.processes if m in able - can and not p.end}
    if blamed - can:
        raise WrongError(f"others wait for {blamed - can}, which cannot go on: {state}")
    if waits and not blamed and not world.unseen:
        raise WrongError(f"{waits} wait, and no other is waited for: {state}")
    if is_end(world) and state.holders and not state.is_over:
        raise WrongError(f"no process goes on: {state}")


def explored(first: World, came: array.array) -> Iterator[tuple[World, list[int]]]:
    """All states by their numbers, and for each which others follow without any luck.

    Args:
        first: number 0.
        came: is filled: for each number, that of the state before it.
    """
    seen, left = {hash(first): 0}, collections.deque([first])
    came.append(0)
    for number in itertools.count():
        if not left:
            return
        world, after = left.popleft(), []
        try:
            can = set()
            for member, is_sure, each in referee_moves.moves(world):
                can.add(member)
                if (key := hash(each)) not in seen:
                    seen[key] = len(seen)
                    left.append(each)
                    came.append(number)
                if is_sure:
                    after.append(seen[key])
            judge(world, can)
        except WrongError as error:
            error.found = number, world, came
            raise
        yield world, after


def check(first: World) -> tuple[int, int]:
    """Goes through all states; how many there are, and how many ends.

    Raises:
        WrongError: one of them is wrong.
    """
    ends, sources, targets, came = (array.array("i") for _ in range(4))
    for number, (world, after) in enumerate(explored(first, came)):
        if is_end(world):
            ends.append(number)
        sources.extend([number] * len(after))
        targets.extend(after)
    reaches = np.zeros(len(came), bool)
    reaches[ends] = True
    source, target = np.asarray(sources), np.asarray(targets)
    while (new := reaches[target] & ~reaches[source]).any():
        reaches[source[new]] = True
    if not reaches.all():
        number, error = int(np.argmin(reaches)), WrongError("the run does not come to an end")
        stuck, _ = next(itertools.islice(explored(first, array.array("i")), number, None))
        error.found = number, stuck, came
        raise error
    return len(came), len(ends)


def trail(first: World) -> list[str]:
    """The steps that lead to what `check` finds wrong, and what that is; none where nothing is."""
    try:
        check(first)
    except WrongError as error:
        (number, last, came), words = error.found, str(error)
    else:
        return []
    path = [number]
    while path[-1]:
        path.append(came[path[-1]])
    before = enumerate(itertools.islice(explored(first, array.array("i")), number))
    worlds = [*(world for k, (world, _) in before if k in path), last]
    return [*(f"{_changed(*pair)}" for pair in itertools.pairwise(worlds)), words]


def _changed(before: tuple, after: tuple) -> dict[str, object]:
    """The fields that differ, down to those of a process."""
    found: dict[str, object] = {}
    for name, old, new in zip(after._fields, before, after, strict=True):
        if name == "processes":
            known = dict(old)
            for member, process in new:
                if (was := known.pop(member, type(process)())) != process:
                    found[f"{member.rank}.{member.incarnation}"] = _changed(was, process)
            found |= {f"{m.rank}.{m.incarnation}": "dies" for m in known}
        elif old != new:
            found[name] = _changed(old, new) if name == "referee" else new
    return found


def main() -> None:
    names = ("workers", "rounds", *Faults._fields, "checkpoints", "sums", "states", "seconds")
    print(*names, sep=" | ")
    print(*("---" for _ in names), sep=" | ")
    for workers, rounds, faults, saves, *sums in SMALL + LARGE + HUGE:
        began, how = time.process_time(), (*sums, "whole")[0]
        first = referee_world.begun(workers, rounds=rounds, faults=faults, saves=saves, sums=how)
        states, _ = check(first)
        secs = f"{time.process_time() - began:.1f}"
        when = "each round" if saves else "at the end"
        print(workers, rounds, *faults, when, how, f"{states:,}", secs, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
