"""The report of `compare_bilevel`: tables and pictures from the results that are there."""

import pathlib
from typing import Any

from experiments import markdown
from experiments.bilevel import (
    baselines,
    estimators,
    problems,
    problems_page,
    results,
    sinusoids,
    tasks,
)
from experiments.bilevel.results import Record, Stat
from hetjax.report import words

COLOURS = (
    "#5546d6",
    "#cc79a7",
    "#0072b2",
    "#56b4e9",
    "#d55e00",
    "#e69f00",
    "#8a6d3b",
    "#009e73",
    "#7a8894",
)


def write(directory: pathlib.Path) -> pathlib.Path:
    """Writes README.md and its pictures into the directory of the results."""
    parts = ["# Bilevel problems, compared\n", _INTRODUCTION]
    for task in tasks.TASKS.values():
        if records := _by_arm(results.read(directory, task.name)):
            parts += [f"## {task.title}\n", _cleaning(task, records)]
            draw(directory / f"{task.name}.png", task, records)
            parts.append(f"![Accuracy of y against seconds and work]({task.name}.png)\n")
    if found := _by_arm(results.read(directory, "tuning")):
        parts += ["## Learning rate and weight decay\n", _tuning(found)]
    if found := _by_arm(results.read(directory, "sinusoids")):
        parts += ["## Few-shot sinusoids\n", _sinusoids(found)]
    for name in problems.ARMS:
        if found := _by_arm(results.read(directory, name)):
            parts += [f"## {problems.KINDS[name].title}\n", problems_page.section(name, found)]
    path = directory / "README.md"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))
    return path


_INTRODUCTION = """\
Made by `python -m experiments.compare_bilevel` from the lines in `runs/`, on CPU.

- ± is the standard deviation over seeds. Gains are of the same seed.
- *y* is the lower variable that was reached. *Retrained* is a model trained on all training
  examples by their weights and on validation. Both are those of the record with the lowest
  validation loss.
- F1: of the examples with weights above 1/2, against those whose labels are right.
- Work counts gradients; a product counts as two of them, a loss as half of one.
- Seconds are those of one machine of two cores, without compiling. In the section on 500 unrolled
  steps it was left alone. In the others other programs ran on it, so that equal work took up to
  five times as long from one run to the next.
- Settings were chosen on other seeds: 100 to 104 of the digits, and 100 to 102 of Fashion-MNIST.
  `experiments/bilevel/tasks.py` says how.
- On Fashion-MNIST every method has its images in blocks, of which one at a time is in memory.
"""


def _by_arm(records: dict[results.Key, Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for key, record in sorted(records.items(), key=lambda item: item[0].seed):
        found.setdefault(key.arm, []).append(record)
    return found


def _percent(records: list[Record], *names: str) -> Stat:
    def value(record: Any) -> float:
        for name in names:
            record = record[name]
        return 100 * record

    return Stat.of(map(value, records))


def _gain(records: list[Record], own: str, baseline: str) -> str:
    gain = Stat.of(100 * (r[own] - r["baselines"][baseline]["test_accuracy"]) for r in records)
    return f"{gain.mean:+.2f} ± {gain.deviation:.2f}"


def _cleaning(task: tasks.Task, records: dict[str, list[Record]]) -> str:
    head = (
        "method",
        "seeds",
        "y",
        "retrained",
        "y - both",
        "retrained - both",
        "F1",
        "seconds",
        "work",
        "F",
        "temporary memory",
    )
    rows = []
    for arm in task.arms:
        if runs := records.get(arm):
            rows.append(
                (
                    estimators.METHODS[arm].title,
                    str(len(runs)),
                    str(_percent(runs, "test_accuracy")),
                    str(_percent(runs, "retrained_test_accuracy")),
                    _gain(runs, "test_accuracy", "both"),
                    _gain(runs, "retrained_test_accuracy", "both"),
                    str(_percent(runs, "f1_true_labels")),
                    f"{Stat.of(r['train_secs'] for r in runs).mean:.2f}",
                    f"{Stat.of(r['work'] for r in runs).mean:,.0f}",
                    f"{Stat.of(r['validation_loss'] for r in runs).mean:.3f}",
                    words.size(runs[-1].get("temporary_bytes")),
                )
            )
    runs = records[next(arm for arm in task.arms if arm in records)]
    base = [
        (
            baselines.TITLES[name],
            str(_percent(runs, "baselines", name, "test_accuracy")),
            str(_percent(runs, "baselines", name, "f1_true_labels"))
            if "f1_true_labels" in found
            else "",
        )
        for name, found in runs[0]["baselines"].items()
    ]
    if "best_ridge" in runs[0]:
        best = [str(_percent(runs, "best_ridge", name)) for name in runs[0]["best_ridge"]]
        base += [
            ("both, the best ridge on the test set", best[0], ""),
            ("trimming by both, ridge with best F1", "", best[1]),
        ]
    title = estimators.METHODS[runs[0]["arm"]].title
    return "\n".join(
        [
            markdown.table(head, rows) + "\n",
            *_sooner(records),
            f"Without cleaning, and trimming that keeps as many examples as {title}:\n",
            markdown.table(("baseline", "accuracy", "F1"), base) + "\n",
        ]
    )


def _sooner(records: dict[str, list[Record]]) -> list[str]:
    """When the value gap reached the validation loss that unrolling ended with."""
    times, parts, unrolled = [], [], {run["seed"]: run for run in records.get("unrolled", ())}
    for ours in records["value_gap"]:
        if not (theirs := unrolled.get(ours["seed"])):
            continue
        curve, loss = ours["curve"], theirs["curve"]["validation_loss"][-1]
        pairs = zip(curve["train_secs"], curve["validation_loss"], strict=True)
        if at := [secs for secs, reached in pairs if reached <= loss]:
            times.append(f"{theirs['train_secs'] / at[0]:.1f}")
            both = [record.get("temporary_bytes") for record in (theirs, ours)]
            parts += [f"1/{both[0] / both[1]:.1f}"] if all(both) else []
    if not times:
        return []
    told = f"The value gap reached the F that unrolling ended with {', '.join(times)} times as soon"
    memory = f" It took {', '.join(dict.fromkeys(parts))} of its memory." if parts else ""
    return [f"{told}, seed by seed.{memory}\n"]


def draw(path: pathlib.Path, task: tasks.Task, records: dict[str, list[Record]]) -> None:
    """Accuracy of y against seconds, left, and work, right: means over the seeds."""
    import numpy as np

    drawing, panels = _figure(2)
    for arm, colour in zip(task.arms, COLOURS, strict=False):
        runs = records.get(arm, [])
        if not runs:
            continue
        curves = [run["curve"] for run in runs]
        for panel, x in zip(panels, ("train_secs", "work"), strict=True):
            panel.plot(
                np.mean([curve[x] for curve in curves], 0),
                100 * np.mean([curve["test_accuracy"] for curve in curves], 0),
                color=colour,
                linewidth=1.4,
                label=estimators.METHODS[arm].title,
            )
    base = records[next(arm for arm in task.arms if arm in records)]
    for panel, label in zip(
        panels, ("seconds, without compiling", "work, in gradients"), strict=True
    ):
        for name, style in (("validation", ":"), ("both", "--"), ("oracle", "-.")):
            height = _percent(base, "baselines", name, "test_accuracy").mean
            panel.axhline(
                height, color="#30343b", linestyle=style, linewidth=1, label=baselines.TITLES[name]
            )
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.grid(True, color="#e3e6eb", linewidth=0.6)
    panels[0].set_ylabel("test accuracy of y, %")
    low = min(
        _percent(base, "baselines", name, "test_accuracy").mean for name in ("validation", "both")
    )
    panels[0].set_ylim(low - 12, None)
    panels[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    drawing.tight_layout()
    drawing.savefig(path)


def _figure(num_panels: int) -> tuple[Any, Any]:
    from matplotlib import figure
    from matplotlib.backends import backend_agg

    drawing = figure.Figure(figsize=(5.4 * num_panels, 4.4), dpi=130, facecolor="white")
    backend_agg.FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(1, num_panels, sharey=True, squeeze=False)[0]


def _tuning(records: dict[str, list[Record]]) -> str:
    head = ("way", "seeds", "points", "validation loss", "test accuracy")
    rows = [
        (
            arm,
            str(len(runs)),
            f"{Stat.of(run['points'] for run in runs).mean:.0f}",
            f"{(loss := Stat.of(run['validation_loss'] for run in runs)).mean:.4f} "
            f"± {loss.deviation:.4f}",
            str(_percent(runs, "test_accuracy")),
        )
        for arm, runs in records.items()
    ]
    return (
        "Softmax regression on 200 digits, three labels in ten drawn anew. The rate of 100 steps "
        "of gradient descent and their weight decay are tuned for the loss of 400 clean digits: by "
        "Adam on hypergradients in forward mode, and by random search, at equal work.\n\n"
        + markdown.table(head, rows)
        + "\n"
    )


def _sinusoids(records: dict[str, list[Record]]) -> str:
    most = max(sinusoids.EVALUATED)
    head = (
        "method",
        "seeds",
        *(f"after {steps}" for steps in sinusoids.EVALUATED),
        f"diverged after {most}",
        "after 1, each seed",
        "rate",
    )
    rows = [
        (
            arm,
            str(len(runs)),
            *(
                f"{_error([run['medians'][str(k)] for run in runs])} "
                f"({_error([run['errors'][str(k)] for run in runs])})"
                for k in sinusoids.EVALUATED
            ),
            f"{sum(run['diverged'][str(most)] for run in runs)} of "
            f"{sinusoids.NUM_TEST_TASKS * len(runs):,}",
            ", ".join(_error([run["medians"]["1"]]) for run in runs),
            ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs})),
        )
        for arm, runs in records.items()
    ]
    updates = sorted({run["num_updates"] for runs in records.values() for run in runs})
    return (
        f"Square error on {sinusoids.NUM_TEST_TASKS} new sinusoids a seed after so many steps on 5 "
        "or 10 points of each. It is the median over sinusoids and, in brackets, the mean, both "
        f"averaged over seeds. {', '.join(f'{n:,}' for n in updates)} updates of the start, each "
        f"from {sinusoids.NUM_TASKS} tasks. Joint training fits all tasks at once, and takes the "
        "best of four rates for its steps on a new one.\n\n"
        "One or three steps were learned for. More may make a task diverge, and the mean with it: "
        f"one counts as diverged whose error is {sinusoids.DIVERGED:g} or more. The error of "
        "answering 0 is below 25.\n\n"
        + markdown.table(head, rows)
        + "\n"
        + problems_page.solved_few_shot(records)
    )


def _error(of_seeds: list[float | None]) -> str:
    """The mean; a result has None for what is not finite."""
    finite = [error for error in of_seeds if error is not None]
    return f"{Stat.of(finite).mean:.3g}" if len(finite) == len(of_seeds) else "diverged"
