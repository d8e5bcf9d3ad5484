"""The results of the study: reading, tuning, and figures of arms."""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.comparisons import kept
from experiments.comparisons.spreads import Stat
from experiments.orders.arms import BASELINE, LEADER, TUNED
from experiments.orders.tasks import Run, Task

DIRECTORY = pathlib.Path("experiments/results/orders")  # from the root of the repository
RUNS, HERDING, EPOCH_SECS = "runs", "herding", "epoch_secs.json"
MOST_RATES = 7  # of a grid, with those that were added
Record = dict[str, Any]
Records = dict[tuple[str, float, int], Record]  # by arm, learning rate, seed
Rates = dict[str, float]  # of each arm


def path_of(directory: pathlib.Path, kind: str = RUNS) -> pathlib.Path:
    """Of the file with all results of the study; `kind`: of trainings or of herding bounds."""
    return directory / kind / f"{kind}.jsonl"


def read_records(directory: pathlib.Path, task: Task, kind: str = RUNS) -> Records:
    """The results of a task that are there.

    Raises:
        ValueError: one of them is of other settings.
    """
    path, records = path_of(directory, kind), {}
    for record in kept.read(path):
        if record["task"] != task.name:
            continue
        if record["settings"] != task.settings:
            raise ValueError(
                f"{path} has results of other settings than {task.name} has now; delete its "
                "lines to have its runs done anew, or put the settings back"
            )
        run = Run(task, record["arm"], record["learning_rate"], record["seed"])
        records[run] = record
    return {run.key: records[run] for run in sorted(records, key=lambda run: f"{run.name}.json")}


def read_secs(directory: pathlib.Path, task: Task) -> dict[str, list[float]]:
    """The measured seconds of an epoch of each arm; those of other settings are left out."""
    path = directory / RUNS / EPOCH_SECS
    measured = json.loads(path.read_text()) if path.exists() else {}
    found = measured.get(task.name, {})
    return found["secs"] if found.get("settings") == task.settings else {}


def losses_of(record: Record) -> list[float]:
    """Training loss after each epoch; infinite from where the run diverged."""
    losses = [math.inf if loss is None else loss for loss in record["train_losses"]]
    return losses + [math.inf] * (record["epochs"] - len(losses))


def best(record: Record) -> float:
    """The lowest training loss after an epoch."""
    return min(losses_of(record))


def final(record: Record) -> float:
    """The training loss after the last epoch."""
    return losses_of(record)[-1]


def average(record: Record) -> float:
    """The mean over all epochs of the training loss: how fast it went down, in one figure."""
    return statistics.fmean(losses_of(record))


# Tuning


def grid(task: Task, records: Mapping[tuple[str, float, int], Record], arm: str) -> list[float]:
    """The learning rates of an arm: those of the task, and those that its results ask for.

    Where the lowest training loss, first seed, is that of the lowest or the highest rate, one
    more rate follows at that end, as far from it as the next one is.
    """
    rates = sorted(task.learning_rates)
    while task.is_tuned and len(rates) < MOST_RATES:
        scores = _scores(task, records, arm, rates)
        if len(scores) < len(rates):
            break
        chosen = min(scores, key=scores.__getitem__)
        if chosen == rates[0]:
            rates.insert(0, float(f"{rates[0] ** 2 / rates[1]:.4g}"))
        elif chosen == rates[-1]:
            rates.append(float(f"{rates[-1] ** 2 / rates[-2]:.4g}"))
        else:
            break
    return rates


def tuned_rate(task: Task, records: Records, arm: str, *, so_far: bool = False) -> float | None:
    """The rate of an arm: its own, of the lowest training loss with the first seed, or `LEADER`'s.

    None while runs are missing; `so_far`: the best of those that are there.
    """
    arm = arm if arm in TUNED else LEADER
    rates = grid(task, records, arm)
    scores = _scores(task, records, arm, rates)
    if not scores or (len(scores) < len(rates) and not so_far):
        return None
    return min(scores, key=scores.__getitem__)


def tuned_rates(task: Task, records: Records, *, so_far: bool = False) -> Rates:
    """Of the arms whose rates are known."""
    found = {arm: tuned_rate(task, records, arm, so_far=so_far) for arm in task.arms}
    return {arm: rate for arm, rate in found.items() if rate is not None}


def _scores(
    task: Task, records: Mapping[tuple[str, float, int], Record], arm: str, rates: Sequence[float]
) -> dict[float, float]:
    found = {rate: records.get((arm, rate, task.seeds[0])) for rate in rates}
    return {rate: best(record) for rate, record in found.items() if record is not None}


def wanted(task: Task, records: Records) -> list[Run]:
    """The runs that the results so far ask for and that are not among them.

    Tuning first, with the first seed; then the other seeds at the rates that were found, and at
    the rate that is the same for all.
    """
    first, others = task.seeds[0], task.seeds[1:]
    runs = []
    for arm in [arm for arm in task.arms if arm in TUNED]:
        runs += [Run(task, arm, rate, first) for rate in grid(task, records, arm)]
    own = tuned_rates(task, records)
    runs += [Run(task, arm, rate, first) for arm, rate in own.items()]
    runs += [Run(task, arm, rate, seed) for seed in others for arm, rate in own.items()]
    if task.same_rate:
        runs += [Run(task, arm, task.same_rate, s) for s in task.seeds for arm in task.arms]
    return [run for run in dict.fromkeys(runs) if run.key not in records]


# Figures


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

    def __init__(
        self, task: Task, records: Records, rates: Rates, secs: Mapping[str, float]
    ) -> None:
        self.task, self.rates, self.secs, self._records = task, rates, secs, records
        self.lacking = {run.arm for run in wanted(task, records)}
        self.runs = {
            arm: {
                seed: records[arm, rate, seed]
                for seed in task.seeds
                if (arm, rate, seed) in records
            }
            for arm, rate in rates.items()
        }

    def stat(self, arm: str, figure: Callable[[Record], float]) -> Stat:
        return Stat.of(figure(record) for record in self.runs.get(arm, {}).values())

    def paired(self, arm: str, figure: Callable[[Record], float]) -> Stat:
        """The figure over that of D-RR with the same seed, which begins with the same model."""
        baseline = self.runs.get(BASELINE, {})
        runs = self.runs.get(arm, {}).items()
        return Stat.of(figure(run) / figure(baseline[s]) for s, run in runs if s in baseline)

    def cost(self, arm: str) -> float | None:
        """Of an ordered step, over a plain one; None where it was not measured."""
        if not {arm, BASELINE} <= set(self.secs):
            return None
        return self.secs[arm] / self.secs[BASELINE]

    def ratios(self, arm: str, *, of_time: bool = False) -> list[float]:
        """Epochs (or time) to the lowest training loss of D-RR, over those of D-RR itself.

        For each seed, which is compared with itself; infinite where it does not reach it.
        """
        factor = self.cost(arm) if of_time else 1.0
        baseline, ratios = self.runs.get(BASELINE, {}), []
        if factor is None:
            return []
        for seed, record in self.runs.get(arm, {}).items():
            if seed in baseline:
                target = best(baseline[seed])
                own = epochs_to(losses_of(record), target)
                ratios.append(factor * own / epochs_to(losses_of(baseline[seed]), target))
        return ratios

    def soonest(self, arm: str) -> tuple[float, float] | None:
        """The learning rate that gets to D-RR's lowest loss first, and its ratio of epochs.

        Of the rates that an arm was tuned over, with the first seed; D-RR has its own rate. None
        where none gets there.
        """
        first = self.task.seeds[0]
        baseline = self.runs.get(BASELINE, {}).get(first)
        if baseline is None:
            return None
        losses = losses_of(baseline)
        needed = epochs_to(losses, best(baseline))
        tuned = {
            rate: self._records.get((arm, rate, first))
            for rate in grid(self.task, self._records, arm)
        }
        found = {
            rate: epochs_to(losses_of(record), best(baseline)) / needed
            for rate, record in tuned.items()
            if record is not None
        }
        rate = min(found, key=found.__getitem__, default=math.inf)
        return (rate, found[rate]) if math.isfinite(found.get(rate, math.inf)) else None


def own_bounds(arms: Arms, records: Records) -> Records:
    """The herding bounds of each arm's own rate; a grid may have moved since others were found."""
    return {key: record for key, record in records.items() if arms.rates.get(key[0]) == key[1]}


def arms_of(directory: pathlib.Path, task: Task, *, same_rate: bool = False) -> Arms:
    """All arms of a task that have runs, each at its own rate so far, or at the same one."""
    records = read_records(directory, task)
    rates = tuned_rates(task, records, so_far=True)
    if same_rate:
        rates = dict.fromkeys(rates, task.same_rate)
    return Arms(task, records, rates, _epoch_secs(read_secs(directory, task)))


def _epoch_secs(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """D-RR's median times the median of each arm's over D-RR's in the same turn.

    So a machine that is slower for a while is so for all arms.
    """
    plain = measured.get(BASELINE, ())
    ratios = {
        arm: statistics.median(x / y for x, y in zip(secs, plain, strict=True))
        for arm, secs in measured.items()
        if plain
    }
    return {arm: ratio * statistics.median(plain) for arm, ratio in ratios.items()}
