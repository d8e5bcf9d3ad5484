"""What is missing, what it takes, and doing it: nothing is done twice."""

import concurrent.futures
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tqdm

from experiments import markdown
from experiments.orders import herding, jobs, results
from experiments.orders.arms import ARMS, SAVING
from experiments.orders.tasks import Run, Task

WORK = {
    results.RUNS: "experiments.orders.runs:train",
    results.HERDING: "experiments.orders.herding:measure",
    results.EPOCH_SECS: "experiments.orders.timing:epoch_secs",
}


class Left(NamedTuple):
    """What is left of a task, at most, on one core."""

    count: int
    secs: float


def missing(task: Task, directory: pathlib.Path, kind: str = results.RUNS) -> list[Run]:
    """The runs of a task that are to be done next."""
    trained = results.read_records(directory, task)
    if kind == results.RUNS:
        return results.wanted(task, trained)
    return herding.wanted(task, trained, results.read_records(directory, task, kind))


def plan(
    tasks: Iterable[Task], directory: pathlib.Path, kind: str = results.RUNS
) -> dict[str, Left]:
    """By task: the runs that are left at most, and their seconds on one core.

    A run takes as long as those of its arm that are done, in the middle. Before, it takes the
    measured seconds of its epochs, or a guess. One for the herding bounds takes as long as the run
    that is done once more.
    """
    left = {}
    for task in tasks:
        records = list(results.read_records(directory, task).values())
        if kind == results.HERDING:
            todo = missing(task, directory, kind)
            secs = sum(r["secs"] for run in todo for r in records if _is_of(r, run))
            left[task.name] = Left(len(todo), secs)
            continue
        epochs = results.read_secs(directory, task)
        count, secs, next_ones = 0, 0.0, missing(task, directory)
        for arm in task.arms:
            done = [record["secs"] for record in records if record["arm"] == arm]
            asked = sum(run.arm == arm for run in next_ones)  # an extended grid has more
            more = max(task.most_runs(arm) - len(done), asked) if next_ones else 0
            measured = statistics.median(epochs[arm]) if arm in epochs else None
            count += more
            secs += more * (statistics.median(done) if done else task.run_secs(arm, measured))
        left[task.name] = Left(count, secs)
    return left


def _is_of(record: dict[str, Any], run: Run) -> bool:
    return (record["arm"], record["learning_rate"], record["seed"]) == run.key


def table(tasks: Sequence[Task], directory: pathlib.Path) -> str:
    """The plan, in Markdown."""
    left, rows = plan(tasks, directory), []
    for task in tasks:
        config, mine = task.experiment, left[task.name]
        size = f"{config.data.num_train:,}", config.epochs, f"{task.num_rounds:,}"
        rows.append([task.name, *size, mine.count, f"{mine.secs / 60:.0f}"])
    header = ("task", "examples", "epochs", "rounds", "runs left, at most", "minutes of one core")
    lines = [markdown.table(header, rows)]
    hours = sum(each.secs for each in left.values()) / 3600
    lines.append(f"About {hours:.1f} hours of one core; a grid that is extended takes more.")
    bounds = plan(tasks, directory, results.HERDING).values()
    count, minutes = (sum(values) for values in zip(*bounds, strict=True))
    if count:
        lines.append(
            f"Beside these: {count} or more of the runs once more, for the herding bounds of "
            f"their orders, about {minutes / 60:.0f} minutes of one core."
        )
    if untimed := _untimed(tasks, directory):
        minutes = sum(map(_timing_secs, untimed)) / 60
        lines.append(
            f"The epochs of {len(untimed)} tasks to be timed, about {minutes:.0f} minutes."
        )
    return "\n".join(lines)


def _untimed(tasks: Iterable[Task], directory: pathlib.Path) -> list[Task]:
    """Whose epochs are not timed, of one arm at least: then all are, in turn, to be compared."""
    return [
        t
        for t in tasks
        if not t.group and not set(t.arms) <= results.read_secs(directory, t).keys()
    ]


def _timing_secs(task: Task) -> float:
    """What `timing.epoch_secs` takes of a task, at a guess: for each arm, to compile and 6 blocks.

    A block takes about 2 s, or as long as two epochs of an order of every second one.
    """
    epoch = task.epoch_rounds * task.round_millis / 1e3
    blocks = {arm: max(2 * epoch, 2.0) if arm == SAVING else 2.0 for arm in task.arms}
    return sum(4 + 6 * blocks[arm] * ARMS[arm].cost for arm in task.arms)


def run_all(
    tasks: Iterable[Task],
    directory: pathlib.Path,
    *,
    data_dir: str | None,
    num_jobs: int,
    minutes: float = math.inf,
    kind: str = results.RUNS,
) -> int:
    """Does the runs that are missing, and returns how many; `num_jobs=0`: in this process.

    Where two runs of a task fail alike, its others are left out.

    Raises:
        RuntimeError: some failed; those of other tasks were done.
    """
    tasks, started, count = list(tasks), time.monotonic(), 0
    failed: dict[Run, str] = {}
    with jobs.executor(num_jobs) as executor, _bar() as bar:
        pending: dict[concurrent.futures.Future, Run] = {}
        while True:
            todo = [
                run
                for task in tasks
                if not _fails_alike(task, failed)
                for run in missing(task, directory, kind)
                if run not in pending.values() and run not in failed
            ]
            late = time.monotonic() - started > 60 * minutes
            for run in [] if late else todo[: max(num_jobs, 1) - len(pending)]:
                path = results.path_of(directory, kind)
                future = executor.submit(jobs.do, WORK[kind], run, data_dir, path=path)
                pending[future] = run
            if not pending:
                if late and todo:
                    print(f"The time is over; {len(todo)} runs or more are left.")
                break
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                run = pending.pop(future)
                try:
                    record = future.result()
                except (ValueError, MemoryError, RuntimeError) as error:
                    if isinstance(error, concurrent.futures.BrokenExecutor):
                        raise
                    failed[run] = str(error)
                    continue
                count += 1
                left = sum(each.secs for each in plan(tasks, directory, kind).values())
                name = f"{run.task.name} {run.name}"
                _tell(bar, started, name, record, left / max(num_jobs, 1))
    if failed:
        told = {(r.task.name, why): f"{r.task.name} {r.name}: {why}" for r, why in failed.items()}
        raise RuntimeError("Runs that failed:\n" + "\n".join(told.values()))
    return count


def _fails_alike(task: Task, failed: dict[Run, str]) -> bool:
    """Whether two runs of a task failed for one reason, so that no other need be tried."""
    reasons = [why for run, why in failed.items() if run.task is task]
    return len(set(reasons)) < len(reasons)


def _bar() -> tqdm.tqdm:
    """In minutes; none where nobody looks."""
    return tqdm.tqdm(
        total=1, unit="min", disable=None, bar_format="{percentage:3.0f} %|{bar}| {postfix}"
    )


def _tell(
    bar: tqdm.tqdm,
    started: float,
    name: str,
    record: Mapping[str, Any],
    left: float,
) -> None:
    """One line about what is done, and the seconds that are left."""
    spent = (time.monotonic() - started) / 60
    found = f"{results.best(record):.5f} in " if "train_losses" in record else ""
    rest = f"about {left / 60:.0f} min left"
    bar.total, bar.n = spent + left / 60, spent
    bar.set_postfix_str(rest)
    bar.write(f"{spent:5.1f} min  {name}: {found}{record['secs']:.0f} s; {rest}", file=sys.stdout)
    sys.stdout.flush()


def time_all(
    tasks: Iterable[Task],
    directory: pathlib.Path,
    *,
    data_dir: str | None,
    minutes: float = math.inf,
    num_jobs: int = 1,
) -> None:
    """Measures and keeps the seconds of an epoch, of all arms of a task in turn, where missing.

    Where one arm is missing all are measured anew: what is compared is measured together.
    """
    path, started = directory / results.RUNS / results.EPOCH_SECS, time.monotonic()
    untimed = _untimed(tasks, directory)
    with jobs.executor(num_jobs) as executor, _bar() as bar:
        while untimed:
            if time.monotonic() - started > 60 * minutes:
                print(f"The time is over; {len(untimed)} tasks are not timed.")
                return
            began, task = time.monotonic(), untimed.pop(0)
            secs = executor.submit(jobs.do, WORK[results.EPOCH_SECS], task, data_dir).result()
            kept = json.loads(path.read_text()) if path.exists() else {}
            jobs.write(path, kept | {task.name: {"settings": task.settings, "secs": secs}})
            taken = {"secs": time.monotonic() - began}
            left = sum(map(_timing_secs, untimed))
            _tell(bar, started, f"{task.name}, epochs timed", taken, left)
