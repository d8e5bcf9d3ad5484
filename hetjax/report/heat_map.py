"""How does a number of many workers change over the rounds? A row a worker, dark to bright."""

from __future__ import annotations

import numpy as np

from hetjax.report import canvas, series

COLUMNS = 240  # more rounds are drawn as the means of equal stretches


@canvas.own_settings
def draw(
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
        thinned = [series.thin(ids, y, points=COLUMNS)[1] for y in values.T]
        values = np.stack(thinned, axis=1)
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
