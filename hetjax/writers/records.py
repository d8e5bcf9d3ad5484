"""What is a writer given? The numbers of a round, and at the end what came of the run."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class RunInfo(NamedTuple):
    """The run that a writer writes of."""

    config: Mapping[str, Any]
    """As `config.json`."""
    workdir: pathlib.Path | None = None
    """None: the run keeps nothing."""
    first_step: int = 0
    """Above 0 the run was resumed: this is the first round, or outer step, that it does."""
    sets: Sequence[str] = ()
    """Names of the sets that are evaluated."""
    lead: Any = None
    """Of this process (`checkpoints.generations.Lead`), where the run has a workdir."""

    @property
    def name(self) -> str:
        """Of the run: that of its directory."""
        return "run" if self.workdir is None else self.workdir.name


class Record(NamedTuple):
    """One round, or outer step, on the host."""

    step: int
    """Its number, from 0."""
    scalars: dict[str, float]
    """By the names that trackers have: `train/loss`, `eval/accuracy`, `workers/0/quota`. NaN for
    what is not finite."""
    line: Mapping[str, Any]
    """As `metrics.jsonl`."""
    run: RunInfo


class Ended(NamedTuple):
    """The end of a run."""

    run: RunInfo
    status: str
    """`finished`; `interrupted`, by a signal; `failed`, by an error."""
    summary: Mapping[str, Any]
    """As `summary.json`; empty where the run has none."""
    report: str = ""
    """The page `report.html`; '' where there is none."""


class Writer(Protocol):
    """A tracker: any object with these two functions, which are called in one thread.

    `every_secs`, if it has it, is how often the newest record is written; evaluations always are.
    Without it, or with 0, all records are. What a function raises is told once, and the writer is
    called no more; the run goes on.
    """

    def write(self, record: Record, /) -> None:
        """Takes one record; steps ascend."""

    def close(self, ended: Ended, /) -> None:
        """Takes the end of the run; all is to be on its way then."""


class Misplaced(ValueError):
    """A writer does not know where to write; this ends the run before it begins."""
