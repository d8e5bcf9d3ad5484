"""What happened from round to round? Quotas, times, and a number of each worker as a heat map.

Quotas are a line a worker, or for many workers a map. Times of rounds are one line, and two to
compare. Simulated rounds show their times, waiting, and what each worker did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.report import canvas, series, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 240  # of a heat map; more rounds are drawn as the means of equal stretches


@canvas.own_settings
def draw_quotas(history: series.History, *, width: int) -> str:
    """Quotas over the rounds: lines for up to `canvas.NUM_COLOURS` workers, else a map."""
    shown = series.full_rounds(history)
    values, ids = series.matrix(shown, "quotas"), series.round_ids(shown)
    values[series.matrix(shown, "present") == 0] = np.nan
    top = np.nanmax(values, initial=1.0)
    if values.shape[1] > canvas.NUM_COLOURS:
        label = "Quotas over the rounds, as a heat map"
        return heat_map(values, ids, width=width, name="quotas", label=label, most=top)
    narrow = width < canvas.NARROW
    figure, (axes,) = canvas.panels(width, 1, height=190, right=58 if narrow else 112)
    canvas.title(axes, "microbatches a round")
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

    moved = axes.transData + ScaledTranslation(0, shift / 72, axes.figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": colour, "transform": moved}
    corners = _corners(x, y)
    most = canvas.points(axes) // 6  # steps that can be told apart
    if len(corners[0]) - 1 <= most:
        axes.plot(*corners, drawstyle="steps-post", linewidth=2, **style)
        return
    middle, mean, low, high = series.thin(x, y, points=most)
    axes.plot(middle, mean, linewidth=1.8, **style)
    axes.fill_between(middle, low, high, linewidth=0, alpha=0.2, **style)


def _corners(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the steps of a line begin, and where its last one ends."""
    is_same = (y[1:] == y[:-1]) | (np.isnan(y[1:]) & np.isnan(y[:-1]))
    keep = np.flatnonzero(np.append(True, ~is_same))
    return np.append(x[keep], x[-1] + 1), np.append(y[keep], y[-1])


@canvas.own_settings
def draw_times(history: series.History, summary: series.Record, *, width: int) -> str:
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
        ends.append((float(np.median(known[-20:])) * factor, "run", "this run", canvas.ACCENT))
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
    axes.plot(*_corners(ids, values), style, color=colour, linewidth=1.5, drawstyle="steps-post")


@canvas.own_settings
def draw_simulation(
    secs: np.ndarray, waiting: np.ndarray, microbatches: np.ndarray, *, width: int
) -> list[str]:
    """Pictures of the rounds' times, of waiting, and of the workers, as inline SVG.

    Args:
        secs: f64[num_rounds], of each round.
        waiting: f64[num_rounds], the part of the workers' time that they waited.
        microbatches: i64[num_workers], over all rounds.
        width: of each, in pixels.
    """
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    return [
        _over_rounds(secs * factor, f"a round, {unit}", width=width),
        _over_rounds(100 * waiting, "waiting, % of the workers' time", width=width),
        _of_workers(microbatches, width=width),
    ]


def _over_rounds(y: np.ndarray, title: str, *, width: int) -> str:
    figure, (axes,) = canvas.panels(width, 1)
    ids = np.arange(len(y), dtype=float)
    canvas.curve(axes, ids, y, colour=canvas.ACCENT, band=True)
    axes.set_ylim(0, 1.08 * np.nanmax(y, initial=0.0) or 1.0)
    canvas.finish(axes, title, ids, "round")
    canvas.round_axis(axes, ids[0], ids[-1] + 1)
    return canvas.to_svg(figure, f"simulation-{title}-{width}", f"{title}, over the rounds")


def _of_workers(done: np.ndarray, *, width: int) -> str:
    """Bars of few workers; a curve of many."""
    figure, (axes,) = canvas.panels(width, 1)
    workers = np.arange(len(done))
    if len(done) <= canvas.NUM_COLOURS:
        axes.bar(workers, done, width=0.7, color=canvas.worker_colours(len(done)))
        axes.set_xticks(workers, [f"w{j}" for j in workers])
        canvas.title(axes, "microbatches of each worker")
    else:
        canvas.curve(axes, workers, done.astype(float), colour=canvas.ACCENT, band=True)
        canvas.finish(axes, "microbatches of each worker", workers, "worker")
    axes.set_ylim(0, 1.08 * done.max(initial=0) or 1.0)
    return canvas.to_svg(figure, f"simulation-workers-{width}", "Microbatches of each worker")


@canvas.own_settings
def heat_map(
    values: np.ndarray,
    ids: np.ndarray,
    *,
    width: int,
    name: str,
    label: str,
    most: float,
    title: str = "",
) -> str:
    """A heat map of `values`, from 0 to `most`, with NaN left blank.

    Args:
        values: f64[num_rounds, num_workers].
        ids: f64[num_rounds]: the rounds' numbers.
        width: pixels.
        name: of the picture, different from any other of the page.
        label: what a screen reader reads out in place of the picture.
        most: the brightest value.
        title: above the map.
    """
    num_rounds, num_workers = values.shape
    if num_rounds > COLUMNS:
        values = np.stack([series.thin(ids, y, points=COLUMNS)[1] for y in values.T], axis=1)
    height, top = (260.0 if num_workers <= 32 else 320.0), (32 if title else 14)
    figure = canvas.make_figure(width, height + top + 48)
    axes = canvas.add_axes(figure, 48, top, width - 48 - 58, height)
    image = axes.imshow(
        values.T,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        extent=(ids[0], ids[-1] + 1, num_workers - 0.5, -0.5),
        vmin=0,
        vmax=most,
    )
    axes.grid(False)
    canvas.round_axis(axes, ids[0], ids[-1] + 1)
    axes.set_ylabel("worker", **canvas.AXIS_LABEL)
    if title:
        canvas.title(axes, title)
    bar = figure.colorbar(image, cax=canvas.add_axes(figure, width - 46, top, 12, height))
    bar.outline.set_visible(False)  # type: ignore[operator]
    canvas.whole_ticks(bar.ax)
    bar.ax.tick_params(length=0, labelsize=11, labelcolor=canvas.MUTED)
    bar.ax.grid(False)
    return canvas.to_svg(figure, f"{name}-{width}", label)
