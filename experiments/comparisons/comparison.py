"""Configurations side by side on the same delays: their runs, figures, table and picture.

A run is an arm, a seed and maybe a learning rate; it leaves one line in `runs.jsonl`, with all
settings that it depends on, and is not done again. The training loss is that of the rounds,
averaged over the last `window` of an epoch's examples.
"""

import collections
import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from absl import logging

from experiments import command_line, own
from experiments.comparisons import kept, pictures, spreads
from hetjax.config import experiment, kinds
from hetjax.zoo import config as config_lib

_CONFIG = config_lib.ExperimentConfig
COLOURS = ("#30343b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8a6d3b", "#56b4e9")


class Arm(NamedTuple):
    label: str
    fields: dict[str, Any]  # a whole configuration, nested

    def settings(self, seed: int, rate: float | None) -> dict[str, Any]:
        """The fields of a run of it that its result depends on."""
        fields = json.loads(json.dumps(self.fields)) | {"seed": seed}
        fields.pop("checkpoint", None)
        if rate is not None:
            fields["optimizer"]["learning_rate"] = rate
        return fields


class Run(NamedTuple):
    arm: Arm
    seed: int
    rate: float | None  # None: that of the configuration

    @property
    def settings(self) -> dict[str, Any]:
        """All that its result depends on; of one's own modules the digests."""
        code = own.digests(self.arm.fields)
        return self.arm.settings(self.seed, self.rate) | ({"code": code} if code else {})


def path_of(directory: pathlib.Path) -> pathlib.Path:
    """Of the file with the results of all runs."""
    return directory / "runs.jsonl"


def read_arms(texts: Sequence[str], common: Sequence[str], grid: Sequence[str] = ()) -> list[Arm]:
    """The arms that the flags describe; each named by what sets it apart.

    Args:
        texts: files, each with fields that are different.
        common: fields of all arms.
        grid: a field and its values each, `FIELD=VALUE,VALUE`: an arm for each cell.

    Raises:
        ValueError: a file cannot be read, or a field is wrong.
    """
    described = []
    for text in texts:
        words = text.split()
        if len(words) == 1:
            described += [(file, []) for file in words[0].split(",") if file]
        elif words:
            described.append((words[0], words[1:]))
    cells = command_line.cells(grid)
    described = [(file, [*more, *cell]) for file, more in described for cell in cells]
    if len(described) < 2:
        raise ValueError(
            "--configs: got fewer than two arms to compare. Give it once for each, such as "
            "--configs=configs/a.py --configs='configs/a.py gate.trigger=first', or give a "
            "--grid=FIELD=VALUE,VALUE."
        )
    arms = []
    several_files = len({file for file, _ in described}) > 1
    for file, overrides in described:
        given = command_line.given_fields([*common, *overrides], behind=file)
        loaded = config_lib.load(file).to_dict()
        checked = config_lib.validate(command_line.overridden(_CONFIG, loaded, given))
        names = [pathlib.Path(file).stem] if several_files or not overrides else []
        arms.append(Arm(", ".join([*names, *overrides]), config_lib.to_dict(checked)))
        _check_rule(checked, arms[-1].label)
    labels = [arm.label for arm in arms]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--configs: two arms are the same: {labels}.")
    return arms


def _check_rule(config: config_lib.ExperimentConfig, label: str) -> None:
    """Refuses a local rule whose rounds have no training loss."""
    if config.rule.name == kinds.DEFAULT_RULE:
        return
    from hetjax.inputs import arguments

    rule = arguments.configuration(config, {}, workers=None).rule
    if rule is not None and rule.reads.loss_sum is None:
        raise ValueError(
            f"--configs: {label}: the local rule {config.rule.name!r} adds up no loss, and "
            "training losses are compared. Give it a loss_sum(sums) -> f[], or leave this arm out."
        )


def train(run: Run, directory: pathlib.Path) -> dict[str, Any]:
    """Does a run and writes its result: the loss of every round, and the summary."""
    import hetjax
    from experiments import train as train_lib

    started = time.perf_counter()
    settings = run.settings
    config = config_lib.validate({k: v for k, v in settings.items() if k != "code"})
    try:
        result, diverged = train_lib.train_and_evaluate(config, None, progress=False), False
    except hetjax.NonFiniteError as error:
        result, diverged = error.result, True
    except ValueError as error:
        raise ValueError(f"{run.arm.label}, seed {run.seed}: {own.told(error)}") from error
    if result.summary["interrupted"] and not diverged:
        raise KeyboardInterrupt
    lines = result.history
    record = {
        "settings": settings,
        "diverged": diverged,
        "clock": [_short(line["start_secs"] + line["round_secs"]) for line in lines],
        "examples": [sum(line["examples_counted"]) for line in lines],
        "losses": [_short(line["loss"]) for line in lines],
        "evals": [(i, line["eval"]) for i, line in enumerate(lines) if line.get("eval")],
        "summary": result.summary,
        "secs": round(time.perf_counter() - started, 1),
    }
    kept.append(path_of(directory), record)
    return record


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def read(run: Run, directory: pathlib.Path) -> dict[str, Any] | None:
    """The result of a run, if it is there; fields that it was kept without have their defaults."""
    found, wanted = kept.read(path_of(directory)), run.settings

    def is_it(record: dict[str, Any]) -> bool:
        return experiment.completed(record["settings"], wanted) == wanted

    return next(filter(is_it, found), None)


def run_all(runs: Iterable[Run], directory: pathlib.Path, *, jobs: int) -> None:
    """Does the runs that are missing, each in a process of its own; `jobs=0`: in this one."""
    wanted = {json.dumps(run.settings, sort_keys=True): run for run in runs}
    missing = [run for run in wanted.values() if read(run, directory) is None]
    if not missing:
        return
    if not jobs:
        for run in missing:
            train(run, directory)
        return
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, context, initializer=_begin_process, initargs=(jobs,), max_tasks_per_child=1
    ) as executor:
        futures = {executor.submit(train, run, directory): run for run in missing}
        for future in concurrent.futures.as_completed(futures):
            run, record = futures[future], future.result()
            rate = "" if run.rate is None else f" lr {run.rate:g}"
            last = "diverged" if record["diverged"] else record["losses"][-1]
            print(
                f"{(time.monotonic() - began) / 60:5.1f} min  {run.arm.label}{rate} seed "
                f"{run.seed}: {last} in {record['secs']:.0f} s",
                flush=True,
            )


def _begin_process(jobs: int) -> None:
    logging.set_verbosity(logging.WARNING)
    if jobs > 1:
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()


class Curve(NamedTuple):
    """The averaged training loss of a run, round by round."""

    secs: list[float]
    epochs: list[float]
    losses: list[float]

    def time_to(self, target: float) -> float:
        """Seconds until the loss is at most the target; infinite if never."""
        pairs = zip(self.secs, self.losses, strict=True)
        return next((secs for secs, loss in pairs if loss <= target), math.inf)


def curve(record: dict[str, Any], window: float) -> Curve:
    """The loss averaged over the last `window` of an epoch's examples, from there on.

    A round whose examples all have the weight 0 has no loss, and is in no average.
    """
    summary = record["summary"]
    per_epoch = summary["examples_processed"] / max(summary["epochs"], 1e-9)
    secs, epochs, losses = [], [], []
    processed, total, held = 0, 0.0, 0
    window_rounds: collections.deque[tuple[int, float]] = collections.deque()
    for clock, count, loss in zip(
        record["clock"], record["examples"], record["losses"], strict=True
    ):
        processed += count
        if loss is None:
            continue
        window_rounds.append((count, loss))
        held, total = held + count, total + count * loss
        while held - window_rounds[0][0] >= window * per_epoch and len(window_rounds) > 1:
            first_count, first_loss = window_rounds.popleft()
            held, total = held - first_count, total - first_count * first_loss
        if held >= window * per_epoch and held:
            secs.append(clock)
            epochs.append(processed / per_epoch)
            losses.append(total / held)
    return Curve(secs, epochs, losses)


class Comparison(NamedTuple):
    """All runs of the arms at their learning rates."""

    arms: list[Arm]
    rates: dict[str, float | None]  # by label
    records: dict[str, dict[int, dict[str, Any]]]  # by label and seed
    window: float
    target: float

    def curves(self, label: str) -> dict[int, Curve]:
        return {seed: curve(r, self.window) for seed, r in self.records[label].items()}

    def times(self, label: str) -> dict[int, float]:
        """Seconds to the target of each seed."""
        return {seed: c.time_to(self.target) for seed, c in self.curves(label).items()}

    def speedups(self, label: str, over: str) -> list[float]:
        """How many times sooner than another arm, for each seed."""
        own, other = self.times(label), self.times(over)
        return [other[s] / own[s] if math.isfinite(own[s]) else 0.0 for s in own if s in other]

    def final_losses(self, label: str) -> list[float]:
        return [
            c.losses[-1] if c.losses and not r["diverged"] else math.inf
            for r, c in zip(self.records[label].values(), self.curves(label).values(), strict=True)
        ]


def compare(
    arms: list[Arm],
    seeds: Sequence[int],
    directory: pathlib.Path,
    *,
    rates: Sequence[float] = (),
    target: float | None = None,
    window: float = 0.25,
    jobs: int = 1,
) -> Comparison:
    """Does what is missing, tunes, and gathers everything.

    Of `rates` each arm gets, with the first seed, the one that reaches `target` first.
    """
    if rates and target is None:
        raise ValueError("--rates: to tune, give the --target_loss whose time is compared.")
    own: dict[str, float | None] = dict.fromkeys(arm.label for arm in arms)
    if rates:
        run_all([Run(a, seeds[0], rate) for rate in rates for a in arms], directory, jobs=jobs)
        for arm in arms:
            scores = {}
            for rate in rates:
                record = read(Run(arm, seeds[0], rate), directory)
                assert record is not None
                assert target is not None
                found = curve(record, window)
                scores[rate] = found.time_to(target)
            own[arm.label] = min(scores, key=scores.__getitem__)
    runs = [Run(arm, seed, own[arm.label]) for seed in seeds for arm in arms]
    run_all(runs, directory, jobs=jobs)
    records: dict[str, dict[int, dict[str, Any]]] = {arm.label: {} for arm in arms}
    for run in runs:
        record = read(run, directory)
        assert record is not None
        records[run.arm.label][run.seed] = record
    if target is None:
        lowest = [
            min(curve(r, window).losses, default=math.inf)
            for of_arm in records.values()
            for r in of_arm.values()
        ]
        target = max((x for x in lowest if math.isfinite(x)), default=math.inf)
    return Comparison(arms, own, records, window, target)


def table(found: Comparison) -> str:
    """Markdown: an arm a line."""
    first = found.arms[0].label
    every = [record["summary"] for of_arm in found.records.values() for record in of_arm.values()]
    metric = "test_accuracy"
    if not any(metric in summary for summary in every):  # of examples of one's own
        metric = every[0].get("judged_by", metric)
    header = (
        "arm",
        "learning rate",
        f"seconds to loss {found.target:.4g}",
        "times as fast",
        "last training loss",
        metric.replace("_", " "),
        "examples a second",
        "waiting",
        "returned",
        "MB a round",
        "spectral gap",
        "consensus",
    )
    rows = []
    for arm in found.arms:
        label, runs = arm.label, list(found.records[arm.label].values())
        summaries = [record["summary"] for record in runs]
        rate = found.rates[label] or arm.fields["optimizer"]["learning_rate"]
        times = list(found.times(label).values())
        ratios = found.speedups(label, first)
        stat = spreads.Stat.of
        never = sum(map(math.isinf, times))
        gossip = [s["gossip"] for s in summaries if "gossip" in s]
        returned = [s["gate"]["returned_fraction"] for s in summaries if "gate" in s]
        sent = statistics.mean(s["bytes_sent_per_round"] or 0.0 for s in summaries)
        rows.append(
            (
                label,
                f"{rate:g}",
                f"not reached by {never} of {len(times)}" if never else f"{stat(times):.4g}",
                "" if never else f"{stat(ratios):.2f}",
                f"{stat(found.final_losses(label)):.4f}",
                f"{stat(s.get(metric) or math.nan for s in summaries):.3f}",
                f"{stat(s['examples_per_sec'] for s in summaries):.4g}",
                f"{statistics.mean(s['waiting_fraction'] for s in summaries):.1%}",
                f"{statistics.mean(returned):.1%}" if returned else "",
                f"{sent / 1e6:.3g}",
                f"{gossip[0]['spectral_gap']:.3f}" if gossip else "",
                f"{statistics.mean(g['consensus_relative'] for g in gossip):.2g}" if gossip else "",
            )
        )
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(path: pathlib.Path, found: Comparison) -> None:
    """Training loss against time, left, and epochs, right; a line a run, a colour an arm."""
    from matplotlib import figure
    from matplotlib.backends import backend_agg

    drawing = figure.Figure(figsize=(10, 4.2), dpi=150, facecolor="white")
    backend_agg.FigureCanvasAgg(drawing)
    left, right = drawing.subplots(1, 2, sharey=True)
    for index, arm in enumerate(found.arms):
        colour = COLOURS[index % len(COLOURS)]
        style = "-" if index < len(COLOURS) else "--"
        for number, line in enumerate(found.curves(arm.label).values()):
            for panel, x in ((left, line.secs), (right, line.epochs)):
                label = arm.label if number == 0 else None
                panel.plot(x, line.losses, style, color=colour, linewidth=1.1, label=label)
    virtual = all(
        r["summary"]["clock"] == "virtual" for a in found.records.values() for r in a.values()
    )
    left.set_xlabel(f"seconds ({'virtual' if virtual else 'wall'} clock)")
    right.set_xlabel("epochs")
    left.set_ylabel("training loss")
    for panel in (left, right):
        panel.set_xlim(left=0)
        panel.set_yscale("log")
        panel.grid(True, which="both", color="#e3e6eb", linewidth=0.6)
        panel.axhline(found.target, color="#9aa3b2", linewidth=0.8, linestyle=":")
        pictures.log_ticks(panel)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    rows = -(-len(found.arms) // 2)
    drawing.legend(
        *left.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=8
    )
    drawing.tight_layout(rect=(0, 0.05 * rows, 1, 1))
    drawing.savefig(path, metadata={"Software": None})
