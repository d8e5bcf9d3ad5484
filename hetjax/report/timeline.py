"""When does each worker compute, and when does it wait? Bars of the first and last rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hetjax.report import canvas, series, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_WITH_TEXT = 14  # pixels; in a lower row no number can be read and no hatch seen


class _Layout(NamedTuple):
    """Where successive rounds are drawn, f64[num_rounds] in the unit of the axis."""

    start: np.ndarray
    local: np.ndarray  # until the last worker finished, with host_secs
    gap: np.ndarray  # from there to the next round, long pauses cut short
    pause: np.ndarray  # secs; the length of a pause that is cut short, else 0

    def end(self) -> float:
        return float((self.start + self.local + self.gap)[-1])


@canvas.own_settings
def draw_timeline(history: series.History, *, width: int) -> str:
    """Computing and waiting of each worker in the first and in the last rounds."""
    narrow, num_workers = width < canvas.NARROW, series.count_workers(history)
    parts = series.first_and_last(history, 3 if narrow else 6)
    row = 25.0 if num_workers <= 8 else 17.0 if num_workers <= 16 else 300.0 / num_workers
    left, head, foot, height = (30 if narrow else 66), 50, 46, row * num_workers
    figure = canvas.make_figure(width, len(parts) * (head + height + foot))
    step = 1 if num_workers <= 16 else 8 * -(-num_workers // 160)  # names stay apart
    longest = max(_lay_out(part).end() for part in parts)
    factor, unit = words.time_unit(longest)
    for i, part in enumerate(parts):
        top = head + i * (head + height + foot)
        axes = canvas.add_axes(figure, left, top, width - left - 8, height)
        axes.set_ylim(num_workers - 0.5, -0.5)
        workers = range(0, num_workers, step)
        axes.set_yticks(workers, [f"w{j}" if narrow else f"worker {j}" for j in workers])
        axes.tick_params(axis="y", labelcolor=canvas.INK)
        axes.grid(False)
        named = ("First rounds", "Last rounds")[i] if len(parts) > 1 else "All rounds"
        canvas.title(axes, named, above=28)
        axes.set_xlim(0, max(longest, 1e-9) * factor)
        layout = _lay_out(part, factor=factor)
        _bars(axes, part, layout, factor=factor, row=row)
        _round_names(axes, part, layout)
        since = f"{unit} since the start of round {series.round_ids(part)[0]:,.0f}"
        axes.set_xlabel(since, **canvas.AXIS_LABEL)
    return canvas.to_svg(figure, f"timeline-{width}", "Timeline of each worker")


def _lay_out(rounds: series.History, *, factor: float = 1.0) -> _Layout:
    """Places successive rounds on an axis whose unit is 1 / `factor` seconds."""
    compute = np.nan_to_num(series.matrix(rounds, "compute_secs"))
    busiest = np.max(compute + _host_secs(rounds), axis=1, initial=0.0)
    local = np.fmax(series.column(rounds, "local_secs"), busiest)
    pause = np.maximum(np.nan_to_num(series.column(rounds, "round_secs")) - local, 0)
    longest = 0.3 * max(float(np.median(local)), 1e-9)
    gap = np.where(pause > 1.5 * longest, longest, pause)
    start = np.cumsum(local + gap) - (local + gap)
    return _Layout(start * factor, local * factor, gap * factor, np.where(gap < pause, pause, 0))


def _host_secs(rounds: series.History) -> np.ndarray:
    """Seconds that each worker's process needed before it computed, if they are known."""
    return np.nan_to_num(series.matrix(rounds, "host_secs"))


def _bars(axes: Axes, part: series.History, layout: _Layout, *, factor: float, row: float) -> None:
    """Computing and waiting: one path for each worker, and one for all waiting."""
    compute = np.nan_to_num(series.matrix(part, "compute_secs")) * factor
    begin = np.minimum(_host_secs(part) * factor, layout.local[:, None])
    compute = np.minimum(compute, layout.local[:, None] - begin)
    begin += layout.start[:, None]
    done = series.matrix(part, "microbatches_done")
    here = series.matrix(part, "present") != 0
    pixel = canvas.pixel(axes)
    half = 0.5 - 0.5 * min(6.0 / row, 0.2)
    waiting: list[tuple[float, float, int]] = []
    for j, colour in enumerate(canvas.worker_colours(compute.shape[1])):
        start, end = begin[:, j], layout.start + layout.local
        split = start + compute[:, j]
        busy = np.flatnonzero(compute[:, j] > 0)
        canvas.fill_boxes(
            axes, [(start[i], split[i], j) for i in busy], half=half, facecolor=colour
        )
        idle = np.flatnonzero(here[:, j] & (end - split > 0.5 * pixel))
        waiting += [(split[i], end[i], j) for i in idle]
        if row >= ROW_WITH_TEXT:
            for i in np.flatnonzero((compute[:, j] > 16 * pixel) & np.isfinite(done[:, j])):
                place: Any = {"ha": "center", "va": "center_baseline"}
                place |= {"color": canvas.ink_on(colour), "fontsize": 11 if row > 20 else 10}
                axes.text(start[i] + compute[i, j] / 2, j, f"{done[i, j]:.0f}", **place)
    style: dict[str, Any] = {"facecolor": "none", "hatch": "////", "alpha": 0.65}
    if row < ROW_WITH_TEXT:
        style = {"facecolor": canvas.MUTED, "alpha": 0.22}
    canvas.fill_boxes(axes, waiting, half=half, edgecolor=canvas.MUTED, **style)


def _round_names(axes: Axes, part: series.History, layout: _Layout) -> None:
    """Names above the axes where each round starts, and how long pauses are that are cut short."""
    pixel = canvas.pixel(axes)
    names = [
        f"round {name:.0f}" if local > 62 * pixel else f"{name:.0f}" if local > 22 * pixel else ""
        for name, local in zip(series.round_ids(part), layout.local, strict=True)
    ]
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": canvas.MUTED}
    above |= {"va": "bottom", "clip_on": False}
    for begun, name in zip(layout.start, names, strict=True):
        axes.text(begun, 1.0, name, fontsize=11, **above)
        axes.axvline(begun, color=canvas.GRID, linewidth=1)
    ends = np.append(layout.start[1:], axes.get_xlim()[1])
    for end, start, local, _, pause in zip(ends, *layout, strict=True):
        if pause > 0:
            factor, unit = words.time_unit(pause)
            wide = end - start - local > 54 * pixel
            text = f"// {pause * factor:.3g} {unit}" if wide else "//"
            axes.text(start + local + 3 * pixel, 1.0, text, fontsize=10, **above)
