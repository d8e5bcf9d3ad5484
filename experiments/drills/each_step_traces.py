"""Do the traces of the drill `each_step` keep to the model, `tests/comm/round_model.py`?

A trace is what one start of a worker noted, in order: (event, round, monotonic seconds, more).
"""

import base64
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax.comm.membership import Member, MembershipView, view_of

STAGES = ("written", "ready", "set", "adopted", "applied", "handing")  # of a round, in order
_AFTER = {  # what may come right before an event, of the same round
    "ready": {"written"},
    "set": {"ready"},
    "adopted": {"ready", "set"},
    "applied": {"adopted"},
    "handing": {"applied"},
}
_ENDS_ROUND = {"applied", "handing", "taken"}


class Event(NamedTuple):
    name: str
    number: int  # of the round
    at: float
    more: dict[str, Any]


Traces = Mapping[int, Sequence[Event]]  # by start


def read(directory: pathlib.Path) -> dict[int, list[Event]]:
    """All traces of a run."""
    traces = {}
    for path in directory.glob("trace.*"):
        lines = path.read_text().split("\n")[:-1]  # the last may be cut
        traces[int(path.suffix[1:])] = [Event(*json.loads(line)) for line in lines]
    return traces


def all_of(traces: Traces, *names: str) -> Iterator[tuple[int, Event]]:
    for start, events in traces.items():
        yield from ((start, event) for event in events if event.name in names)


def decisions(traces: Traces) -> dict[int, set[MembershipView]]:
    """What was decided of each round, as any process has it; one, where all is right."""
    found: dict[int, set[MembershipView]] = {}
    for _, event in all_of(traces, "set", "adopted", "taken"):
        decision = view_of(event.more["decision"])
        found.setdefault(decision.number, set()).add(decision)
    return found


def commits(traces: Traces) -> dict[int, float]:
    """When each round was decided, as far as anybody noted it."""
    found: dict[int, float] = {}
    for _, event in all_of(traces, "set", "adopted"):
        found[event.number] = min(event.at, found.get(event.number, event.at))
    return found


def wrongs(traces: Traces, *, killed: Mapping[int, float], patience: float) -> list[str]:
    """What is wrong in the traces of a run.

    Args:
        traces: of all starts.
        killed: when starts were killed, monotonic seconds.
        patience: the least seconds after which one that lives may be left out.
    """
    stands = decisions(traces)
    found = [f"round {n} has {len(made)} decisions" for n, made in stands.items() if len(made) > 1]
    one = {number: next(iter(made)) for number, made in stands.items()}
    for start, events in traces.items():
        found += (f"start {start}: {wrong}" for wrong in _wrong_order(events))
    found += _wrong_sums(traces, one)
    found += _wrong_members(traces, one)
    found += _left_out_early(traces, one, killed, patience)
    return found


def _wrong_order(events: Sequence[Event]) -> Iterator[str]:
    """A process does the steps of its rounds one after the other, as the model has them."""
    steps = [event for event in events if event.name in (*STAGES, "taken")]
    for before, event in itertools.pairwise(steps):
        if event.name == "written":
            is_next = before.name in _ENDS_ROUND and event.number == before.number + 1
        else:
            is_next = event.number == before.number and before.name in _AFTER.get(event.name, ())
        if not is_next:
            yield f"{event.name} {event.number} after {before.name} {before.number}"
    if steps and steps[0].name not in ("written", "taken"):
        yield f"begins with {steps[0].name} {steps[0].number}"


def _wrong_sums(traces: Traces, one: Mapping[int, MembershipView]) -> Iterator[str]:
    """Whoever applied a round applied what was decided of it, each contribution once."""
    written = {(s, e.number): _numbers(e) for s, e in all_of(traces, "written")}
    for start, event in all_of(traces, "applied"):
        number, told = event.number, f"start {start} applied round {event.number}"
        applied = tuple(Member(*each) for each in event.more["sum"])
        if number not in one:
            yield f"{told}, of which nothing was decided"
            continue
        if applied != one[number].sum:
            yield f"{told} of {applied}, decided was {one[number].sum}"
            continue
        if len({member.rank for member in applied}) < len(applied):
            yield f"{told}, in which a seat is twice"
        rows = [written.get((member.incarnation, number)) for member in applied]
        if any(row is None for row in rows):
            yield f"{told} with a contribution that nobody wrote"
            continue
        total = _numbers(event)
        expected = sum((row[: total.size] for row in rows[1:]), rows[0][: total.size].copy())
        if expected.tobytes() != total.tobytes():
            yield f"{told}: not the sum of the contributions"


def _numbers(event: Event) -> Any:
    return np.frombuffer(base64.b64decode(event.more["content"]))


def _wrong_members(traces: Traces, one: Mapping[int, MembershipView]) -> Iterator[str]:
    """Members alone are in a round; who is in its sum was ready; newcomers were handed a state."""
    ready = {(start, event.number) for start, event in all_of(traces, "ready")}
    handed = {(start, event.number) for start, event in all_of(traces, "handing")}
    for start, event in all_of(traces, "written", "taken"):
        number = event.number if event.name == "taken" else event.number - 1
        if number not in one:
            if number >= 0:
                yield f"start {start} is in round {number + 1}; of {number} nothing was decided"
            continue
        decision = one[number]
        if start not in {member.incarnation for member in decision.members}:
            yield f"start {start} is in round {number + 1}, and no member of it"
        if event.name == "taken" and (decision.donor, number) not in handed:
            yield f"start {start} took the state of round {number} that nobody handed on"
        if event.name == "taken" and start not in {
            member.incarnation for member in decision.joining
        }:
            yield f"start {start} took the state of round {number}, and is not new"
    for number, decision in one.items():
        for member in decision.sum:
            if (member.incarnation, number) not in ready:
                yield f"round {number} counts start {member.incarnation}, which was not ready"


def _left_out_early(
    traces: Traces, one: Mapping[int, MembershipView], killed: Mapping[int, float], patience: float
) -> Iterator[str]:
    """Nobody who lives is left out before the others have been patient."""
    at = commits(traces)
    ended = dict(killed) | {start: event.at for start, event in all_of(traces, "ends")}
    for number, decision in one.items():
        if number - 1 not in one or not {number, number - 1} <= at.keys():
            continue
        if at[number] - at[number - 1] >= patience:
            continue
        for member in set(one[number - 1].members) - set(decision.members):
            if ended.get(member.incarnation, np.inf) > at[number]:
                yield f"start {member.incarnation} lives and is left out of round {number} early"
