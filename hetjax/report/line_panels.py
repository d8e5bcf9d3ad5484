"""How did numbers move over steps and over seconds? The same lines in two panels."""

from collections.abc import Sequence

import numpy as np

from hetjax.report import canvas, series, words

Line = tuple[str, str, str, str]  # field, colour, style, name
_CSS_STYLES = {"-": "solid", "--": "dashed", ":": "dotted"}


def key(lines: Sequence[Line]) -> str:
    """What each line is, as HTML."""
    parts = []
    for _, colour, shape, name in lines:
        style = shape.lstrip(canvas.MARKERS)
        width = 2 if style == ":" else 3
        stroke = f"border-top:{width}px {_CSS_STYLES[style]} var(--{canvas.VARIABLES[colour]})"
        parts.append(f'<span><i class="line" style="{stroke}"></i>{words.escaped(name)}</span>')
    return "".join(parts)


def known(lines: Sequence[Line], history: series.History) -> list[Line]:
    """Those whose field is a number in a record."""
    return [line for line in lines if np.isfinite(series.column(history, line[0])).any()]


@canvas.own_settings
def draw_lines(
    name: str,
    history: series.History,
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
        percent: show them in percent.
        levels: heights and colours of dotted lines.
        x_label: the label of the steps.
    """
    scale = 100 if percent else 1
    drawn = [scale * series.column(history, field) for field, *_ in lines]
    secs = series.column(history, "train_secs")
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    abscissas = [
        (x_label, series.column(history, "step")),
        (f"{unit}, without evaluating", secs * factor),
    ]
    figure, panels = canvas.panels(width, 2, beside=width >= canvas.NARROW)
    for axes, (label, x) in zip(panels, abscissas, strict=True):
        for height, colour in levels:
            axes.axhline(height, color=colour, linestyle=":", linewidth=1.6)
        if not percent:
            canvas.log_where_wide(axes, np.concatenate(drawn))
        for y, (_, colour, shape, _) in zip(drawn, lines, strict=True):
            at = np.isfinite(y)
            canvas.curve(axes, x[at], y[at], shape, colour=colour, linewidth=1.8)
        canvas.finish(axes, "%" if percent else name, x, label)
    return canvas.to_svg(figure, f"{name}-{width}", f"{name} over steps and over seconds")
