"""What the workers of an elastic run have decided, and who wrote its checkpoints."""

import collections
import contextlib
import json
import pathlib
from typing import Any, NamedTuple

from hetjax.checkpoints import files
from hetjax.comm import elastic
from hetjax.rounds import resume

_DECIDED = "decided"  # a file: a line for each view that a process has adopted


class Decision(NamedTuple):
    """Of a round, as a process has it. A member is (rank, incarnation)."""

    run: str
    round_index: int
    sum: tuple[tuple[int, int], ...]
    members: tuple[tuple[int, int], ...]  # of the next round; the first leads
    gone: tuple[tuple[int, int], ...]


def record(directory: pathlib.Path) -> None:
    """Has this process write what it takes part in deciding."""
    allgather = elastic.Elastic.allgather

    def recorded(self: elastic.Elastic, messages: Any) -> Any:
        found = allgather(self, messages)
        if (view := self.roster.last) is not None and not self.is_warm_up:
            gone = [member for member, how in view.changes if how != "joined"]
            with (directory / _DECIDED).open("a") as file:
                line = Decision(self.run_id, view.round_index, view.sum, view.members, tuple(gone))
                print(json.dumps(line), file=file)
        return found

    elastic.Elastic.allgather = recorded  # type: ignore[method-assign]


def decisions(directory: pathlib.Path) -> list[Decision]:
    found = []
    for line in (directory / _DECIDED).read_text().splitlines():
        run, number, *members = json.loads(line)
        found.append(Decision(run, number, *(tuple(map(tuple, each)) for each in members)))
    return found


def read_twice(directory: pathlib.Path) -> tuple[int, int]:
    """Rounds that two processes have decided otherwise, and rounds that count or name a member
    that had gone before."""
    by_round = collections.defaultdict(set)
    for each in decisions(directory):
        by_round[each.run, each.round_index].add(each)
    gone, of_gone = collections.defaultdict[str, set](set), 0
    for (run, _), found in sorted(by_round.items(), key=lambda item: item[0]):
        for each in found:
            of_gone += not gone[run].isdisjoint({*each.sum, *each.members})
            gone[run].update(each.gone)
    return sum(len(found) > 1 for found in by_round.values()), of_gone


def partial(directory: pathlib.Path) -> bool:
    """Whether a checkpoint is being written."""
    checkpoints = directory / "run" / resume.DIRECTORY
    with contextlib.suppress(OSError):
        return any(any(path.iterdir()) for path in checkpoints.glob(".partial-n*"))
    return False


def writers(directory: pathlib.Path) -> dict[int, int]:
    """The incarnation that wrote each checkpoint that is there, by step."""
    found = {}
    for path in (directory / "run" / resume.DIRECTORY).glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it was just removed
            about = json.loads((path / files.ABOUT).read_text())["about"]
            found[int(path.name)] = about["written_by"]["incarnation"]
    return found


def foreign(directory: pathlib.Path, written: dict[int, int]) -> int:
    """How many of these checkpoints another process wrote than one that led by then."""
    leaders = collections.defaultdict(set)
    for each in decisions(directory):
        leaders[each.round_index + 1].add(each.members[0][1])
    return sum(step in leaders and by not in leaders[step] for step, by in written.items())
