"""Do balanced example orders train faster? The papers' tasks, order by order.

    python -m experiments.compare_orders --data_dir=DIR [--only=TASK,…] [--stage=run] [--jobs=2]

runs what is missing, measures what an epoch takes and how far each order is balanced, and writes
the report. DIR holds the original files, as `experiments.train` wants them.
`--stage=` does one of these alone: `run`; `time`, the seconds of an epoch (on an otherwise idle
machine); `herding`, the bounds of orders; `report`, from the results alone, in seconds; and
`plan`, which prints what would be run and for how long. Each run leaves one small JSON file
once it is done, and is never done again; an interrupted run leaves nothing. The tasks are in
`experiments/orders/study.py`; each is a configuration of `configs/` and what the study sets of it.
A task of your own is a configuration, whose model and data may be your own too:

    python -m experiments.compare_orders --configs=mine.py --orders=d_grab,fixed_map --rates=.01,.1

Four orders have learning rates of their own, tuned over the same grid with the first seed, by the
lowest training loss after an epoch; where the best rate is at an end of the grid, the grid is
extended there. The others take D-GraB's. Then come the other seeds at these rates. Runs go on
in parallel, each on one core, so they disturb each other's clocks: loss against time is drawn with
the median seconds of an epoch, measured alone, all arms in turn.
"""

import difflib
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from experiments import command_line, own
from experiments.orders import report, results, schedule, study
from experiments.orders.tasks import CONFIGS, Task, of_file

STAGES = ("all", "plan", "run", "time", "herding", "report")
_ONLY = flags.DEFINE_list("only", [], "Tasks, or groups of them; all if empty.")
_CONFIGS = flags.DEFINE_multi_string(
    "configs", [], "A task of your own, in place of the study's: 'FILE FIELD=VALUE …'."
)
_SET = flags.DEFINE_multi_string("set", [], "FIELD=VALUE, for all --configs.")
_RATES = flags.DEFINE_list("rates", [], "Learning rates to tune --configs over; or the file's.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of --configs.")
_ORDERS = flags.DEFINE_list("orders", ["d_grab"], "Of --configs, beside random reshuffling.")
_JOBS = flags.DEFINE_integer("jobs", len(os.sched_getaffinity(0)), "Runs at a time.", 1)
_MINUTES = flags.DEFINE_float("minutes", math.inf, "Start nothing after this time.", 0.0)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of the data sets.")
_DIRECTORY = flags.DEFINE_string(
    "directory", None, f"Results and report; {results.DIRECTORY}, or runs/orders of --configs."
)
_STAGE = flags.DEFINE_enum("stage", "all", STAGES, "What to do.")


def main() -> None:
    try:
        tasks = _of_files() if _CONFIGS.value else _of_study()
        default = "runs/orders" if _CONFIGS.value else results.DIRECTORY
        directory = pathlib.Path(_DIRECTORY.value or default).expanduser()
        failed = _do(_STAGE.value, tasks, directory)
    except ValueError as error:  # also of a result that is there
        failed = [own.told(error)]
    except KeyboardInterrupt:
        print("Interrupted; what was done is kept.", file=sys.stderr)
        sys.exit(130)
    if failed:
        print("\n".join(failed), file=sys.stderr)
        sys.exit(command_line.MISTAKE)


def _of_files() -> list[Task]:
    """The tasks of one's own."""
    rates, seeds = map(float, _RATES.value), list(map(int, _SEEDS.value))
    options = {"rates": list(rates), "seeds": seeds, "orders": _ORDERS.value}
    return [of_file(text, _SET.value, **options) for text in _CONFIGS.value]


def _of_study() -> list[Task]:
    """The tasks that are asked for."""
    if not CONFIGS.is_dir():
        raise ValueError("The study's tasks are configurations of a checkout. Give --configs.")
    only = set(_ONLY.value)
    known = {name for t in study.TASKS.values() for name in (t.name, t.group) if name}
    if only - known:
        near = [m for n in sorted(only - known) for m in difflib.get_close_matches(n, known, n=1)]
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(
            f"--only: {', '.join(sorted(only - known))}: there is no such task.{meant} There are "
            f"{', '.join(sorted(known))}."
        )
    return [t for t in study.TASKS.values() if not only or only & {t.name, t.group}]


def _do(stage: str, tasks: Sequence[Task], directory: pathlib.Path) -> list[str]:
    """All that the stage asks for; what failed of it."""
    began, failed = time.monotonic(), []
    data_dir = _DATA_DIR.value

    def left() -> float:
        return max(_MINUTES.value - (time.monotonic() - began) / 60, 0.0)

    if stage != "report":
        print(schedule.table(tasks, directory), flush=True)
    for name, kind in (("run", results.RUNS), ("herding", results.HERDING)):
        if stage not in ("all", name):
            continue
        more = {"num_jobs": _JOBS.value, "minutes": left(), "kind": kind}
        try:
            schedule.run_all(tasks, directory, data_dir=data_dir, **more)
        except RuntimeError as error:
            failed.append(str(error))
    if stage in ("all", "time") and not failed:
        schedule.time_all(tasks, directory, data_dir=data_dir, minutes=left())
    if stage in ("all", "report"):
        started = time.perf_counter()
        path = report.write(directory, tasks if _CONFIGS.value else list(study.TASKS.values()))
        print(f"Report: {path}, in {time.perf_counter() - started:.1f} s")
    return failed


if __name__ == "__main__":
    command_line.run(main)
