"""The tables and the pictures of the study of local steps, from its results alone."""

import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from experiments import markdown
from experiments.comparisons import spreads
from experiments.local import study

Curves = Mapping[tuple[str, str, int], list[dict[str, float]]]
"""By task, arm and seed."""

_HEAD = (
    "arm",
    "inner, outer rate",
    "loss",
    "over 16 unequal",
    "rounds",
    "MB handed in",
    "MB of sums",
)
_PICTURED = ("all-reduce, adaptive", "one worker, 16 steps", "16 steps, equal", study.UNEQUAL)
_PICTURED += ("asynchronous, delayed Nesterov", "int4")
_COLOURS = ("#30343b", "#e69f00", "#0072b2", "#d55e00", "#009e73", "#cc79a7")


def secs(point: Mapping[str, float], rate: float, workers: int) -> float:
    """When a point of a curve is reached where each worker has a link of so many bytes a second."""
    return point["secs"] + point["bytes"] / workers / rate


def loss_at(curve: list[dict[str, float]], of: Callable[[Any], float], value: float) -> float:
    """Between two points of a curve; beyond its end that of its end."""
    return float(np.interp(value, [of(p) for p in curve], [p["loss"] for p in curve]))


def tables(task: str, curves: Curves, rates: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Those of one task."""
    arms = [a for a in study.arms_of(task) if all((task, a.name, s) in curves for s in study.SEEDS)]
    yield f"## {task}"
    yield markdown.table(_HEAD, (_row(task, arm, curves, rates) for arm in arms))
    header = ("arm", *(f"link {name}" for name in study.LINKS), "equal bytes")
    yield markdown.table(header, _of_links(task, arms, curves))


def _row(
    task: str, arm: study.Arm, curves: Curves, rates: Mapping[str, tuple[float, float]]
) -> list[str]:
    ends = [curves[task, arm.name, seed][-1] for seed in study.SEEDS]
    base = [curves[task, study.UNEQUAL, seed][-1]["loss"] for seed in study.SEEDS]
    over = [end["loss"] / other - 1 for end, other in zip(ends, base, strict=True)]
    paired = f"{statistics.mean(over):+.1%} ({min(over):+.1%} to {max(over):+.1%})"
    handed_in = (ends[0]["bytes"] - ends[0]["bytes_of_sums"]) / 1e6
    return [
        arm.name,
        ", ".join(f"{rate:g}" for rate in rates[arm.name]),
        f"{spreads.Stat.of(end['loss'] for end in ends):.4f}",
        paired,
        f"{ends[0]['rounds']:.0f}",
        f"{handed_in:.1f}",
        f"{ends[0]['bytes_of_sums'] / 1e6:.1f}",
    ]


def _of_links(task: str, arms: list[study.Arm], curves: Curves) -> Iterator[list[str]]:
    """The loss when the first arm has done all its examples, and when the first has sent as much as
    16 unequal steps do."""
    of_task = {a.name: [curves[task, a.name, s] for s in study.SEEDS] for a in arms}
    most = min(c[-1]["bytes"] for curves_ in of_task.values() for c in curves_ if c[-1]["bytes"])
    for arm in arms:
        cells = []
        for rate in study.LINKS.values():
            ends = [secs(cs[0][-1], rate, study.ARMS[a].workers) for a, cs in of_task.items()]

            def when(point: Any, rate: float = rate, arm: study.Arm = arm) -> float:
                return secs(point, rate, arm.workers)

            found = (loss_at(c, when, min(ends)) for c in of_task[arm.name])
            whole = when(of_task[arm.name][0][-1])
            cells.append(f"{spreads.Stat.of(found):.4f} ({whole:,.0f} s)")
        found = (loss_at(c, lambda p: p["bytes"], most) for c in of_task[arm.name])
        yield [arm.name, *cells, f"{spreads.Stat.of(found):.4f}"]


def draw(task: str, curves: Curves, path: pathlib.Path) -> None:
    """The loss against examples, and against seconds with the slowest link: means and ranges."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    name, rate = list(study.LINKS.items())[-1]
    for label, colour in zip(_PICTURED, _COLOURS, strict=True):
        of_seeds = [curves[task, label, s] for s in study.SEEDS if (task, label, s) in curves]
        workers = study.ARMS[label].workers
        for panel, of in (
            (panels[0], lambda p: p["examples"]),
            (panels[1], lambda p, workers=workers: secs(p, rate, workers)),
        ):
            if of_seeds:
                at = np.linspace(0, min(of(curve[-1]) for curve in of_seeds), 200)
                losses = [[loss_at(curve, of, x) for x in at] for curve in of_seeds]
                panel.plot(at, np.mean(losses, 0), color=colour, label=label, linewidth=1.5)
                ends = np.min(losses, 0), np.max(losses, 0)
                panel.fill_between(at, *ends, color=colour, alpha=0.1, linewidth=0)
    panels[0].set(xlabel="examples", ylabel="loss of what is held out")
    panels[1].set(xlabel=f"emulated seconds, links of {name}")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
