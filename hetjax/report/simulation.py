"""How long did simulated rounds take, who waited, and who did how much?"""

from __future__ import annotations

import numpy as np

from hetjax.report import canvas, series, words

_HEIGHT = 170


@canvas.own_settings
def draw(history: series.History, microbatches: np.ndarray, *, width: int) -> list[str]:
    """Pictures of the rounds' times, of waiting, and of the workers, as inline SVG.

    Args:
        history: a record a round: `round`, `round_secs`, `waiting_fraction`.
        microbatches: i64[num_workers], over all rounds.
        width: of each, in pixels.
    """
    secs = series.column(history, "round_secs")
    factor, unit = words.time_unit(np.nanmax(secs, initial=0.0))
    waiting = 100 * series.column(history, "waiting_fraction")
    return [
        _over_rounds(history, secs * factor, f"a round, {unit}", width=width),
        _over_rounds(history, waiting, "waiting, % of the workers' time", width=width),
        _of_workers(microbatches, width=width),
    ]


def _over_rounds(history: series.History, y: np.ndarray, title: str, *, width: int) -> str:
    figure, (axes,) = canvas.panels(width, 1, height=_HEIGHT)
    ids = series.round_ids(history)
    canvas.curve(axes, ids, y, colour=canvas.ACCENT, band=True)
    axes.set_ylim(0, 1.08 * np.nanmax(y, initial=0.0) or 1.0)
    canvas.finish(axes, title, ids, "round")
    canvas.round_axis(axes, ids[0], ids[-1] + 1)
    return canvas.to_svg(figure, f"simulation-{title}-{width}", f"{title}, over the rounds")


def _of_workers(done: np.ndarray, *, width: int) -> str:
    """Bars of few workers; a curve of many."""
    figure, (axes,) = canvas.panels(width, 1, height=_HEIGHT)
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
