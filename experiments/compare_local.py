"""Are local steps worth it, and unequal ones? Arms of one task side by side, on one virtual clock.

    python -m experiments.compare_local --data_dir=DIR [--only=wikitext2,cifar10] [--stage=plan]

`--stage=plan` prints what would be run. `tune` finds each arm's rates, on one grid, by the loss of
what is held out after a part of the examples; `run` does all seeds at these rates; `report` writes
tables and pictures from what is there. Without `--stage` all of them. Each run leaves one line in
`runs.jsonl` of `--directory` and is never done again. The arms are in `experiments/local/study.py`.
"""

import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

import hetjax
from experiments import command_line, markdown
from experiments.comparisons import kept
from experiments.local import played, report, study

_ONLY = flags.DEFINE_list("only", list(study.TASKS), "Tasks.", allow_override=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Of the data sets.", allow_override=True)
_DIRECTORY = flags.DEFINE_string(
    "directory", "runs/local", "Of results and report.", allow_override=True
)
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Begin no run after these.", allow_override=True)
_STAGE = flags.DEFINE_enum(
    "stage", "all", ["all", "plan", "tune", "run", "report"], "What to do.", allow_override=True
)


def found(run: study.Run) -> dict[str, Any] | None:
    """Its result, if it is there."""
    path = pathlib.Path(_DIRECTORY.value) / "runs.jsonl"
    wanted = kept_settings(run)
    return next((each for each in kept.read(path) if each["settings"] == wanted), None)


def kept_settings(run: study.Run) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(run.settings))


def best(task: str, arm: study.Arm) -> tuple[float, float] | None:
    """The rates of an arm; None: they are not tuned yet."""
    runs = study.grid(task, study.ARMS[arm.rates_of] if arm.rates_of else arm)
    results = [found(run) for run in runs]
    if None in results:
        return None
    ends = [each["curve"][-1]["loss"] for each in results if each is not None]
    run = runs[min(range(len(runs)), key=lambda k: (ends[k] != ends[k], ends[k]))]
    return run.inner, run.outer


def runs_of(task: str, stage: str) -> Iterator[study.Run]:
    """Those of a stage whose rates are known."""
    for arm in study.arms_of(task):
        if stage == "tune":
            yield from study.grid(task, arm)
        elif (rates := best(task, arm)) is not None:
            of_task = study.TASKS[task].examples
            yield from (study.Run(task, arm.name, seed, *rates, of_task) for seed in study.SEEDS)


def do(runs: Sequence[study.Run], began: float) -> None:
    for run in runs:
        if found(run) is not None or time.monotonic() - began > 60 * _MINUTES.value:
            continue
        started = time.monotonic()
        result = played.played(run, _DATA_DIR.value)
        secs = time.monotonic() - started
        record = {"settings": kept_settings(run), "secs": round(secs, 1), **result}
        kept.append(pathlib.Path(_DIRECTORY.value) / "runs.jsonl", record)
        print(f"{run}: {result['curve'][-1]['loss']:.4f} in {secs:.0f} s", flush=True)


def write(tasks: Sequence[str]) -> pathlib.Path:
    directory, lines = pathlib.Path(_DIRECTORY.value), []
    for task in tasks:
        curves, rates = {}, {}
        for arm in study.arms_of(task):
            if (of_arm := best(task, arm)) is not None:
                rates[arm.name] = of_arm
        for run in runs_of(task, "run"):
            if (result := found(run)) is not None:
                curves[task, run.arm, run.seed] = result["curve"]
        lines += report.tables(task, curves, rates)
        report.draw(task, curves, directory / f"{task}.svg")
    path = directory / "report.md"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def main() -> None:
    began, tasks = time.monotonic(), _ONLY.value
    hetjax.use_cpu_workers(len(study.SECS))
    if unknown := set(tasks) - study.TASKS.keys():
        raise SystemExit(f"--only={','.join(sorted(unknown))}: there are {', '.join(study.TASKS)}")
    if _STAGE.value == "plan":
        rows = [
            (
                task,
                arm.name,
                len(study.grid(task, arm)),
                len(study.SEEDS),
                arm.rates_of or "its own",
            )
            for task in tasks
            for arm in study.arms_of(task)
        ]
        print(markdown.table(("task", "arm", "runs to tune", "runs", "rates of"), rows))
        return
    if _DATA_DIR.value is None and _STAGE.value != "report":
        raise SystemExit("--data_dir is missing: the directory of the data sets")
    for stage in ("tune", "run"):
        for task in tasks if _STAGE.value in ("all", stage) else ():
            do(list(runs_of(task, stage)), began)
    if _STAGE.value in ("all", "report"):
        print(f"Report: {write(tasks)}")


if __name__ == "__main__":
    command_line.run(main)
