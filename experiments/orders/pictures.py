"""Loss against epochs and against time, the mean line and the band of the seeds of each arm."""

import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from experiments.comparisons import pictures
from experiments.orders.arms import ARMS, BASELINE
from experiments.orders.results import Arms, Record, best, losses_of

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6eb",
    "axes.edgecolor": "#5d6675",
    "axes.titlesize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "hetjax",
    "font.family": "sans-serif",
}


_MOST_TIMES = 3  # D-RR's time, on an axis


def values_of(record: Record) -> list[float]:
    """What was measured of the evaluated set after each epoch."""
    values = [math.nan if value is None else value for value in record["metric_values"]]
    return values + [math.nan] * (record["epochs"] - len(values))


def draw(path: pathlib.Path, arms: Arms, metric: str) -> None:
    """Training loss against epochs and time, and the task's own metric against epochs."""
    import matplotlib
    from matplotlib import figure
    from matplotlib.backends import backend_svg

    with matplotlib.rc_context(_STYLE):
        drawing = figure.Figure(figsize=(12.5, 3.9), facecolor="white")
        backend_svg.FigureCanvasSVG(drawing)
        left, middle, right = drawing.subplots(1, 3)
        _curves(left, arms, losses_of)
        _curves(middle, arms, losses_of, by_time=True)
        _curves(right, arms, values_of)
        for panel, title, unit in (
            (left, "training loss", "epochs"),
            (middle, "training loss", "seconds of training on one core"),
            (right, metric, "epochs"),
        ):
            panel.set_title(title, loc="left", fontweight="bold")
            panel.set_xlabel(unit)
        for panel in (left, middle):
            _loss_axis(panel, arms)
        handles, labels = left.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="lower center", ncols=8, frameon=False, fontsize=8)
        drawing.tight_layout(rect=(0, 0.08, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None, "Creator": None})


def _curves(
    panel: Any, arms: Arms, values: Callable[[Record], list[float]], *, by_time: bool = False
) -> None:
    for arm, runs in arms.runs.items():
        columns = list(zip(*map(values, runs.values()), strict=True))
        if not columns or (by_time and arm not in arms.secs):
            continue
        unit = arms.secs[arm] if by_time else 1
        x = [unit * epoch for epoch in range(1, len(columns) + 1)]
        finite = [[v for v in column if math.isfinite(v)] for column in columns]
        mean = [
            statistics.mean(f) if len(f) == len(c) else math.nan
            for f, c in zip(finite, columns, strict=True)
        ]
        shown = ARMS[arm]
        panel.plot(x, mean, color=shown.colour, label=shown.label, linewidth=1.4)
        low = [min(f, default=math.nan) for f in finite]
        high = [max(f, default=math.nan) for f in finite]
        panel.fill_between(x, low, high, color=shown.colour, alpha=0.15, linewidth=0)
    panel.set_xlim(left=0)
    if by_time and BASELINE in arms.secs:
        longest = _MOST_TIMES * arms.task.experiment.epochs * arms.secs[BASELINE]
        panel.set_xlim(right=min(panel.get_xlim()[1], longest))
    panel.xaxis.get_major_locator().set_params(integer=not by_time)
    if not panel.lines:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)


def _loss_axis(panel: Any, arms: Arms) -> None:
    """Logarithmic, with the mean of the lowest losses of D-RR as a dotted line.

    The first epoch, whose loss is far above the others, does not set the scale.
    """
    if not panel.lines:
        return
    baseline = arms.stat(BASELINE, best).mean
    if math.isfinite(baseline):
        panel.axhline(baseline, color=ARMS[BASELINE].colour, linewidth=0.8, linestyle=":")
    panel.set_yscale("log")
    values = [[y for y in line.get_ydata() if math.isfinite(y)] for line in panel.lines]
    later = [y for own in values for y in own[1:]]
    if later and max(map(max, filter(None, values))) > max(later):
        low, high = min(later), max(later)
        panel.set_ylim(low * (low / high) ** 0.06, high * (high / low) ** 0.06)
    panel.grid(True, which="minor", axis="y")
    pictures.log_ticks(panel)
