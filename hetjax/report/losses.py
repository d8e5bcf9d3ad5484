"""What was learned, and how soon? Loss against time and epochs, accuracy, and other metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hetjax.report import canvas, line_panels, series, words

EVALUATION_STYLES = [(canvas.ACCENT, "o-"), (canvas.INK, "s--"), (canvas.MUTED, "^:")]

Lines = tuple[np.ndarray | None, Mapping[str, np.ndarray]]  # of training, and evaluated by name


@canvas.own_settings
def draw_losses(
    history: series.History, summary: series.Record, *, width: int, most_panels: int = 2
) -> str:
    """Training and evaluated loss against time, if there is a clock, and against epochs."""
    abscissas = _abscissas(history, summary)[:most_panels]
    figure, panels = canvas.panels(width, len(abscissas), height=190, beside=width >= canvas.NARROW)
    train, evaluated = series.column(history, "loss"), series.evaluations(history, "loss")
    for axes, (name, label, x) in zip(panels, abscissas, strict=True):
        everything = np.concatenate([series.thin(x, train)[1], *evaluated.values()])
        canvas.log_where_wide(axes, everything)
        _draw(axes, x, (train, evaluated))
        if not np.isfinite(everything).any():
            axes.set_ylim(0, 1)
            axes.set_title("no finite loss", y=0.5, va="center", fontsize=12, color=canvas.MUTED)
        canvas.finish(axes, f"loss against {name}", x, label)
    label = "Loss " + " and ".join(f"against {against}" for against, *_ in abscissas)
    return canvas.to_svg(figure, f"losses-{width}", label)


def _abscissas(
    history: series.History, summary: series.Record
) -> list[tuple[str, str, np.ndarray]]:
    """Name, label and f64[num_rounds] of what a loss is drawn against."""
    against_epochs = ("epochs", "epochs", series.epochs_done(history, summary))
    if not series.has_clock(summary):
        return [against_epochs]
    secs = series.clock(history)
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    return [("time", f"{unit} since the start", secs * factor), against_epochs]


@canvas.own_settings
def draw_accuracies(history: series.History, summary: series.Record, *, width: int) -> str:
    """Evaluated accuracy, in percent, against epochs."""
    found = {k: 100 * v for k, v in series.evaluations(history, "accuracy").items()}
    train = 100 * series.training_metrics(history).get("accuracy", np.full(len(history), np.nan))
    figure, (axes,) = canvas.panels(width, 1)
    x = series.epochs_done(history, summary)
    _draw(axes, x, (train, found))
    drawn = np.concatenate([series.thin(x, train)[1], *found.values()])
    known = drawn[np.isfinite(drawn)]
    low = max(0.0, known.min() - max(2.0, 0.08 * np.ptp(known)))
    axes.set_ylim(low, min(101.0, known.max() + max(1.0, 0.08 * np.ptp(known))))
    canvas.finish(axes, "accuracy, %", x, "epochs")
    return canvas.to_svg(figure, f"accuracies-{width}", "Accuracy against epochs")


@canvas.own_settings
def draw_metrics(
    metrics: Mapping[str, Lines], history: series.History, summary: series.Record, *, width: int
) -> str:
    """Metrics by their names, against epochs, one below the other."""
    x = series.epochs_done(history, summary)
    figure, panels = canvas.panels(width, len(metrics), height=100, gap=50)
    for axes, (name, lines) in zip(panels, metrics.items(), strict=True):
        _draw(axes, x, lines)
        no_formula = name.replace("_", " ").replace("$", r"\$")
        canvas.finish(axes, no_formula, x, "epochs" if axes is panels[-1] else "")
    return canvas.to_svg(figure, f"metrics-{width}", "Metrics against epochs")


def _draw(axes: canvas.Axes, x: np.ndarray, lines: Lines) -> None:
    """The curve of training, and the first three evaluated ones, each in its own style."""
    train, evaluated = lines
    if train is not None:
        style: dict[str, Any] = {"colour": canvas.MUTED, "linewidth": 0.9, "markersize": 6}
        canvas.curve(axes, x, train, ".-", band=True, **style)
    for values, (colour, shape) in zip(evaluated.values(), EVALUATION_STYLES, strict=False):
        at = np.isfinite(values)
        canvas.curve(axes, x[at], values[at], shape, colour=colour)


def key(found: Collection[str], *, has_training: bool = False) -> str:
    """Says what the lines are: that of training, and the evaluated ones of these names."""
    names = [name.replace("_", " ") for name in found]
    for i, name in enumerate(found):
        if f"worst_{name}" in found:
            names[i] += ", mean of the replicas"
        elif name.startswith("worst_"):
            names[i] = f"{names[i].removeprefix('worst ')}, worst replica"
    styled = zip(EVALUATION_STYLES, names, strict=False)
    lines = [("", colour, shape, name) for (colour, shape), name in styled]
    training = [("", canvas.MUTED, "-", "training, each round")]
    return line_panels.key([*training, *lines] if has_training else lines)
