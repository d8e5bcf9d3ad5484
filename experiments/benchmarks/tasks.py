"""Does each task reach its metric? Trains what is missing, and writes the table.

    python -m experiments.benchmarks.tasks --data_dir=DIR [--only=TASK,TASK] [--workdir=DIR]

Each task is one run of `experiments.train` with `configs/TASK.py`, in a process of its own, one
after the other. What came of it is added to `experiments/results/tasks/tasks.jsonl`; a task that is
there is not trained again, but for those in `--only`. The table in the README.md beside it is
written from the last line of each task alone, `--only=` (empty) writes it without training.
"""

import json
import pathlib
import subprocess
import sys
import time
import types
from typing import Any, NamedTuple

from absl import flags

from experiments import command_line, markdown
from experiments.benchmarks import rows
from experiments.comparisons import kept

RESULTS = pathlib.Path(__file__).parent.parent / "results" / "tasks"
FILE = RESULTS / "tasks.jsonl"


class Target(NamedTuple):
    """What a task is to reach."""

    metric: str
    words: str  # of the metric, in the table
    bound: float | None  # None: whatever it is, it is told
    highest: bool = False
    percent: bool = False

    def is_reached(self, value: float) -> bool | None:
        if self.bound is None:
            return None
        return value >= self.bound if self.highest else value <= self.bound

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"


def _accuracy(set_name: str, bound: float | None) -> Target:
    return Target(f"{set_name}_accuracy", f"{set_name} accuracy", bound, True, True)


TARGETS = {
    "cifar10_lenet_papers": _accuracy("test", 0.63),
    "cifar10_resnet8": _accuracy("test", 0.80),
    "wikitext2_lstm": Target("val_perplexity", "val perplexity", 130.0),
    "wikitext2_transformer": Target("val_perplexity", "val perplexity", None),
    "sst2_hashed": _accuracy("val", 0.80),
    "sst2_svd": _accuracy("val", 0.76),
    "cola_hashed": Target("val_matthews", "val Matthews", 0.08, True),
    "cola_svd": Target("val_matthews", "val Matthews", 0.08, True),
    "rte_hashed": Target("train_loss", "training loss", None),
    "rte_svd": Target("train_loss", "training loss", None),
    "m4_weekly": Target("test_smape", "test sMAPE", 8.9),
}


def result_of(name: str, config: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: its task, the numbers of its last and best evaluation, its cost."""
    prefixes = ("train_loss", "test_", "val_", "best_")
    return {
        "task": name,
        "config": {
            field: config[field]
            for field in ("seed", "epochs", "microbatch_size", "budget", "local", "optimizer")
        },
        "workers": config["cluster"]["num_workers"],
        "epochs": summary["epochs"],
        "rounds": summary["rounds"],
        "wall_secs": summary["wall_secs"],
        "first_round_secs": summary["start"]["first_round"],
        "notes": summary.get("notes", []),
        "numbers": {key: v for key, v in summary.items() if key.startswith(prefixes)},
        "machine": rows.processor(),
        "jax_version": summary["jax_version"],
    }


def train(name: str, data_dir: str, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains a task by the command that the table gives, unless `workdir` holds its whole run."""
    if not (workdir / "summary.json").is_file():
        command = [sys.executable, "-m", "experiments.train", f"--config=configs/{name}.py"]
        subprocess.run(
            [*command, f"--config.data.dir={data_dir}", f"--workdir={workdir}"], check=True
        )
    config, summary = (
        json.loads((workdir / f"{file}.json").read_text()) for file in ("config", "summary")
    )
    return result_of(name, config, summary)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of all tasks, in Markdown; tasks without a result say so."""
    lines = []
    for name, target in TARGETS.items():
        mark = {True: "≥" if target.highest else "≤", False: ""}[target.bound is not None]
        bound = "told" if target.bound is None else f"{mark} {target.shown(target.bound)}"
        line = [f"`{name}`", target.words, bound]
        if found := results.get(name):
            value = found["numbers"][target.metric]
            best = found["numbers"].get(f"best_{target.metric}")
            line.append(target.shown(value) + " (missed)" * (target.is_reached(value) is False))
            line.append("" if best is None else target.shown(best))
            line += [f"{found['epochs']:.3g}", f"{found['wall_secs']:,.0f}"]
        lines.append(line if found else [*line, "not run", "", "", ""])
    header = ("task", "metric", "target", "reached", "at the best", "epochs", "seconds")
    return markdown.table(header, lines)


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page of results."""
    naive = results.get("m4_weekly", {}).get("numbers", {}).get("test_naive_smape")
    machines = sorted({f"{r['machine']}, JAX {r['jax_version']}" for r in results.values()})
    said: dict[str, list[str]] = {}  # a fact, and the tasks that it is of
    for name, result in results.items():
        for note in result["notes"]:
            if not note.startswith("The optimiser"):
                said.setdefault(note, []).append(f"`{name}`")
    facts = [f"- {', '.join(names)}: {note}" for note, names in said.items()]
    optimisers = [f"- `{name}`: {_optimiser(r['config'])}" for name, r in results.items()]
    return "\n".join(
        [
            "# Tasks: what each reaches",
            "",
            "One run of each, seed 0, four workers:",
            "",
            "```sh",
            "python -m experiments.train --config=configs/TASK.py --config.data.dir=DIR "
            "--workdir=runs/TASK",
            "```",
            "",
            "Written by `python -m experiments.benchmarks.tasks --data_dir=DIR` from the JSON "
            "files beside this page. What is reached is the last epoch's number. Seconds are of "
            "`fit` with its evaluations, on two cores that other programs used at the "
            "same time: they are no measurement of speed.",
            "",
            table(results),
            "",
            "" if naive is None else f"The naive forecast's sMAPE is {naive:.4g}.",
            "",
            "What the reports say of the data:",
            "",
            *facts,
            "",
            "And of the optimisers:",
            "",
            *optimisers,
            "",
            f"Machine: {'; '.join(machines)}.",
            "",
        ]
    )


def _optimiser(config: dict[str, Any]) -> str:
    """What a report says of the optimiser."""
    from experiments import tasks

    optimizer = types.SimpleNamespace(**config["optimizer"])
    return tasks.optimizer_note(types.SimpleNamespace(**{**config, "optimizer": optimizer}))


def read_results() -> dict[str, dict[str, Any]]:
    """The results that are there, in the order of `TARGETS`."""
    found = {record["task"]: record for record in kept.read(FILE)}
    return {name: found[name] for name in TARGETS if name in found}


def main() -> None:
    given = flags.FLAGS
    missing = [name for name in TARGETS if name not in read_results()]
    wanted = missing if given.only is None else [name for name in given.only if name]
    if unknown := [name for name in wanted if name not in TARGETS]:
        sys.exit(f"--only: there is no {', '.join(unknown)}; allowed are {', '.join(TARGETS)}")
    for name in wanted:
        began = time.perf_counter()
        result = train(name, given.data_dir, pathlib.Path(given.workdir).expanduser() / name)
        kept.append(FILE, result)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    results = read_results()
    (RESULTS / "README.md").write_text(page(results))
    print(table(results))


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", "", "Where the original files are.")
    flags.DEFINE_list("only", None, "Tasks that are trained, even anew; none: write the table.")
    flags.DEFINE_string("workdir", "runs/tasks", "Gets a directory a task, with its report.")
    command_line.run(main)
