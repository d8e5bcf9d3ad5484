"""How did the quotas move? A line a worker, or a heat map for many workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.report import canvas, heat_map, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@canvas.own_settings
def draw_quotas(history: series.History, *, width: int) -> str:
    """Quotas over the rounds: lines for up to `canvas.NUM_COLOURS` workers, else a map."""
    shown = series.full_rounds(history)
    values, ids = series.matrix(shown, "quotas"), series.round_ids(shown)
    values[series.matrix(shown, "present") == 0] = np.nan
    if values.shape[1] > canvas.NUM_COLOURS:
        return heat_map.draw(
            values,
            ids,
            width=width,
            name="quotas",
            label="Quotas over the rounds, as a heat map",
            most=np.nanmax(values, initial=1.0),
        )
    return _quota_lines(values, ids, width=width)


def _quota_lines(values: np.ndarray, ids: np.ndarray, *, width: int) -> str:
    narrow = width < canvas.NARROW
    figure, (axes,) = canvas.panels(width, 1, height=190, right=58 if narrow else 112)
    canvas.title(axes, "microbatches a round")
    top = np.nanmax(values, initial=1.0)
    axes.set_ylim(min(-0.04 * top, -0.2), top * 1.08)
    canvas.round_axis(axes, ids[0], ids[-1] + 1)
    canvas.whole_ticks(axes)
    colours = canvas.worker_colours(values.shape[1])
    labels = []
    for j, colour in enumerate(colours):
        _steps(axes, ids, values[:, j], colour=colour, shift=1.6 * (j - (len(colours) - 1) / 2))
        last = values[-1, j]
        amount = f"{last:.0f}" if np.isfinite(last) else "absent"
        text = f"w{j}: {amount}" if narrow else f"worker {j}: {amount}"
        labels.append((float(np.nan_to_num(last)), text, colour))
    canvas.end_labels(axes, labels)
    return canvas.to_svg(figure, f"quotas-{width}", "Quotas over the rounds")


def _steps(axes: Axes, x: np.ndarray, y: np.ndarray, *, colour: str, shift: float) -> None:
    """A step line, moved up `shift` pixels, so equal ones do not hide each other."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    moved = axes.transData + ScaledTranslation(0, shift / 72, figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": colour, "transform": moved}
    changes = np.flatnonzero(~((y[1:] == y[:-1]) | (np.isnan(y[1:]) & np.isnan(y[:-1])))) + 1
    keep = np.concatenate([[0], changes]).astype(int)
    most = canvas.points(axes) // 6  # steps that can be told apart
    if len(keep) <= most:
        steps_x, steps_y = np.append(x[keep], x[-1] + 1), np.append(y[keep], y[-1])
        axes.plot(steps_x, steps_y, drawstyle="steps-post", linewidth=2, **style)
        return
    middle, mean, low, high = series.thin(x, y, points=most)
    axes.plot(middle, mean, linewidth=1.8, **style)
    axes.fill_between(middle, low, high, linewidth=0, alpha=0.2, **style)
