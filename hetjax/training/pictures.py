"""What do the rounds of a run look like? The pictures of the report, as inline SVG.

Each picture is a function of the lines of ``metrics.jsonl`` (and, where it needs one, the
summary) that returns the text of one ``<svg>`` element `width` CSS pixels wide. Colours are
written as CSS variables, so that the page decides what they are in light and in dark mode;
what is inline needs no script and loads nothing. Missing and non-finite numbers leave gaps.

Lines longer than `MAX_POINTS` are drawn as the mean and the range of equal stretches of
rounds, so that the size of a picture does not grow with the length of the run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 500
NUM_COLOURS = 8  # workers beyond it are drawn in a ramp, and quotas as a heat map
HEAT_COLUMNS = 240
STEPS = [1, 2, 5, 10]  # of ticks

# Stand-ins that matplotlib can draw with; `to_svg` turns them into var(--name).
INK, MUTED, GRID, ACCENT = "#010201", "#010202", "#010203", "#010204"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", ACCENT: "accent"}
VARIABLES |= {f"#01030{j}": f"w{j}" for j in range(NUM_COLOURS)}
VARIABLES |= {f"#01040{j}": f"on-w{j}" for j in range(NUM_COLOURS)}

Record = Mapping[str, Any]
FloatArray = np.ndarray


def number(value: Any) -> float:
    """`value` as a finite float, or NaN for what is missing, not a number or infinite."""
    if isinstance(value, float | int | np.number):
        return float(value) if np.isfinite(value) else float("nan")
    return float("nan")


def column(history: Sequence[Record], name: str) -> FloatArray:
    """Field `name` of each round, f64[num_rounds]; NaN where there is none."""
    values = [record.get(name) for record in history]
    try:  # the usual case, much faster; None becomes NaN
        result = np.array(values, dtype=float).reshape(len(values))
        return np.where(np.isfinite(result), result, np.nan)
    except (TypeError, ValueError):
        return np.array([number(value) for value in values], dtype=float)


def matrix(history: Sequence[Record], name: str) -> FloatArray:
    """Field `name` of each round and worker, f64[num_rounds, num_workers], NaN for gaps."""
    rows = [record.get(name) for record in history]
    lists = [row if isinstance(row, list | tuple | np.ndarray) else [] for row in rows]
    num_workers = count_workers(history)
    if all(len(row) == num_workers for row in lists):
        try:  # as in `column`
            result = np.array(lists, dtype=float).reshape(len(lists), num_workers)
            return np.where(np.isfinite(result), result, np.nan)
        except (TypeError, ValueError):
            pass
    result = np.full((len(lists), num_workers), np.nan)
    for i, row in enumerate(lists):
        cells = [number(value) for value in row[:num_workers]]
        result[i, : len(cells)] = cells
    return result


def count_workers(history: Sequence[Record]) -> int:
    """The largest number of workers that a round speaks of, which a run never changes."""
    names = ("quotas", "microbatches_done", "compute_secs", "present")
    ends = [*history[:20], *history[-20:]]
    cells = (record.get(name) for record in ends for name in names)
    return max((len(c) for c in cells if isinstance(c, list | tuple | np.ndarray)), default=0)


def round_ids(history: Sequence[Record]) -> FloatArray:
    """The number of each round; its place in the file where the line does not say."""
    ids = column(history, "round")
    return np.where(np.isnan(ids), np.arange(len(history)), ids)


def full_rounds(history: Sequence[Record]) -> list[Record]:
    """The rounds without the short one that ends an epoch, which says nothing of speeds."""
    if any("full" in record for record in history):
        return [record for record in history if record.get("full", True)] or list(history)
    if not history:
        return []
    budgets = np.nansum(matrix(history, "quotas"), axis=1)
    values, counts = np.unique(budgets, return_counts=True)
    usual = values[np.argmax(counts)]
    epochs = [record.get("epoch") for record in history] + [None]
    return [
        record
        for i, record in enumerate(history)
        if budgets[i] >= usual or epochs[i] == epochs[i + 1]
    ]


def epochs_done(history: Sequence[Record], summary: Record) -> FloatArray:
    """Passes over the data at the end of each round: examples processed / examples a pass."""
    processed = column(history, "examples_processed")
    epoch = column(history, "epoch")
    whole, total = number(summary.get("epochs")), number(summary.get("examples_processed"))
    ends = np.flatnonzero(np.diff(epoch) > 0)  # the last round of each finished epoch
    if len(ends) and epoch[ends[-1]] >= 0 and processed[ends[-1]] > 0:
        return processed * ((epoch[ends[-1]] + 1) / processed[ends[-1]])
    if whole > 0 and total > 0:
        return processed * (whole / total)
    top = np.nanmax(processed, initial=0.0)
    return processed / top if top > 0 else np.full(len(history), np.nan)


def clock(history: Sequence[Record]) -> FloatArray:
    """Seconds of the run at the end of each round."""
    secs = np.nan_to_num(column(history, "round_secs"))
    starts = column(history, "start_secs")
    return np.where(np.isnan(starts), np.cumsum(secs) - secs, starts) + secs


def thin(x: FloatArray, y: FloatArray, *, points: int = MAX_POINTS) -> tuple[FloatArray, ...]:
    """`(x, mean, low, high)` of at most `points` equal stretches of a line.

    Args:
        x, y: f64[n]; NaN in `y` is left out of a stretch, and is its value where all are NaN.
        points: the most points that are wanted.
    Example:
        >>> y = np.array([1.0, 3.0, np.nan, 5.0])
        >>> x, mean, low, high = thin(np.arange(4.0), y, points=2)
        >>> x.tolist(), mean.tolist(), low.tolist(), high.tolist()
        ([0.5, 2.5], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
    """
    if len(y) <= points:
        return x, y, y, y
    starts = np.linspace(0, len(y), points, endpoint=False).astype(int)
    known = np.add.reduceat(np.isfinite(y).astype(float), starts)
    sums = np.add.reduceat(np.nan_to_num(y), starts)
    mean = np.divide(sums, known, out=np.full(points, np.nan), where=known > 0)
    widths = np.diff(np.append(starts, len(y)))
    middle = np.add.reduceat(x, starts) / widths
    return middle, mean, np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)


def time_unit(secs: float) -> tuple[float, str]:
    """The factor and the name of a unit in which `secs` reads well: `(1000.0, "ms")`."""
    limits = [(2e-3, 1e6, "µs"), (2.0, 1e3, "ms"), (300.0, 1.0, "s"), (10800.0, 1 / 60, "min")]
    for limit, factor, name in limits:
        if not secs >= limit:
            return factor, name
    return 1 / 3600, "h"


def worker_colours(num_workers: int) -> list[str]:
    """One colour for each worker, the same in every picture: a palette, or a ramp if many."""
    if num_workers <= NUM_COLOURS:
        return [f"#01030{j}" for j in range(num_workers)]
    import matplotlib
    from matplotlib import colors

    ramp = matplotlib.colormaps["viridis"](np.linspace(0.22, 0.9, num_workers))
    return [colors.to_hex(colour) for colour in ramp]


# --- drawing ---------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)  # one point is one CSS pixel


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
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


def _title(axes: Axes, text: str, *, above: float = 10) -> None:
    axes.annotate(
        text, (0, 1), (0, above), "axes fraction", "offset points", fontsize=12, color=INK
    )


def _whole_rounds(axes: Axes, first: float, last: float) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlim(first, max(last, first + 1))
    width = axes.get_window_extent().width
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width / 60)), integer=True, steps=STEPS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("round", fontsize=11, color=MUTED)


def _end_labels(axes: Axes, places: list[float], texts: list[str], colours: list[str]) -> None:
    """Names beside the right ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height
    wanted = np.array([(place - low) / (high - low) * height for place in places])
    order, step = np.argsort(wanted, kind="stable"), 15.0
    spots = wanted[order].copy()
    for _ in range(200):
        push = np.maximum(step - np.diff(spots), 0) / 2
        if not push.max(initial=0) > 0.1:
            break
        spots[:-1] -= push
        spots[1:] += push
    for spot, j in zip(spots, order, strict=True):
        end: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate("●", (1, 0), (6, spot), color=colours[j], fontsize=9, va="center", **end)
        axes.annotate(texts[j], (1, 0), (18, spot), color=INK, fontsize=11, va="center", **end)


def to_svg(figure: Figure, name: str, label: str) -> str:
    """`figure` as an inline ``<svg>``: no outside names, colours as CSS variables."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    head = f'<svg class="picture" role="img" aria-label="{label}" {view.group()}>'
    text = re.sub(r"<svg[^>]*>", head, text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([^;\"']*?px)[^;\"]*", r"font: \1 var(--font)", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var(--{variable})")
    return re.sub(r"\s*\n\s*", "\n", text)


def _draw(function: Any) -> Any:
    """Draws under matplotlib's own defaults, whatever the caller's settings are."""

    def drawn(*args: Any, **kwargs: Any) -> str:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams["hatch.linewidth"] = 1.0
            return function(*args, **kwargs)

    drawn.__doc__ = function.__doc__
    return drawn


# --- the pictures ----------------------------------------------------------------------------


def first_and_last(history: Sequence[Record], count: int) -> list[Sequence[Record]]:
    """The first `count` rounds and, of the others, the last `count`.

    Example:
        >>> [[r["round"] for r in part] for part in first_and_last([{"round": 0}], 6)]
        [[0]]
    """
    first, rest = history[:count], history[count:]
    return [part for part in (first, rest[-count:]) if part]


def _lay_out(rounds: Sequence[Record]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """`(start, local, gap, pause)` seconds of rounds in a row, long pauses cut short."""
    busiest = np.nanmax(np.nan_to_num(matrix(rounds, "compute_secs")), axis=1, initial=0.0)
    local = column(rounds, "local_secs")
    local = np.maximum(np.where(np.isnan(local), busiest, local), 0)
    whole = column(rounds, "round_secs")
    pause = np.maximum(np.where(np.isnan(whole), local, whole) - local, 0)
    longest = 0.3 * max(float(np.median(local)), 1e-9)
    gap = np.where(pause > 1.5 * longest, longest, pause)
    ends = np.cumsum(local + gap)
    return ends - (local + gap), local, gap, np.where(gap < pause, pause, 0)


@_draw
def timeline(history: Sequence[Record], *, width: int, rounds: int) -> str:
    """Computing and waiting of each worker in the first and in the last `rounds` rounds."""
    parts = first_and_last(history, rounds)
    num_workers, narrow = count_workers(history), width < 500
    row = 25.0 if num_workers <= 8 else 17.0 if num_workers <= 16 else 300.0 / num_workers
    left, head, foot = (30 if narrow else 66), 50, 46
    panel = row * num_workers
    figure = _figure(width, len(parts) * (panel + head + foot))
    spans = [float((part[0] + part[1] + part[2])[-1]) for part in map(_lay_out, parts)]
    factor, unit = time_unit(max(spans))
    for i, part in enumerate(parts):
        top = head + i * (panel + head + foot)
        axes = _axes(figure, left, top, width - left - 8, panel)
        axes.set_xlim(0, max(max(spans), 1e-9) * factor)
        axes.set_ylim(num_workers - 0.5, -0.5)
        named = "First rounds" if i == 0 else "Last rounds"
        _title(axes, named if len(parts) > 1 else "All rounds", above=28)
        _rows(axes, part, factor=factor, row=row, narrow=narrow)
        axes.set_xlabel(
            f"{unit} since the start of round {round_ids(part)[0]:,.0f}",
            fontsize=11,
            color=MUTED,
        )
    return to_svg(figure, f"timeline-{width}", "Timeline of each worker")


def _rows(axes: Axes, part: Sequence[Record], *, factor: float, row: float, narrow: bool) -> None:
    """The bars of some rounds in a row: one path a worker, and one for all the waiting."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    start, local, gap, pause = (secs * factor for secs in _lay_out(part))
    compute = np.minimum(np.nan_to_num(matrix(part, "compute_secs")) * factor, local[:, None])
    done, here = matrix(part, "microbatches_done"), matrix(part, "present") != 0
    num_workers = compute.shape[1]
    colours = worker_colours(num_workers)
    pixel = np.diff(axes.get_xlim())[0] / axes.get_window_extent().width
    half = 0.5 - 0.5 * min(6.0 / row, 0.2)
    waiting = []
    for j in range(num_workers):
        bars = []
        for i in range(len(part)):
            split, end = start[i] + compute[i, j], start[i] + local[i]
            if compute[i, j] > 0:
                bars.append(_box(start[i], split, j, half))
            if here[i, j] and end - split > 0.5 * pixel:
                waiting.append(_box(split, end, j, half))
            if row >= 14 and compute[i, j] > 16 * pixel and np.isfinite(done[i, j]):
                ink = f"#01040{j}" if num_workers <= NUM_COLOURS else _on(colours[j])
                text = f"{done[i, j]:.0f}"
                middle = start[i] + compute[i, j] / 2
                axes.text(
                    middle,
                    j,
                    text,
                    color=ink,
                    fontsize=11 if row > 20 else 10,
                    ha="center",
                    va="center_baseline",
                )
        if bars:
            path = Path.make_compound_path(*bars)
            axes.add_patch(PathPatch(path, facecolor=colours[j], linewidth=0))
    if waiting:
        path = Path.make_compound_path(*waiting)
        hatch = "////" if row >= 14 else None
        face = "none" if hatch else MUTED
        axes.add_patch(
            PathPatch(
                path,
                facecolor=face,
                edgecolor=MUTED,
                hatch=hatch,
                linewidth=0,
                alpha=0.65 if hatch else 0.22,
            )
        )
    _round_names(axes, part, start=start, local=local, gap=gap, pause=pause / factor)
    every = 1 if num_workers <= 16 else 8
    axes.set_yticks(range(0, num_workers, every))
    axes.set_yticklabels([f"w{j}" if narrow else f"worker {j}" for j in axes.get_yticks()])
    axes.grid(False)
    axes.tick_params(axis="y", labelcolor=INK)


def _round_names(
    axes: Axes,
    part: Sequence[Record],
    *,
    start: FloatArray,
    local: FloatArray,
    gap: FloatArray,
    pause: FloatArray,
) -> None:
    pixel = np.diff(axes.get_xlim())[0] / axes.get_window_extent().width
    for i, name in enumerate(round_ids(part)):
        above = axes.get_xaxis_transform()
        style: dict[str, Any] = {
            "transform": above,
            "color": MUTED,
            "va": "bottom",
            "clip_on": False,
        }
        wide = local[i] > 62 * pixel
        text = f"round {name:.0f}" if wide else f"{name:.0f}" if local[i] > 22 * pixel else ""
        axes.text(start[i], 1.0, text, fontsize=11, **style)
        axes.axvline(start[i], color=GRID, linewidth=1)
        if pause[i] > 0:
            factor, unit = time_unit(pause[i])
            last = i + 1 == len(part)
            room = axes.get_xlim()[1] - start[i] - local[i] if last else gap[i]
            text = f"// {pause[i] * factor:.3g} {unit}" if room > 54 * pixel else "//"
            axes.text(start[i] + local[i] + 3 * pixel, 1.0, text, fontsize=10, **style)


def _box(left: float, right: float, row: int, half: float) -> Any:
    from matplotlib.path import Path

    corners = [(left, row - half), (right, row - half), (right, row + half), (left, row + half)]
    return Path([*corners, corners[0]], closed=True)


def _on(colour: str) -> str:
    """Black or white, whichever reads on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.3 * red + 0.59 * green + 0.11 * blue > 125 else "#ffffff"


@_draw
def quotas(history: Sequence[Record], *, width: int) -> str:
    """Quotas over the rounds: a line a worker, or a heat map for more than eight."""
    shown = full_rounds(history)
    values, ids = matrix(shown, "quotas"), round_ids(shown)
    values[matrix(shown, "present") == 0] = np.nan
    if values.shape[1] > NUM_COLOURS:
        return _quota_map(values, ids, width=width)
    narrow = width < 500
    right = 58 if narrow else 112
    figure = _figure(width, 256)
    axes = _axes(figure, 34, 14, width - 34 - right, 196)
    top = np.nanmax(values, initial=1.0)
    axes.set_ylim(min(-0.04 * top, -0.2), top * 1.08)
    _whole_rounds(axes, ids[0], ids[-1] + 1)
    _whole_ticks(axes)
    colours = worker_colours(values.shape[1])
    places, texts = [], []
    for j, colour in enumerate(colours):
        _steps(axes, ids, values[:, j], colour=colour, shift=1.6 * (j - (len(colours) - 1) / 2))
        last = values[-1, j]
        places.append(float(np.nan_to_num(last)))
        amount = f"{last:.0f}" if np.isfinite(last) else "absent"
        texts.append(f"w{j}: {amount}" if narrow else f"worker {j}: {amount}")
    _end_labels(axes, places, texts, colours)
    return to_svg(figure, f"quotas-{width}", "Quotas over the rounds")


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _steps(axes: Axes, x: FloatArray, y: FloatArray, *, colour: str, shift: float) -> None:
    """A step line, `shift` pixels up so that equal ones do not hide each other."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    moved = axes.transData + ScaledTranslation(0, shift / 72, figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": colour, "transform": moved}
    changes = np.flatnonzero(~((y[1:] == y[:-1]) | (np.isnan(y[1:]) & np.isnan(y[:-1])))) + 1
    keep = np.concatenate([[0], changes]).astype(int)
    if len(keep) <= MAX_POINTS:
        steps_x, steps_y = np.append(x[keep], x[-1] + 1), np.append(y[keep], y[-1])
        axes.plot(steps_x, steps_y, drawstyle="steps-post", linewidth=2, **style)
        return
    middle, mean, low, high = thin(x, y)
    axes.plot(middle, mean, linewidth=1.8, **style)
    axes.fill_between(middle, low, high, linewidth=0, alpha=0.2, **style)


def _quota_map(values: FloatArray, ids: FloatArray, *, width: int) -> str:
    num_rounds, num_workers = values.shape
    if num_rounds > HEAT_COLUMNS:
        columns = [thin(ids, values[:, j], points=HEAT_COLUMNS)[1] for j in range(num_workers)]
        values = np.stack(columns, axis=1)
    height = 260.0 if num_workers <= 32 else 320.0
    figure = _figure(width, height + 62)
    axes = _axes(figure, 48, 14, width - 48 - 58, height)
    extent = (ids[0], ids[-1] + 1, num_workers - 0.5, -0.5)
    limits = {"vmin": 0, "vmax": np.nanmax(values, initial=1.0)}
    image = axes.imshow(
        values.T,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        extent=extent,
        **limits,
    )
    axes.grid(False)
    _whole_rounds(axes, ids[0], ids[-1] + 1)
    axes.set_ylabel("worker", fontsize=11, color=MUTED)
    bar = figure.colorbar(image, cax=_axes(figure, width - 46, 14, 12, height))
    bar.outline.set_visible(False)  # type: ignore[operator]
    _whole_ticks(bar.ax)
    bar.ax.tick_params(length=0, labelsize=11, labelcolor=MUTED)
    bar.ax.grid(False)
    return to_svg(figure, f"quotas-{width}", "Quotas over the rounds, as a heat map")


@_draw
def round_times(history: Sequence[Record], summary: Record, *, width: int) -> str:
    """Seconds a round, beside the optimum and an equal split where these are known."""
    shown = full_rounds(history)
    ids, secs = round_ids(shown), column(shown, "round_secs")
    best = column(shown, "optimal_round_secs")
    if np.isnan(best).all():
        best = np.full(len(shown), number(summary.get("optimal_round_secs")))
    equal = number(summary.get("equal_split_secs"))
    known = secs[np.isfinite(secs)]
    usual = float(np.quantile(known, 0.98)) if len(known) else 0.0
    first = float(np.max(known[:3])) if len(known) else 0.0
    top = 1.15 * max(usual, min(first, 3 * usual), np.nanmax(best, initial=0.0))
    top = max(top, 1.1 * equal) if 0 < equal < 4 * max(top, 1e-12) else top
    top = top if top > 0 else 1.0
    factor, unit = time_unit(top)

    narrow = width < 500
    right = 106 if narrow else 152
    figure = _figure(width, 268)
    axes = _axes(figure, 40, 32, width - 40 - right, 190)
    axes.set_ylim(0, top * factor)
    _title(axes, f"{unit} a round")
    _whole_rounds(axes, ids[0], ids[-1] + 1)
    x = ids + 0.5
    middle, mean, low, high = thin(x, secs * factor)
    places, texts, colours = [], [], []
    if len(known):
        if len(known) == 1 or len(middle) < 40:
            axes.plot(middle, mean, ".", color=ACCENT, markersize=6)
        axes.fill_between(middle, low, high, color=ACCENT, alpha=0.25, linewidth=0)
        axes.plot(middle, mean, color=ACCENT, linewidth=1.5)
        typical = float(np.median(known[-20:])) * factor
        places.append(typical)
        texts.append(f"run {typical:.3g}" if narrow else f"this run {typical:.3g} {unit}")
        colours.append(ACCENT)
    if np.isfinite(best).any():
        _level(axes, ids, best * factor, style="--", colour=INK)
        last = float(best[np.isfinite(best)][-1]) * factor
        places.append(last)
        texts.append(f"optimum {last:.3g}" if narrow else f"optimum {last:.3g} {unit}")
        colours.append(INK)
    if 0 < equal < top:
        _level(axes, ids, np.full(len(ids), equal * factor), style=":", colour=MUTED)
        places.append(equal * factor)
        value = f"{equal * factor:.3g}"
        texts.append(f"equal {value}" if narrow else f"equal split {value} {unit}")
        colours.append(MUTED)
    over = x[secs > top]
    if len(over):
        places_over = over if len(over) <= 60 else over[:: len(over) // 60 + 1]
        axes.plot(places_over, np.full(len(places_over), top * factor * 0.985), "^", **_CARET)
    if places:
        _end_labels(axes, places, texts, colours)
    return to_svg(figure, f"round-times-{width}", "Time of each round")


_CARET: dict[str, Any] = {"color": ACCENT, "markersize": 4, "markeredgewidth": 0}


def _level(axes: Axes, ids: FloatArray, values: FloatArray, *, style: str, colour: str) -> None:
    keep = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    if len(keep) > MAX_POINTS:
        keep = keep[:: len(keep) // MAX_POINTS + 1]
    x, y = np.append(ids[keep], ids[-1] + 1), np.append(values[keep], values[-1])
    axes.plot(x, y, style, color=colour, linewidth=1.5, drawstyle="steps-post")


def evaluations(history: Sequence[Record], ending: str) -> dict[str, FloatArray]:
    """Evaluated numbers whose name ends with `ending`: name -> f64[num_rounds], NaN between."""
    cells = [record.get("eval") for record in history]
    records: list[Record] = [cell if isinstance(cell, Mapping) else {} for cell in cells]
    names = dict.fromkeys(name for record in records for name in record)
    found = {n: column(records, n) for n in names if str(n).endswith(ending)}
    return {str(n): values for n, values in found.items() if np.isfinite(values).any()}


@_draw
def losses(history: Sequence[Record], summary: Record, *, width: int) -> str:
    """Training and evaluated loss against time and, beside or below it, against epochs."""
    train, evaluated = column(history, "loss"), evaluations(history, "loss")
    everything = np.concatenate([thin(clock(history), train)[1], *evaluated.values()])
    known = everything[np.isfinite(everything)]
    logarithmic = len(known) > 1 and known.min() > 0 and known.max() > 8 * known.min()
    narrow = width < 500
    each = (width - 46 - 8) if narrow else (width - 46 - 8 - 56) / 2
    figure = _figure(width, 2 * 268 if narrow else 268)
    secs = clock(history)
    factor, unit = time_unit(np.nanmax(secs, initial=0.0))
    panels = [
        (secs * factor, f"{unit} since the start"),
        (epochs_done(history, summary), "epochs"),
    ]
    for i, (x, name) in enumerate(panels):
        left, top = (46, 32 + 268 * i) if narrow else (46 + i * (each + 56), 32)
        axes = _axes(figure, left, top, each, 190)
        if logarithmic:
            axes.set_yscale("log")
        _loss_lines(axes, x, train, evaluated)
        if not len(known):
            axes.set_ylim(0, 1)
            axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, **_NOTE)
        axes.set_xlabel(name, fontsize=11, color=MUTED)
        _plain_ticks(axes, logarithmic=logarithmic)
        scale = ", log scale" if logarithmic else ""
        _title(axes, f"loss against {'time' if i == 0 else 'epochs'}{scale}")
    return to_svg(figure, f"losses-{width}", "Loss against time and against epochs")


_NOTE: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 12, "color": MUTED}
EVALUATION_STYLES = [(ACCENT, "o-"), (INK, "s--"), (MUTED, "^:")]


def in_order(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.startswith("test"), name))


def _loss_lines(
    axes: Axes, x: FloatArray, train: FloatArray, evaluated: Mapping[str, FloatArray]
) -> None:
    middle, mean, low, high = thin(x, train)
    if np.isfinite(mean).any():
        axes.fill_between(middle, low, high, color=MUTED, alpha=0.25, linewidth=0)
        axes.plot(middle, mean, ".-" if len(middle) < 40 else "-", color=MUTED, linewidth=0.9)
    _points(axes, x, evaluated, limit=24)
    ends = x[np.isfinite(x)]
    if len(ends):
        axes.set_xlim(0, max(ends.max() * 1.02, 1e-9))


def _points(axes: Axes, x: FloatArray, evaluated: Mapping[str, FloatArray], *, limit: int) -> None:
    for name, (colour, style) in zip(in_order(list(evaluated)), EVALUATION_STYLES, strict=False):
        at = np.flatnonzero(np.isfinite(evaluated[name]))
        shape = style if len(at) <= limit else style[1:]
        line_x, mean, _, _ = thin(x[at], evaluated[name][at])
        axes.plot(line_x, mean, shape, color=colour, linewidth=1.6, markersize=4.5)


def _plain_ticks(axes: Axes, *, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    if logarithmic:
        low, high = axes.get_ylim()
        fine = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(10, subs=fine, numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())


@_draw
def accuracies(history: Sequence[Record], summary: Record, *, width: int) -> str:
    """Evaluated accuracy, in percent, against epochs."""
    found = {k: 100 * v for k, v in evaluations(history, "accuracy").items()}
    figure = _figure(width, 248)
    axes = _axes(figure, 46, 32, width - 46 - 8, 170)
    x = epochs_done(history, summary)
    _points(axes, x, found, limit=24)
    known = np.concatenate([v[np.isfinite(v)] for v in found.values()])
    low = max(0.0, known.min() - max(2.0, 0.08 * np.ptp(known)))
    axes.set_ylim(low, min(101.0, known.max() + max(1.0, 0.08 * np.ptp(known))))
    ends = x[np.isfinite(x)]
    axes.set_xlim(0, max(ends.max(initial=0.0) * 1.02, 1e-9))
    axes.set_xlabel("epochs", fontsize=11, color=MUTED)
    _plain_ticks(axes, logarithmic=False)
    _title(axes, "accuracy, %")
    return to_svg(figure, f"accuracies-{width}", "Accuracy against epochs")
