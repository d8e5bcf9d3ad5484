"""Results as JSON lines: a file for each task, a line for each run."""

import math
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments.comparisons import kept

Record = dict[str, Any]


class Key(NamedTuple):
    """What sets a run of a task apart."""

    arm: str
    seed: int


def read(directory: pathlib.Path, task: str) -> dict[Key, Record]:
    """The runs of a task that are there."""
    records = kept.read(directory / "runs" / f"{task}.jsonl")
    return {Key(record["arm"], record["seed"]): record for record in records}


def write(directory: pathlib.Path, task: str, records: Iterable[Record]) -> None:
    """Adds runs of a task."""
    for record in records:
        kept.append(directory / "runs" / f"{task}.jsonl", record)


def short(value: Any) -> Any:
    """Numbers to five digits, in lists and dicts too; None for what is not finite."""
    if isinstance(value, dict):
        return {name: short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [short(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


class Stat(NamedTuple):
    """Of the seeds."""

    mean: float
    deviation: float  # of a sample; 0 of a single one

    @classmethod
    def of(cls, values: Iterable[float]) -> "Stat":
        kept = list(values)
        return cls(statistics.mean(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}"
