"""Which numbers do the records of a run hold? Series of the rounds, with NaN for gaps.

A record is a line of ``metrics.jsonl``. Any of its fields may be missing. What is missing or
infinite becomes NaN, so the pictures show it as a gap.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS = 500  # longer curves are thinned: a page must not grow with the length of the run

Record = Mapping[str, Any]
History = Sequence[Record]
"""Records in their order, such as one a round."""


def number(value: float | None) -> float:
    """`value` as a finite float, or NaN for what is missing or infinite."""
    return float("nan") if value is None or not np.isfinite(value) else float(value)


def column(history: History, name: str) -> np.ndarray:
    """Field `name` of each round, f64[num_rounds]; NaN if it is missing."""
    return _numbers([record.get(name) for record in history])


def _numbers(values: list[float | None]) -> np.ndarray:
    """`number` of each value, f64[len(values)]."""
    found = np.array(values, dtype=float)  # None becomes NaN
    return np.where(np.isfinite(found), found, np.nan)


def part(record: Record, name: str) -> Record:
    """Field `name` of a record, a record itself; an empty one where there is none."""
    return record.get(name) or {}


def parts(history: History, name: str) -> list[Record]:
    """`part` of each round."""
    return [part(record, name) for record in history]


def matrix(history: History, name: str) -> np.ndarray:
    """Field `name` of each round and worker, f64[num_rounds, num_workers], NaN for gaps."""
    num_workers = count_workers(history)
    cells: list[float | None] = []
    for record in history:
        known = list(record.get(name) or ())[:num_workers]
        cells += known + [None] * (num_workers - len(known))
    return _numbers(cells).reshape(len(history), num_workers)


def count_workers(history: History) -> int:
    """The largest number of workers in any round; a run never changes it."""
    ends = [*history[:20], *history[-20:]]
    cells = (record.get(name) or () for record in ends for name in ("quotas", "compute_secs"))
    return max(map(len, cells), default=0)


def taken(history: History) -> History:
    """The rounds without the last seats of a run apart that no worker has ever taken.

    Example:
        >>> taken([{"quotas": [3, 1, 0], "present": [True, True, False]}])
        [{'quotas': [3, 1], 'present': [True, True, False]}]
    """
    every = [enumerate(record.get("present") or ()) for record in history]
    last = max((i for of in every for i, is_here in of if is_here), default=count_workers(history))
    names = ("quotas", "microbatches_done", "compute_secs")  # by which workers are counted
    cut = [{name: r[name][: last + 1] for name in names if r.get(name)} for r in history]
    return [{**record, **part} for record, part in zip(history, cut, strict=True)]


def round_ids(history: History) -> np.ndarray:
    """The number of each round; its place in the file if the line does not say."""
    ids = column(history, "round")
    return np.where(np.isnan(ids), np.arange(len(history)), ids)


def full_rounds(history: History) -> list[Record]:
    """The rounds without the short one that ends an epoch, which says nothing of speeds."""
    return [record for record in history if record.get("full", True)] or list(history)


def epochs_done(history: History, summary: Record) -> np.ndarray:
    """Epochs done at the end of each round: examples processed / examples an epoch."""
    processed = column(history, "examples_processed")
    epoch = column(history, "epoch")
    whole, total = number(summary.get("epochs")), number(summary.get("examples_processed"))
    ends = np.flatnonzero(np.diff(epoch) > 0)  # the last round of each finished epoch
    if len(ends) and epoch[ends[-1]] >= 0 and processed[ends[-1]] > 0:
        return processed * ((epoch[ends[-1]] + 1) / processed[ends[-1]])
    if whole > 0 and total > 0:
        return processed * (whole / total)
    top = np.nanmax(processed, initial=0.0)
    return processed / top if top > 0 else np.full(len(history), np.nan)


def has_clock(summary: Record) -> bool:
    """Whether its times are seconds: a virtual clock may count microbatches instead."""
    return bool(summary.get("emulated")) or summary.get("clock") != "virtual"


def clock(history: History) -> np.ndarray:
    """Seconds of the run at the end of each round."""
    secs = np.nan_to_num(column(history, "round_secs"))
    starts = column(history, "start_secs")
    return np.where(np.isnan(starts), np.cumsum(secs) - secs, starts) + secs


def evaluations(history: History, ending: str) -> dict[str, np.ndarray]:
    """Evaluated numbers whose name ends with `ending`: name -> f64[num_rounds], NaN between.

    Those of the test set come first; the order decides which is drawn in which style.
    """
    found = _known(parts(history, "eval"), ending)
    return {n: found[n] for n in sorted(found, key=lambda n: not n.startswith("test"))}


def _known(records: History, ending: str = "") -> dict[str, np.ndarray]:
    """The fields with such names that have a number, by name."""
    names = sorted({n for record in records for n in record if n.endswith(ending)})
    found = {name: column(records, name) for name in names}
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def not_finite(history: History) -> list[str]:
    """A sentence on each evaluated number that was not finite at some evaluation.

    Example:
        >>> not_finite([{"eval": {"test_loss": 1.0}}, {"eval": {"test_loss": None}}, {}])
        ['test loss was not finite at 1 of 2 evaluations.']
    """
    records = parts(history, "eval")
    found = []
    for name in dict.fromkeys(name for record in records for name in record):
        values = column([record for record in records if name in record], name)
        if bad := int(np.sum(~np.isfinite(values))):
            shown = str(name).replace("_", " ")
            found.append(f"{shown} was not finite at {bad:,} of {len(values):,} evaluations.")
    return found


def evaluated_metrics(history: History) -> dict[str, dict[str, np.ndarray]]:
    """Evaluated numbers by metric, then by name, without losses and accuracies.

    Names and their order are those of `evaluations`. The order of metrics is that of the first set.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, values in evaluations(history, "").items():
        metric = name.removeprefix("worst_").partition("_")[2]
        if metric and metric not in ("loss", "accuracy"):
            found.setdefault(metric, {})[name] = values
    return found


def training_metrics(history: History) -> dict[str, np.ndarray]:
    """Metrics of the loss function that have a number: name -> f64[num_rounds]."""
    return _known(parts(history, "metrics"))


def first_and_last(history: History, count: int) -> list[History]:
    """The first `count` rounds and, of the others, the last `count`.

    Example:
        >>> [[r["round"] for r in part] for part in first_and_last([{"round": 0}], 6)]
        [[0]]
    """
    first, rest = history[:count], history[count:]
    return [part for part in (first, rest[-count:]) if part]


def thin(x: np.ndarray, y: np.ndarray, *, points: int = MAX_POINTS) -> tuple[np.ndarray, ...]:
    """`(x, mean, low, high)` of at most `points` equal stretches of a curve.

    Args:
        x, y: f64[n]. A stretch leaves out NaN in `y`; if all of it is NaN, so is its value.
        points: the most points that are wanted.
    Example:
        >>> y = np.array([1.0, 3.0, np.nan, 5.0])
        >>> x, mean, low, high = thin(np.arange(4.0), y, points=2)
        >>> x.tolist(), mean.tolist(), low.tolist(), high.tolist()
        ([0.5, 2.5], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
    """
    if len(y) <= points:
        return x, y, y, y
    starts = np.linspace(0, len(y), points, endpoint=False).astype(int)
    known = np.add.reduceat(np.isfinite(y).astype(float), starts)
    sums = np.add.reduceat(np.nan_to_num(y), starts)
    mean = np.divide(sums, known, out=np.full(points, np.nan), where=known > 0)
    middle = np.add.reduceat(x, starts) / np.diff(np.append(starts, len(y)))
    return middle, mean, np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
