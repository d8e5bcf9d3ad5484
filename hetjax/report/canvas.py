"""What do all pictures share? Their size, axes, colours, and the way to inline SVG.

Colours are drawn as stand-ins that `to_svg` turns into CSS variables. So the page decides what
they are in light and in dark mode. Lengths are CSS pixels. Inline SVG needs no script and loads
nothing.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.report import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8  # with more workers colours are a ramp, and quotas are drawn as a heat map
TICK_STEPS = [1, 2, 5, 10]
NARROW = 500  # pixels; below it labels are short
MOST_MARKERS, MARKERS = 40, "os^."  # of a line

INK, MUTED, GRID, ACCENT = "#010201", "#010202", "#010203", "#010204"
WORKERS = [f"#01030{j}" for j in range(NUM_COLOURS)]
ON_WORKERS = [f"#01040{j}" for j in range(NUM_COLOURS)]
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", ACCENT: "accent"}
VARIABLES |= {stand_in: f"w{j}" for j, stand_in in enumerate(WORKERS)}
VARIABLES |= {stand_in: f"on-w{j}" for j, stand_in in enumerate(ON_WORKERS)}

AXIS_LABEL: dict[str, Any] = {"fontsize": 11, "color": MUTED}


def worker_colours(num_workers: int) -> list[str]:
    """One colour for each worker, the same in every picture: a palette, or a ramp for many."""
    if num_workers <= NUM_COLOURS:
        return WORKERS[:num_workers]
    import matplotlib
    from matplotlib import colors

    ramp = matplotlib.colormaps["viridis"](np.linspace(0.22, 0.9, num_workers))
    return [colors.to_hex(colour) for colour in ramp]


def ink_on(colour: str) -> str:
    """The colour of text that is legible on a worker's colour."""
    if colour in WORKERS:
        return ON_WORKERS[WORKERS.index(colour)]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.3 * red + 0.59 * green + 0.11 * blue > 125 else "#ffffff"


@contextlib.contextmanager
def _defaults() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["hatch.linewidth"] = 1.0
        yield


own_settings = _defaults()
"""Decorates what is to draw under matplotlib's own defaults, whatever the caller's settings are."""


def make_figure(width: float, height: float) -> Figure:
    """A figure of a size in pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)  # one point is one CSS pixel


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place given in pixels from the figure's left upper corner."""
    whole_width, whole_height = figure.get_size_inches() * 72
    box = (left / whole_width, 1 - (top + height) / whole_height)
    axes = figure.add_axes((*box, width / whole_width, height / whole_height))
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0, pad=5, labelsize=11, labelcolor=MUTED, which="both")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def panels(
    width: float,
    count: int,
    *,
    height: float = 170.0,
    gap: float = 78.0,
    right: float = 8.0,
    beside: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of axes one below the other, or side by side; lengths in pixels.

    Args:
        width: of the figure.
        count: number of axes.
        height: of each.
        gap: from one to the one below it.
        right: room beside them, such as for `end_labels`.
        beside: side by side.
    """
    columns, rows = (count, 1) if beside else (1, count)
    each = (width - 46 - right - 56 * (columns - 1)) / columns
    figure = make_figure(width, 32 + rows * (height + gap) - gap + 46)
    places = [(i, 0) if beside else (0, i) for i in range(count)]
    return figure, [
        add_axes(figure, 46 + column * (each + 56), 32 + row * (height + gap), each, height)
        for column, row in places
    ]


def title(axes: Axes, text: str, *, above: float = 10) -> None:
    """A title `above` pixels over the axes, from their left end."""
    axes.annotate(
        text, (0, 1), (0, above), "axes fraction", "offset points", fontsize=12, color=INK
    )


def curve(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    shape: str = "-",
    *,
    colour: str,
    band: bool = False,
    **style: Any,
) -> None:
    """A curve with a gap for each NaN, thinned if it is long.

    Args:
        axes: where it is drawn.
        x, y: f64[n].
        shape: as for `Axes.plot`; if many numbers are known, their markers are left out.
        colour: of curve and band.
        band: whether the least and the largest number of each thinned stretch are shown.
        style: other settings of the curve.
    """
    num_known = np.isfinite(y).sum()
    if not num_known:
        return
    middle, mean, low, high = series.thin(x, y, points=points(axes))
    if band and not np.array_equal(low, high, equal_nan=True):
        axes.fill_between(middle, low, high, color=colour, alpha=0.25, linewidth=0)
    shape = shape if num_known <= MOST_MARKERS else shape.lstrip(MARKERS)
    axes.plot(middle, mean, shape, color=colour, **{"linewidth": 1.6, "markersize": 4.5, **style})


def points(axes: Axes) -> int:
    """How many points of a curve these axes can show, one a pixel."""
    return int(min(series.MAX_POINTS, axes.get_window_extent().width))


def finish(axes: Axes, text: str, x: np.ndarray, label: str) -> None:
    """Gives axes whose curves are drawn a title, `x` from 0 to its end, and plain ticks.

    Their numbers are without powers of ten; short logarithmic axes have finer ones.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    is_log = axes.get_yscale() == "log"
    title(axes, f"{text}, log scale" if is_log else text)
    axes.set_xlim(0, 1.02 * np.nanmax(x, initial=0.0) or 1.0)
    axes.set_xlabel(label, **AXIS_LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICK_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    if is_log:
        low, high = axes.get_ylim()
        fine = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(10, subs=fine, numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())


def pixel(axes: Axes) -> float:
    """The width of a pixel in the unit of the horizontal axis."""
    return float(np.diff(axes.get_xlim())[0] / axes.get_window_extent().width)


def fill_boxes(
    axes: Axes, boxes: list[tuple[float, float, int]], *, half: float, **style: Any
) -> None:
    """Draws boxes `(left, right, row)` of height 2 `half` as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not boxes:
        return
    left, right, row = np.array(boxes, dtype=float).T
    x = np.stack([left, right, right, left, left], axis=1)
    y = np.stack([row - half, row - half, row + half, row + half, row - half], axis=1)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    path = Path(np.stack([x.ravel(), y.ravel()], axis=1), codes)
    # Not add_patch: it would read each corner to find limits, which are set already.
    axes.add_artist(PathPatch(path, **{"linewidth": 0, **style}))


def log_scale(axes: Axes, heights: np.ndarray) -> None:
    """A logarithmic vertical axis around heights above 0."""
    low, high = heights.min(), heights.max()
    room = max(1.25, np.sqrt(5 * low / high))  # the ends differ 5 times or more, for two ticks
    axes.set_yscale("log")
    axes.set_ylim(low / room, high * room)


def log_where_wide(axes: Axes, heights: np.ndarray) -> None:
    """A logarithmic vertical axis if the largest height is more than 8 times the least, above 0."""
    known = heights[np.isfinite(heights)]
    if len(known) > 1 and known.min() > 0 and known.max() > 8 * known.min():
        axes.set_yscale("log")


def whole_ticks(axes: Axes) -> None:
    """About five ticks at most, at whole numbers, on the vertical axis."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def round_axis(axes: Axes, first: float, last: float) -> None:
    """A horizontal axis of rounds, with ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlim(first, max(last, first + 1))
    most = max(2, int(axes.get_window_extent().width / 60))
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=TICK_STEPS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("round", **AXIS_LABEL)


def end_labels(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Names beside the right ends of curves, moved apart if they would overlap.

    Args:
        axes: those of the curves, with their vertical limits set.
        labels: `(height of the curve's end, text, colour)`.
    """
    from scipy import optimize

    places = [*axes.get_ylim(), *(place for place, _, _ in labels)]
    low, high, *heights = axes.yaxis.get_transform().transform(places)
    wanted = (np.array(heights) - low) / (high - low) * axes.get_window_extent().height
    order, step = np.argsort(wanted, kind="stable"), 15.0
    # The nearest places that are a step apart, all inside the picture.
    offsets = step * np.arange(len(order))
    spread = optimize.isotonic_regression(wanted[order] - offsets).x
    most = axes.get_window_extent().height + 4 - step * (len(order) - 1)
    spots = np.minimum(np.maximum(spread, 0), most) + offsets
    end: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    for spot, j in zip(spots, order, strict=True):
        _, text, colour = labels[j]
        axes.annotate("●", (1, 0), (6, spot), color=colour, fontsize=9, va="center", **end)
        axes.annotate(text, (1, 0), (18, spot), color=INK, fontsize=11, va="center", **end)


def _keep_inside(figure: Figure) -> None:
    """Has a number at the right end of an axis end there, if it would stick out of the figure."""
    for axes in figure.axes:
        for label in axes.get_xticklabels():
            inside = axes.get_xlim()[0] <= label.get_position()[0] <= axes.get_xlim()[1]
            if inside and label.get_window_extent().x1 > figure.bbox.x1:
                label.set_horizontalalignment("right")


def to_svg(figure: Figure, name: str, label: str) -> str:
    """`figure` as an inline ``<svg>``: no outside names, colours as CSS variables.

    Args:
        figure: what is drawn.
        name: different for each picture of a page; the names inside the picture derive from it.
        label: what a screen reader reads out in place of the picture.
    """
    import matplotlib

    _keep_inside(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    head = rf'<svg class="picture" role="img" aria-label="{label}" \1>'
    text = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', head, text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([^;\"']*?px)[^;\"]*", r"font: \1 var(--font)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", text)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"|<g/>', "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', _shortened, text)
    text = re.sub(r"<g>\s*(<path[^>]*/>|<text[^>]*>[^<]*</text>)\s*</g>", r"\1", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var(--{variable})")
    return re.sub(r"\s*\n\s*", "\n", text)


def _shortened(match: re.Match[str]) -> str:
    """An attribute whose numbers are pixels, to two decimals and without line breaks."""
    text = re.sub(r"(?<=\.\d\d)\d+", "", match.group())
    return re.sub(r"\s*\n([LMQC]?) ?", r"\1", text)
