"""How did numbers move over steps and over seconds? The same lines in two panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hetjax.report import canvas, series, words
from hetjax.report.series import FloatArray, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[str, str, str, str]  # field, colour, style, name
_CSS_STYLES = {"-": "solid", "--": "dashed", ":": "dotted"}


def key(lines: Sequence[Line]) -> str:
    """What each line is, as HTML."""
    parts = []
    for _, colour, style, name in lines:
        width = 2 if style == ":" else 3
        stroke = f"border-top:{width}px {_CSS_STYLES[style]} var(--{canvas.VARIABLES[colour]})"
        parts.append(f'<span><i class="line" style="{stroke}"></i>{words.escaped(name)}</span>')
    return "".join(parts)


@canvas.own_settings
def draw_lines(
    name: str,
    history: Sequence[Record],
    lines: Sequence[Line],
    *,
    width: int,
    percent: bool = False,
    levels: Sequence[tuple[float, str]] = (),
    x_label: str = "hypergradients",
) -> str:
    """Fields of the records, against hypergradients and, beside or below it, seconds of rounds.

    Args:
        name: of the numbers.
        history: records with `step` and `train_secs`.
        lines: fields, colours, styles and names.
        width: of the picture, in pixels.
        percent: in percent.
        levels: heights and colours of dotted lines.
        x_label: of the steps.
    """
    narrow = width < canvas.NARROW
    each = (width - 46 - 8) if narrow else (width - 46 - 8 - 56) / 2
    figure = canvas.make_figure(width, 2 * 248 if narrow else 248)
    secs = series.column(history, "train_secs")
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    panels = [
        (x_label, series.column(history, "step")),
        (f"{unit}, without evaluating", secs * factor),
    ]
    for i, (label, x) in enumerate(panels):
        left, top = (46, 30 + 248 * i) if narrow else (46 + i * (each + 56), 30)
        axes = canvas.add_axes(figure, left, top, each, 170)
        for height, colour in levels:
            axes.axhline(height, color=colour, linestyle=":", linewidth=1.6)
        _lines(axes, x, history, lines, 100 if percent else 1)
        axes.set_xlabel(label, **canvas.AXIS_LABEL)
        canvas.plain_ticks(axes, logarithmic=axes.get_yscale() == "log")
        scale = ", log scale" if axes.get_yscale() == "log" else ""
        canvas.title(axes, ("%" if percent else name) + scale)
    return canvas.to_svg(figure, f"{name}-{width}", f"{name} over steps and over seconds")


def _lines(
    axes: Axes, x: FloatArray, history: Sequence[Record], lines: Sequence[Line], scale: float
) -> None:
    drawn = {field: scale * series.column(history, field) for field, *_ in lines}
    everything = np.concatenate(list(drawn.values()))
    known = everything[np.isfinite(everything)]
    if scale == 1 and len(known) > 1 and known.min() > 0 and known.max() > 8 * known.min():
        axes.set_yscale("log")
    for field, colour, style, _ in lines:
        at = np.isfinite(drawn[field])
        line_x, mean, *_ = series.thin(x[at], drawn[field][at])
        axes.plot(line_x, mean, style, color=colour, linewidth=1.8)
    axes.set_xlim(0, max(float(np.nanmax(x, initial=0.0)) * 1.02, 1e-9))
