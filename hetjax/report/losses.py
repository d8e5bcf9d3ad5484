"""What was learned, and how soon? Loss against time and epochs, and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.report import canvas, series, words
from hetjax.report.series import FloatArray, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVALUATION_STYLES = [(canvas.ACCENT, "o-"), (canvas.INK, "s--"), (canvas.MUTED, "^:")]
MOST_MARKERS = 24
METRIC_HEIGHT = 150  # pixels


@canvas.own_settings
def draw_losses(history: Sequence[Record], summary: Record, *, width: int) -> str:
    """Training and evaluated loss against time, where there is one, and against epochs."""
    secs = series.clock(history)
    train, evaluated = series.column(history, "loss"), series.evaluations(history, "loss")
    everything = np.concatenate([series.thin(secs, train)[1], *evaluated.values()])
    known = everything[np.isfinite(everything)]
    logarithmic = len(known) > 1 and known.min() > 0 and known.max() > 8 * known.min()
    narrow = width < canvas.NARROW
    each = (width - 46 - 8) if narrow else (width - 46 - 8 - 56) / 2
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    panels = [("epochs", "epochs", series.epochs_done(history, summary))]
    if series.has_clock(summary):
        panels = [("time", f"{unit} since the start", secs * factor), *panels]
    elif not narrow:
        each = width - 46 - 8
    figure = canvas.make_figure(width, 268 * len(panels) if narrow else 268)
    for i, (against, label, x) in enumerate(panels):
        left, top = (46, 32 + 268 * i) if narrow else (46 + i * (each + 56), 32)
        axes = canvas.add_axes(figure, left, top, each, 190)
        if logarithmic:
            axes.set_yscale("log")
        _training_line(axes, x, train)
        _evaluated_lines(axes, x, evaluated)
        _from_zero(axes, x)
        if not len(known):
            _say_empty(axes, "no finite loss")
        axes.set_xlabel(label, **canvas.AXIS_LABEL)
        canvas.plain_ticks(axes, logarithmic=logarithmic)
        scale = ", log scale" if logarithmic else ""
        canvas.title(axes, f"loss against {against}{scale}")
    return canvas.to_svg(
        figure, f"losses-{width}", "Loss " + " and ".join(f"against {panel[0]}" for panel in panels)
    )


@canvas.own_settings
def draw_accuracies(history: Sequence[Record], summary: Record, *, width: int) -> str:
    """Evaluated accuracy, in percent, against epochs."""
    found = {k: 100 * v for k, v in series.evaluations(history, "accuracy").items()}
    figure = canvas.make_figure(width, 248)
    axes = canvas.add_axes(figure, 46, 32, width - 46 - 8, 170)
    x = series.epochs_done(history, summary)
    train = series.training_metrics(history).get("accuracy")
    drawn = list(found.values())
    if train is not None:
        _training_line(axes, x, 100 * train)
        drawn.append(100 * series.thin(x, train)[1])
    _evaluated_lines(axes, x, found)
    known = np.concatenate([v[np.isfinite(v)] for v in drawn])
    low = max(0.0, known.min() - max(2.0, 0.08 * np.ptp(known)))
    axes.set_ylim(low, min(101.0, known.max() + max(1.0, 0.08 * np.ptp(known))))
    ends = x[np.isfinite(x)]
    axes.set_xlim(0, max(ends.max(initial=0.0) * 1.02, 1e-9))
    axes.set_xlabel("epochs", **canvas.AXIS_LABEL)
    canvas.plain_ticks(axes, logarithmic=False)
    canvas.title(axes, "accuracy, %")
    return canvas.to_svg(figure, f"accuracies-{width}", "Accuracy against epochs")


@canvas.own_settings
def draw_metrics(
    names: Sequence[str], history: Sequence[Record], summary: Record, *, width: int
) -> str:
    """Metrics of the loss function against epochs, one below the other."""
    found, x = series.training_metrics(history), series.epochs_done(history, summary)
    figure, panels = _panels(names, x, width=width)
    for axes, name in zip(panels, names, strict=True):
        _training_line(axes, x, found[name])
    return canvas.to_svg(figure, f"metrics-{width}", "Training metrics against epochs")


@canvas.own_settings
def draw_evaluated(
    found: Mapping[str, Mapping[str, FloatArray]],
    history: Sequence[Record],
    summary: Record,
    *,
    width: int,
) -> str:
    """Metrics of the evaluated sets against epochs, one below the other."""
    x = series.epochs_done(history, summary)
    figure, panels = _panels([name.replace("_", " ") for name in found], x, width=width)
    for axes, of_sets in zip(panels, found.values(), strict=True):
        _evaluated_lines(axes, x, of_sets)
    return canvas.to_svg(figure, f"evaluated-{width}", "Evaluated metrics against epochs")


def _panels(titles: Sequence[str], x: FloatArray, *, width: int) -> tuple[Figure, list[Axes]]:
    """A figure of axes against epochs, one below the other."""
    figure = canvas.make_figure(width, METRIC_HEIGHT * len(titles) + 28)
    panels = []
    for index, title in enumerate(titles):
        top = 32 + METRIC_HEIGHT * index
        axes = canvas.add_axes(figure, 46, top, width - 46 - 8, METRIC_HEIGHT - 50)
        _from_zero(axes, x)
        canvas.plain_ticks(axes, logarithmic=False)
        canvas.title(axes, title.replace("$", r"\$"))  # no formula
        panels.append(axes)
    axes.set_xlabel("epochs", **canvas.AXIS_LABEL)
    return figure, panels


def _training_line(axes: Axes, x: FloatArray, train: FloatArray) -> None:
    middle, mean, low, high = series.thin(x, train)
    if np.isfinite(mean).any():
        style: dict[str, Any] = {"color": canvas.MUTED}
        axes.fill_between(middle, low, high, alpha=0.25, linewidth=0, **style)
        axes.plot(middle, mean, ".-" if len(middle) < 40 else "-", linewidth=0.9, **style)


def _evaluated_lines(axes: Axes, x: FloatArray, evaluated: Mapping[str, FloatArray]) -> None:
    """The first three evaluated numbers, each in its own style, with markers if few."""
    for values, (colour, style) in zip(evaluated.values(), EVALUATION_STYLES, strict=False):
        at = np.flatnonzero(np.isfinite(values))
        shape = style if len(at) <= MOST_MARKERS else style[1:]
        line_x, mean, _, _ = series.thin(x[at], values[at])
        axes.plot(line_x, mean, shape, color=colour, linewidth=1.6, markersize=4.5)


def _from_zero(axes: Axes, x: FloatArray) -> None:
    ends = x[np.isfinite(x)]
    if len(ends):
        axes.set_xlim(0, max(ends.max() * 1.02, 1e-9))


def _say_empty(axes: Axes, text: str) -> None:
    centred: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.set_ylim(0, 1)
    axes.text(0.5, 0.5, text, fontsize=12, color=canvas.MUTED, **centred)
