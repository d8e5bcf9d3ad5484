"""The list of mistakes that `experiments.drills.mutants` makes, and where each of them is.

A line of `mutants.jsonl` is a mutant: lines of a file, and what stands there instead. It is found
by its text, however far that is indented, so that it is found where code has moved. Where the code
has changed, the line says what the same mistake is now, and has the digest of the one before.
Lines with `left_out` were drawn and not taken, for the reason given.
"""

import hashlib
import json
import pathlib
from typing import NamedTuple

LIST = pathlib.Path(__file__).with_name("mutants.jsonl")


class Mutant(NamedTuple):
    """A mistake: lines of a file, and what stands there instead."""

    name: str
    """`ROOM/NUMBER`; the room's tests have to find it."""
    file: str
    kind: str
    old: str
    new: str
    earlier: tuple[str, ...] = ()  # digests of the same mistake in earlier code

    @property
    def room(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.old}\n---\n{self.new}".encode()).hexdigest()[:12]


def read(path: pathlib.Path = LIST) -> list[Mutant]:
    """The mutants of a list, without those that were left out."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [Mutant(**record) for record in records if "left_out" not in record]


class NotFoundError(ValueError):
    """A mutant's lines are in no one place."""


def places(text: str, old: str) -> list[int]:
    """The lines at which a snippet begins in a text; how far lines are indented does not matter."""
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line.strip() for line in old.splitlines()]
    starts = range(len(lines) - len(wanted) + 1)
    return [start for start in starts if lines[start : start + len(wanted)] == wanted]


def mutated(text: str, mutant: Mutant) -> str:
    """The text with the mistake in it, at the one place where its lines are."""
    (start,) = places(text, mutant.old)
    lines, old = text.splitlines(), mutant.old.splitlines()
    deeper = _indent(lines[start]) - _indent(old[0])
    new = [_shifted(line, deeper) for line in mutant.new.splitlines()]
    lines[start : start + len(old)] = new
    return "\n".join(lines) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _shifted(line: str, deeper: int) -> str:
    return " " * deeper + line if deeper >= 0 else line[-deeper:]


def locate(root: pathlib.Path, mutant: Mutant) -> str:
    """The file that has the mutant's lines once: its own, or else the only one in hetjax/.

    Raises:
        NotFoundError: no file has them, or there are several places; says which.
    """
    own = root / mutant.file
    if own.exists() and len(places(own.read_text(), mutant.old)) == 1:
        return mutant.file
    found = [
        f"{path.relative_to(root).as_posix()}:{start + 1}"
        for path in sorted((root / "hetjax").rglob("*.py"))
        for start in places(path.read_text(), mutant.old)
    ]
    if len(found) == 1:
        return found[0].rsplit(":", 1)[0]
    where = f"in {len(found)} places ({', '.join(found)})" if found else "gone"
    raise NotFoundError(f"its lines are {where}; write in {LIST.name} what they are now")
