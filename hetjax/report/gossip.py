"""How far apart are the replicas, and what do they send? A picture, and its text."""

import numpy as np

from hetjax.report import canvas, series, words


def bytes_of_worker(summary: series.Record, history: series.History) -> float:
    """Mean bytes that a worker sends a round; NaN for one worker, or if not known."""
    sent = series.number(summary.get("bytes_sent_per_round"))
    here = np.nansum(series.matrix(history, "present"), axis=1)  # all numbers are the means
    workers = here.mean() if here.any() else summary.get("num_workers") or 0
    return sent / workers if workers > 1 else float("nan")


def consensus(history: series.History, summary: series.Record) -> tuple[np.ndarray, np.ndarray]:
    """Epochs, and the distance relative to the mean's norm, of rounds where it is above 0."""
    relative = series.column(series.parts(history, "consensus"), "relative")
    epochs = series.epochs_done(history, summary)
    known = np.isfinite(epochs) & (relative > 0)
    return epochs[known], relative[known]


@canvas.own_settings
def draw_consensus(history: series.History, summary: series.Record, *, width: int) -> str:
    """The relative consensus distance against epochs; there must be a point, see `consensus`."""
    x, y = consensus(history, summary)
    figure, (axes,) = canvas.panels(width, 1, right=78)
    canvas.log_scale(axes, y)
    canvas.curve(axes, x, y, "o-", colour=canvas.ACCENT, band=True, clip_on=False)
    relative = "" if width < canvas.NARROW else ", relative to the norm of the mean"
    canvas.finish(axes, f"consensus distance{relative}", x, "epochs")
    canvas.end_labels(axes, [(float(y[-1]), f"{y[-1]:.3g}", canvas.ACCENT)])
    return canvas.to_svg(figure, f"gossip-{width}", "Consensus distance against epochs")


def mixing(summary: series.Record, history: series.History) -> str:
    """Says how fast the replicas come together, by which exchanges, and what that sends."""
    part, sent = series.part(summary, "gossip"), bytes_of_worker(summary, history)
    text = (
        f"The spectral gap is {words.loss(part['spectral_gap'])}: mixing alone would leave at most "
        f"{words.percent(1 - part['spectral_gap'])} of the distance after a round, in the "
        f"mean. Gossip has {words.plural(part['num_exchanges'], 'exchange')}."
    )
    return text + (f" A worker sends {words.size(sent)} a round." if sent > 0 else "")
