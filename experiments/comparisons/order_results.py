"""The results of `compare_orders`: reading them, and figures of them; it needs no JAX.

Of several seeds the *spread* of a figure is half the distance from the least to the greatest. One
figure is below another *by more than the spread* where the means differ by more than the larger
of both spreads, and *within the spread* where they do not.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from experiments.comparisons.order_tasks import BASELINE, Task

EPOCH_SECS = "epoch_secs.json"
Record = dict[str, Any]
Records = dict[tuple[str, float, int], Record]  # by order, learning rate, seed
Rates = dict[str, float]  # of each arm


def read_records(directory: pathlib.Path, task: Task) -> Records:
    """The results of a task that are there.

    Raises:
        ValueError: one of them is of other settings.
    """
    records: Records = {}
    for path in sorted((directory / "runs" / task.name).glob("*.json")):
        record = json.loads(path.read_text())
        if record["settings"] != task.settings():
            raise ValueError(
                f"{path} is the result of other settings than {task.name} has now; delete the "
                "directory to have its runs done anew, or put the settings back"
            )
        records[record["method"], record["learning_rate"], record["seed"]] = record
    return records


def losses_of(record: Record) -> list[float]:
    """Training loss after each epoch; infinite from where the run diverged."""
    losses = [math.inf if loss is None else loss for loss in record["train_losses"]]
    return losses + [math.inf] * (record["settings"]["epochs"] - len(losses))


def best(record: Record) -> float:
    """The lowest training loss after an epoch."""
    return min(losses_of(record))


def final(record: Record) -> float:
    """The training loss after the last epoch."""
    return losses_of(record)[-1]


def average(record: Record) -> float:
    """The mean over all epochs of the training loss: how fast it went down, in one figure."""
    return statistics.fmean(losses_of(record))


def tuned_rate(task: Task, records: Records, method: str) -> float | None:
    """The rate with the lowest training loss, first seed; None while runs are missing."""
    runs = {rate: records.get((method, rate, task.seeds[0])) for rate in task.learning_rates}
    scores = {rate: best(record) for rate, record in runs.items() if record is not None}
    return min(scores, key=scores.__getitem__) if len(scores) == len(runs) else None


class Stat(NamedTuple):
    """Mean and spread over the seeds."""

    mean: float
    spread: float
    num_seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Stat":
        values = list(values)
        if not values or not all(map(math.isfinite, values)):
            return cls(math.inf if values else math.nan, 0.0, len(values))
        return cls(statistics.mean(values), (max(values) - min(values)) / 2, len(values))

    def __format__(self, spec: str) -> str:
        if not math.isfinite(self.mean):
            return "diverged" if self.num_seeds else "not there"
        return f"{self.mean:{spec}}" + (f" ± {self.spread:{spec}}" if self.num_seeds > 1 else "")


def below(one: Stat, other: Stat) -> bool:
    """Whether `one` is below `other` by more than the spread."""
    return one.mean < other.mean - max(one.spread, other.spread)


def verdict(one: Stat, other: Stat) -> str:
    """How `one` compares with `other`, in words."""
    if min(one.num_seeds, other.num_seeds) == 0:
        return "not known"
    if min(one.num_seeds, other.num_seeds) == 1:
        return ("lower" if one.mean < other.mean else "higher") + " (one seed: no spread)"
    if below(one, other):
        return "lower by more than the spread"
    return "higher by more than the spread" if below(other, one) else "within the spread"


def epochs_to(losses: Sequence[float], target: float) -> float:
    """Epochs until the loss is at most the target; infinite if never."""
    return next((e for e, loss in enumerate(losses, 1) if loss <= target), math.inf)


class Arms:
    """The runs of a task at one learning rate for each arm, and figures of them.

    Args:
        task: whose.
        records: of it.
        rates: of each arm; arms that are not in it are left out.
        secs: measured seconds of an epoch of each arm; empty where they were not measured.
    """

    def __init__(self, task: Task, records: Records, rates: Rates, secs: dict[str, float]) -> None:
        self.task, self.rates, self.secs = task, rates, secs
        self.runs = {
            method: {
                seed: records[method, rate, seed]
                for seed in task.seeds
                if (method, rate, seed) in records
            }
            for method, rate in rates.items()
        }

    def stat(self, method: str, figure: Callable[[Record], float]) -> Stat:
        return Stat.of(figure(record) for record in self.runs.get(method, {}).values())

    def paired(self, method: str, figure: Callable[[Record], float]) -> Stat:
        """The figure over that of D-RR with the same seed, which begins with the same model."""
        baseline = self.runs.get(BASELINE, {})
        runs = self.runs.get(method, {}).items()
        return Stat.of(figure(run) / figure(baseline[s]) for s, run in runs if s in baseline)

    def ratios(self, method: str, *, of_time: bool = False) -> list[float]:
        """Epochs (or time) to the lowest training loss of D-RR, over those of D-RR itself.

        For each seed, which is compared with itself; infinite where it does not reach it.
        """
        baseline, ratios = self.runs.get(BASELINE, {}), []
        if of_time and not {method, BASELINE} <= set(self.secs):
            return []
        factor = self.secs[method] / self.secs[BASELINE] if of_time else 1.0
        for seed, record in self.runs.get(method, {}).items():
            if seed in baseline:
                target = best(baseline[seed])
                own = epochs_to(losses_of(record), target)
                ratios.append(factor * own / epochs_to(losses_of(baseline[seed]), target))
        return ratios
