"""How long did the rounds take, and how near the optimum? One line, and two to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.report import canvas, series, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@canvas.own_settings
def draw_round_times(history: series.History, summary: series.Record, *, width: int) -> str:
    """Seconds a round, beside the optimum and an equal split if these are known."""
    shown = series.full_rounds(history)
    ids, secs = series.round_ids(shown), series.column(shown, "round_secs")
    best = series.column(shown, "optimal_round_secs")
    equal = series.number(summary.get("equal_split_secs"))
    top = _top(secs, best, equal)
    factor, unit = words.time_unit(top)

    narrow = width < canvas.NARROW
    figure, (axes,) = canvas.panels(width, 1, height=190, right=106 if narrow else 152)
    axes.set_ylim(0, top * factor)
    canvas.title(axes, f"{unit} a round")
    canvas.round_axis(axes, ids[0], ids[-1] + 1)
    ends = []  # (height, short name, name, colour) of each line
    known = secs[np.isfinite(secs)]
    if len(known):
        style: dict[str, Any] = {"colour": canvas.ACCENT, "linewidth": 1.5, "markersize": 6}
        canvas.curve(axes, ids + 0.5, secs * factor, ".-", band=True, **style)
        typical = float(np.median(known[-20:])) * factor
        ends.append((typical, "run", "this run", canvas.ACCENT))
    if np.isfinite(best).any():
        _level(axes, ids, best * factor, style="--", colour=canvas.INK)
        last = float(best[np.isfinite(best)][-1]) * factor
        ends.append((last, "optimum", "optimum", canvas.INK))
    if 0 < equal < top:
        _level(axes, ids, np.full(len(ids), equal * factor), style=":", colour=canvas.MUTED)
        ends.append((equal * factor, "equal", "equal split", canvas.MUTED))
    late = ids[secs > top] + 0.5
    late = late[:: len(late) // 60 + 1]  # about 60 triangles at most
    height = np.full(len(late), 0.985 * top * factor)
    axes.plot(late, height, "^", color=canvas.ACCENT, markersize=4, markeredgewidth=0)
    labels = [
        (place, f"{short} {place:.3g}" if narrow else f"{name} {place:.3g} {unit}", colour)
        for place, short, name, colour in ends
    ]
    if labels:
        canvas.end_labels(axes, labels)
    return canvas.to_svg(figure, f"round-times-{width}", "Time of each round")


def _top(secs: np.ndarray, best: np.ndarray, equal: float) -> float:
    """The end of the axis, seconds. A few slow rounds must not squeeze all the others."""
    known = secs[np.isfinite(secs)]
    usual = float(np.quantile(known, 0.98)) if len(known) else 0.0
    top = 1.15 * max(usual, np.nanmax(best, initial=0.0))
    return (max(top, 1.1 * equal) if 0 < equal < 4 * top else top) or 1.0


def _level(axes: Axes, ids: np.ndarray, values: np.ndarray, *, style: str, colour: str) -> None:
    keep = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    x, y = np.append(ids[keep], ids[-1] + 1), np.append(values[keep], values[-1])
    axes.plot(x, y, style, color=colour, linewidth=1.5, drawstyle="steps-post")
