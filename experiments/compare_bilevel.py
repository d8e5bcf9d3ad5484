"""Which hypergradients clean best, tune best, and learn the best start? A comparison.

    python -m experiments.compare_bilevel [--only=TASK,…] [--data_dir=DIR] [--stage=report]

runs what is missing and writes the report. Tasks: `digits_400`, `digits_100`, and with the original
files in DIR `fashion_linear`, `fashion_long` and `fashion_mlp` (hours), clean polluted labels;
`tuning` finds a learning rate and a weight decay; `sinusoids` learns a start for few-shot
regression; `search` finds the operations of a cell, and `gan` eight Gaussians. Each run is a line
in `runs/TASK.jsonl` and is never done again. `--stage=report` makes the report from them in
seconds.
"""

import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags, logging

from experiments import command_line
from experiments.bilevel import comparison, problems, results, sinusoids, tasks, tuning

ROOT = pathlib.Path(__file__).parents[1]
STAGES = ("all", "run", "report")
_ONLY = flags.DEFINE_list("only", [], "Tasks; all if empty.")
_SEEDS = flags.DEFINE_integer("seeds", 0, "Of each task, at most; 0: all.", 0)
_MINUTES = flags.DEFINE_float("minutes", 60.0, "Start no run after this time.", 0.0)
_UPDATES = flags.DEFINE_integer("updates", 10_000, "Of the start in `sinusoids`.", 1)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", os.environ.get("HETJAX_TEST_DATA"), "Directory of the data sets."
)
_DIRECTORY = flags.DEFINE_string("directory", "experiments/results/bilevel", "Results, report.")
_STAGE = flags.DEFINE_enum("stage", "all", STAGES, "What to do.")

TASKS = (*tasks.TASKS, "tuning", "sinusoids", *problems.ARMS)
Job = tuple[list[results.Key], Callable[[], list[results.Record]]]


def jobs(task: str, seeds: int, data_dir: str | None, updates: int) -> Iterator[Job]:
    """What a task consists of, each with the keys of its records; by seeds first."""
    if task in tasks.TASKS:
        found = tasks.TASKS[task]
        for seed in found.seeds[: seeds or None]:
            for arm in found.arms:
                yield (
                    [results.Key(arm, seed)],
                    lambda arm=arm, seed=seed: [tasks.run(found, arm, seed, data_dir)],
                )
    elif task == "tuning":
        for seed in range(seeds or 5):
            keys = [results.Key(arm, seed) for arm in ("forward mode", "random search")]
            yield keys, lambda seed=seed: tuning.run(seed)
    elif task in problems.ARMS:
        for seed in problems.SEEDS[: seeds or None]:
            for arm in problems.ARMS[task]:
                yield (
                    [results.Key(arm, seed)],
                    lambda arm=arm, seed=seed: [problems.compared(task, arm, seed)],
                )
    else:
        most = seeds or max(sinusoids.COMPARED.values())
        for seed in range(most):
            for (arm, shots), num_seeds in sinusoids.COMPARED.items():
                if seed < num_seeds:
                    yield (
                        [results.Key(f"{arm}, {shots} shots", seed)],
                        lambda arm=arm, shots=shots, seed=seed: [
                            sinusoids.run(arm, shots, seed, num_updates=updates)
                        ],
                    )


def run_all(
    names: list[str],
    directory: pathlib.Path,
    *,
    seeds: int = 0,
    data_dir: str | None = None,
    updates: int = 10_000,
    minutes: float = 60.0,
) -> int:
    """Does what is missing, one run after the other; returns how many."""
    began, count = time.monotonic(), 0
    for name in names:
        records = results.read(directory, name)
        for keys, run in jobs(name, seeds, data_dir, updates):
            if all(key in records for key in keys):
                continue
            if time.monotonic() - began > 60 * minutes:
                print("The time is over; not everything was run.")
                return count
            try:
                made = run()
            except ValueError as error:
                if not name.startswith("fashion"):
                    raise
                print(f"{name} is left out: {error}")
                break
            found = {
                key: results.short(record | {"arm": key.arm})
                for key, record in zip(keys, made, strict=True)
            }
            results.write(directory, name, found.values())
            records |= found
            count += 1
            minutes_done = (time.monotonic() - began) / 60
            print(f"{minutes_done:5.1f} min  {name} {keys[0].arm}, seed {keys[0].seed}", flush=True)
    return count


def main() -> None:
    names = [name for name in TASKS if not _ONLY.value or name in _ONLY.value]
    if set(_ONLY.value) - set(TASKS):
        unknown = sorted(set(_ONLY.value) - set(TASKS))
        raise app.UsageError(f"--only: {unknown} are none of {list(TASKS)}.")
    logging.set_verbosity(logging.WARNING)
    directory = pathlib.Path(_DIRECTORY.value).expanduser()
    if _STAGE.value in ("all", "run"):
        options: dict[str, Any] = {
            "seeds": _SEEDS.value,
            "data_dir": _DATA_DIR.value,
            "updates": _UPDATES.value,
            "minutes": _MINUTES.value,
        }
        run_all(names, directory, **options)
    if _STAGE.value in ("all", "report"):
        print(f"Report: {comparison.write(directory)}")


if __name__ == "__main__":
    command_line.run(main)
