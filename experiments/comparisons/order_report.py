"""The report of `compare_orders`: words, tables and pictures; it needs no JAX.

Every sentence that judges is computed from the results, in the terms of `order_results`.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.comparisons import pictures
from experiments.comparisons.order_results import (
    EPOCH_SECS,
    Arms,
    Records,
    Stat,
    average,
    below,
    best,
    final,
    losses_of,
    read_records,
    tuned_rate,
    verdict,
)
from experiments.comparisons.order_tasks import ARMS, BASELINE, Task


def write(directory: pathlib.Path, tasks: Sequence[Task]) -> pathlib.Path:
    """Writes README.md and its pictures from the results that are there; returns its path."""
    path = directory / "runs" / EPOCH_SECS
    kept = json.loads(path.read_text()) if path.exists() else {}
    sections: list[str] = []
    targets: list[tuple[str, ...]] = []
    for task in [task for task in tasks if not task.group]:
        records = read_records(directory, task)
        timed = kept.get(task.name, {})
        secs = timed.get("secs", {}) if timed.get("settings") == task.settings() else {}
        section, rows = _task_section(directory, task, records, secs)
        sections.append(section)
        targets += rows
    for group in dict.fromkeys(task.group for task in tasks if task.group):
        members = [task for task in tasks if task.group == group]
        sections.append(_group_section(directory, members))
    head = [_HEAD, "## Targets\n", _table(("figure", "target", "reached"), targets)]
    directory.mkdir(parents=True, exist_ok=True)
    readme = directory / "README.md"
    readme.write_text("\n".join([*head, *sections]).rstrip() + "\n")
    return readme


_HEAD = """# Balanced example orders on real data

Rebuilt from the results in `runs/` by

```sh
python -m experiments.compare_orders --stage=report
```

and without `--stage` the runs that are missing are done first. The unit that is ordered is one
example. Training loss: over the whole part of the data that is trained on, after each epoch,
without an update. Each order's learning rate is the one of the grid with the lowest training
loss with the first seed; everything else is equal. "Mean ± spread" is over the seeds, and the
spread is half the distance from the least to the greatest. *By more than the spread*: the
means differ by more than the larger of the two spreads; else *within the spread*. The lowest
loss of a run is over its epochs; the mean over the epochs of the training loss tells how fast
it went down, and depends less on single epochs; it is also given over that of D-RR with the same
seed, whose model begins the same: seeds differ more than orders do. "Epochs to D-RR's lowest" is
the number of epochs until the training loss is at most the lowest that random reshuffling (D-RR)
reaches with the same seed, over the epochs that D-RR needs for it.

Runs go on two at a time and disturb each other's clocks. So time is epochs times the median
seconds of an epoch, measured apart, all orders in turn in one process on one core, without
evaluation. All workers are played one after the other on that core: it is the cost in
arithmetic, and says nothing of communication. In the pictures, lines are means, bands go from
the least to the greatest seed, and the dotted line is the mean of D-RR's lowest losses.
"""


def _task_section(
    directory: pathlib.Path, task: Task, records: Records, secs: dict[str, list[float]]
) -> tuple[str, list[tuple[str, ...]]]:
    medians = {method: statistics.median(values) for method, values in secs.items()}
    tuned = {m: r for m in task.arms if (r := tuned_rate(task, records, m)) is not None}
    own = Arms(task, records, tuned, medians)
    parts = [f"## {task.title}\n", _setup(task)]
    missing = [ARMS[m].label for m in task.arms if len(own.runs.get(m, {})) < len(task.seeds)]
    if missing:
        parts.append(f"**Not complete:** runs of {'; '.join(missing)} are missing.\n")
    if BASELINE not in tuned:
        return "\n".join(parts), []
    same = Arms(task, records, dict.fromkeys(tuned, task.same_rate), medians)
    rows = [(own, "each order at its own learning rate")]
    if task.same_rate and same.rates != tuned:
        rows.append((same, f"all at the learning rate {task.same_rate:g}"))
    _picture(directory / f"{task.name}.png", rows)
    parts.append(f"![Training loss against epochs and against time]({task.name}.png)\n")
    for arms, title in rows:
        parts += [f"{_capital(title)}:\n", _arms_table(arms)]
    if len(task.learning_rates) > 1:
        parts += [
            f"Lowest training loss at every learning rate, seed {task.seeds[0]}, and in "
            "brackets epochs to that of D-RR at the same rate, over D-RR's:\n",
            _grid_table(task, records),
        ]
    sentences = _sentences(own, same)
    parts += [f"- {sentence}" for sentence in sentences] + [""]
    return "\n".join(parts), _targets(own, same)


def _setup(task: Task) -> str:
    sharing = task.fields["data"]["sharing"]
    return (
        f"The first {task.num_train:,} images, {task.epochs} epochs of "
        f"{math.ceil(task.num_train / task.batch_size)} rounds, {task.num_workers} workers with "
        f"{sharing} data, batch {task.batch_size} (microbatches of {task.microbatch_size}), SGD "
        f"with momentum {task.momentum:g}, weight decay {task.weight_decay:g}, learning rates "
        f"{', '.join(f'{rate:g}' for rate in task.learning_rates)}, seeds "
        f"{', '.join(map(str, task.seeds))}. Accuracy on the first {task.num_test:,} test images.\n"
    )


def _arms_table(arms: Arms) -> str:
    header = (
        "order",
        "learning rate",
        "lowest training loss",
        "last training loss",
        "mean over the epochs",
        "over D-RR's, same seed",
        "lowest against D-RR",
        "epochs to D-RR's lowest",
        "time to it",
        "ms a round",
        "last test accuracy",
    )
    rounds = math.ceil(arms.task.num_train / arms.task.batch_size)
    rows = []
    for method, rate in arms.rates.items():
        accuracy = Stat.of(run["test_accuracies"][-1] or 0.0 for run in arms.runs[method].values())
        against = verdict(arms.stat(method, best), arms.stat(BASELINE, best))
        millis = f"{1e3 * arms.secs[method] / rounds:.1f}" if method in arms.secs else ""
        rows.append(
            (
                ARMS[method].label,
                f"{rate:g}",
                f"{arms.stat(method, best):.4f}",
                f"{arms.stat(method, final):.4f}",
                f"{arms.stat(method, average):.4f}",
                f"{arms.paired(method, average):.2f}",
                "" if method == BASELINE else against,
                _ratio(arms.ratios(method)),
                _ratio(arms.ratios(method, of_time=True)),
                millis,
                f"{accuracy:.3f}",
            )
        )
    return _table(header, rows)


def _ratio(ratios: Sequence[float]) -> str:
    never = sum(map(math.isinf, ratios))
    if never:
        return f"not reached by {never} of {len(ratios)} seeds"
    return f"{Stat.of(ratios):.2f}" if ratios else ""


def _grid_table(task: Task, records: Records) -> str:
    rows, first = [], task.seeds[0]
    for method in task.arms:
        cells = [ARMS[method].label]
        for rate in task.learning_rates:
            record, baseline = (records.get((m, rate, first)) for m in (method, BASELINE))
            cell = "" if record is None else f"{Stat.of([best(record)]):.4f}"
            if record is not None and baseline is not None and method != BASELINE:
                arms = Arms(task, records, {method: rate, BASELINE: rate}, {})
                arms.runs = {method: {first: record}, BASELINE: {first: baseline}}
                (ratio,) = arms.ratios(method)
                cell += f" ({ratio:.2f})" if math.isfinite(ratio) else " (not reached)"
            cells.append(cell)
        rows.append(tuple(cells))
    return _table(("order", *(f"lr {rate:g}" for rate in task.learning_rates)), rows)


def _sentences(own: Arms, same: Arms) -> list[str]:
    """What the figures say, arm by arm, against D-RR and of the two D-GraB forms."""
    sentences = []
    grid = own.task.learning_rates
    edges = [ARMS[m].label for m, rate in own.rates.items() if rate in (min(grid), max(grid))]
    if len(grid) > 1 and edges:
        sentences.append(f"Tuned to an end of the grid, so not surely tuned: {'; '.join(edges)}.")
    for arms, where in (
        (own, "at its own learning rate"),
        (same, f"at the learning rate {own.task.same_rate:g}"),
    ):
        if arms is same and (same.rates == own.rates or not own.task.same_rate):
            continue
        for method in arms.rates:
            if method == BASELINE:
                continue
            lowest, last = (
                verdict(arms.stat(method, f), arms.stat(BASELINE, f)) for f in (best, final)
            )
            sentences.append(
                f"{_capital(ARMS[method].label)} {where}, against D-RR: lowest training loss "
                f"{lowest}, last {last}; mean over the epochs "
                f"{arms.paired(method, average):.2f} of D-RR's with the same seed."
            )
        if {"d_grab", "d_grab_exact"} <= set(arms.rates):
            same_as = verdict(arms.stat("d_grab", best), arms.stat("d_grab_exact", best))
            sentences.append(f"Two-level against exact D-GraB, {where}, lowest loss: {same_as}.")
        if {"d_grab", "fixed_map"} <= set(arms.rates):
            map_too = verdict(arms.stat("d_grab", best), arms.stat("fixed_map", best))
            sentences.append(
                f"Two-level D-GraB against the fixed map, {where}, lowest loss: {map_too} (the "
                "part of the gain that is not from keeping to one sequence)."
            )
    change = own.task.fields["cluster"].get("changes")
    if change and "d_grab" in own.rates:
        epoch = own.task.epochs // 2
        at = [own.stat(m, lambda run: losses_of(run)[epoch - 1]) for m in ("d_grab", BASELINE)]
        quotas = next(iter(own.runs["d_grab"].values()))["quotas"]
        shown = "; ".join(f"{' '.join(map(str, row))} from round {start}" for start, row in quotas)
        sentences.append(
            f"Before the change of speeds in round {change[0]['round']} (loss after epoch "
            f"{epoch}): two-level D-GraB {verdict(*at)}. Quotas of its first seed: {shown}."
        )
    return sentences


def _targets(own: Arms, same: Arms) -> list[tuple[str, ...]]:
    """The rows of the table of targets that a task has."""
    task = own.task
    rows: list[tuple[str, ...]] = []
    if task.model == "logistic":
        for method in ("d_grab", "d_grab_exact"):
            words = [
                f"{_ratio(arms.ratios(method))} {where}"
                for arms, where in (
                    (own, "at its own learning rate"),
                    (same, f"at {task.same_rate:g}"),
                )
                if arms.runs.get(method)
            ]
            name = f"{task.title}: epochs to D-RR's lowest, {ARMS[method].label}"
            met = Stat.of(own.ratios(method)).mean <= 1 / 3
            rows.append((name, "≤ 1/3", f"{_yes(met)}: {'; '.join(words)}"))
        return rows
    for method in ("d_grab_exact", "d_grab"):
        if method in own.rates:
            stats = [(own.stat(method, f), own.stat(BASELINE, f)) for f in (best, final)]
            words = [f"{verdict(*pair)} ({pair[0]:.4f}, {pair[1]:.4f})" for pair in stats]
            enough = min(stat.num_seeds for stat in stats[0]) > 1
            name = f"{task.title}: {ARMS[method].label} against D-RR"
            reached = _yes(enough and all(below(*pair) for pair in stats))
            target = "training loss lower by more than the spread, lowest and last"
            rows.append((name, target, f"{reached}: lowest {words[0]}, last {words[1]}"))
    if {"d_grab", "d_grab_exact"} <= set(own.rates):
        pair = own.stat("d_grab", best), own.stat("d_grab_exact", best)
        word = verdict(*pair)
        reached = f"{_yes(word == 'within the spread')}: {word} ({pair[0]:.4f}, {pair[1]:.4f})"
        rows.append((f"{task.title}: two-level against exact", "within the spread", reached))
    return rows


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _yes(reached: bool) -> str:
    return "reached" if reached else "**not reached**"


def _group_section(directory: pathlib.Path, tasks: Sequence[Task]) -> str:
    """One table of variants: which learning rates, decay and sizes show a gain."""
    rows = []
    for task in tasks:
        records = read_records(directory, task)
        tuned = {m: r for m in task.arms if (r := tuned_rate(task, records, m)) is not None}
        arms = Arms(task, records, tuned, {})
        for method in tuned:
            seeds = len(arms.runs[method])
            rows.append(
                (
                    f"{task.title} ({seeds} seed{'s' if seeds > 1 else ''})",
                    ARMS[method].label,
                    f"{arms.stat(method, best):.4f}",
                    f"{arms.stat(method, final):.4f}",
                    f"{arms.stat(method, average):.4f}",
                    f"{arms.paired(method, average):.2f}",
                    _ratio(arms.ratios(method)),
                )
            )
    header = (
        "variant",
        "order",
        "lowest loss",
        "last loss",
        "mean loss",
        "over D-RR's",
        "epochs to D-RR's lowest",
    )
    return "\n".join(
        [
            "## Where it holds\n",
            f"Variants of {tasks[0].model} on {tasks[0].dataset} with {tasks[0].num_workers} "
            "workers, not tuned; training loss.\n",
            _table(header, rows) if rows else "Not run yet.\n",
        ]
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _picture(path: pathlib.Path, rows: Sequence[tuple[Arms, str]]) -> None:
    """Loss against epochs, left, and against time, right; mean line and band of the seeds."""
    import matplotlib
    from matplotlib import figure
    from matplotlib.backends import backend_agg

    with matplotlib.rc_context(_STYLE):
        drawing = figure.Figure(figsize=(9, 3.6 * len(rows) + 0.6), dpi=200, facecolor="white")
        backend_agg.FigureCanvasAgg(drawing)
        panels = drawing.subplots(len(rows), 2, sharey="row", squeeze=False)
        for (arms, title), (left, right) in zip(rows, panels, strict=True):
            for panel, by_time in ((left, False), (right, True)):
                _curves(panel, arms, by_time=by_time)
            left.set_ylabel("training loss")
            left.set_title(f"{_capital(title)}", loc="left", fontweight="bold")
            left.set_xlabel("epochs")
            right.set_xlabel("seconds of training on one core")
        handles, labels = panels[0][0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
        drawing.tight_layout(rect=(0, 0.5 / drawing.get_figheight(), 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Software": None})


_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6eb",
    "axes.edgecolor": "#5d6675",
    "axes.titlesize": 9,
}


def _curves(panel: Any, arms: Arms, *, by_time: bool) -> None:
    shown: list[float] = []
    for method, runs in arms.runs.items():
        columns = list(zip(*map(losses_of, runs.values()), strict=True))
        if not columns or (by_time and method not in arms.secs):
            continue
        unit = arms.secs[method] if by_time else 1
        x = [unit * epoch for epoch in range(1, len(columns) + 1)]
        finite = [[v for v in column if math.isfinite(v)] for column in columns]
        mean = [
            statistics.mean(f) if len(f) == len(c) else math.nan
            for f, c in zip(finite, columns, strict=True)
        ]
        shown += [v for v in mean if math.isfinite(v)]
        arm = ARMS[method]
        panel.plot(x, mean, color=arm.colour, label=arm.label, linewidth=1.4)
        low = [min(f, default=math.nan) for f in finite]
        high = [max(f, default=math.nan) for f in finite]
        panel.fill_between(x, low, high, color=arm.colour, alpha=0.15, linewidth=0)
    if not shown:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
        return
    baseline = arms.stat(BASELINE, best).mean
    if math.isfinite(baseline):
        panel.axhline(baseline, color=ARMS[BASELINE].colour, linewidth=0.8, linestyle=":")
    panel.set_yscale("log")
    panel.set_xlim(left=0)
    panel.xaxis.get_major_locator().set_params(integer=not by_time)
    panel.grid(True, which="minor", axis="y")
    pictures.log_ticks(panel)
