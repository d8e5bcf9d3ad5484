"""Is the order of the examples good, and what does it cost? A picture, and its text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetjax.report import canvas, series, words
from hetjax.report.series import FloatArray, Record

LINES = [  # field, short name, name, colour, style
    ("random_inf_norm", "random", "random order", canvas.MUTED, "^:"),
    ("inf_norm", "this", "this order", canvas.ACCENT, "o-"),
]


def measurements(history: Sequence[Record]) -> list[Record]:
    """What was measured of the order, one record for each round after which it was."""
    return [record for record in series.parts(history, "herding") if record]


def can_draw(measured: Sequence[Record]) -> bool:
    """Whether there is a point to draw."""
    return any(len(_points(measured, name)[0]) for name, *_ in LINES)


@canvas.own_settings
def draw_bounds(measured: Sequence[Record], *, width: int) -> str:
    """The herding bound of the order and of a random one against epochs; see `can_draw`."""
    narrow = width < canvas.NARROW
    figure, (axes,) = canvas.panels(width, 1, right=114 if narrow else 158)
    points = [_points(measured, name) for name, *_ in LINES]
    canvas.log_scale(axes, np.concatenate([y for _, y in points]))
    ends = []
    for (x, y), (_, short, name, colour, shape) in zip(points, LINES, strict=True):
        if len(x):
            canvas.curve(axes, x, y, shape, colour=colour, clip_on=False)
            ends.append((float(y[-1]), f"{short if narrow else name} {_short(y[-1])}", colour))
    canvas.finish(axes, "herding bound", np.concatenate([x for x, _ in points]), "epochs")
    canvas.end_labels(axes, ends)
    return canvas.to_svg(figure, f"order-{width}", "Herding bound against epochs")


def compared(measured: Sequence[Record]) -> str:
    """The last bound beside that of a random order, as a sentence."""
    for record in reversed(measured):
        ratio, other = (_below(record, norm) for norm in ("inf_norm", "two_norm"))
        epochs = words.plural(record.get("epoch"), "epoch")
        if ratio and epochs:
            aside = f" (2-norm: {other.removesuffix(' to')})" if other else ""
            return f"After {epochs} it is {ratio} that of a random order{aside}."
    return ""


def cost(part: Record, measured: Sequence[Record]) -> str:
    """What the order costs in time and memory, and what measuring took, as sentences."""
    with_it, without, kept, params, measuring = (
        series.number(part.get(name))
        for name in (
            "microbatch_secs",
            "plain_microbatch_secs",
            "running_sum_bytes",
            "param_bytes",
            "herding_secs",
        )
    )
    sentences = []
    if with_it > 0 and without > 0:
        sentences.append(
            f"A microbatch takes {with_it / without:.2f} times as long as with random "
            f"reshuffling ({words.time(with_it)} against {words.time(without)})."
        )
    if kept > 0:
        copies = f" ({kept / params:.1f} copies of the parameters)" if params > 0 else ""
        sentences.append(f"The order keeps {words.size(kept)} a worker{copies}.")
    if measured and measuring > 0:
        sentences.append(
            f"Measuring the bound took {words.time(measuring)} in all, three passes over the "
            "data each time, during which the clock of the run stood still."
        )
    return " ".join(sentences)


def _points(measured: Sequence[Record], name: str) -> tuple[FloatArray, FloatArray]:
    """Epochs and heights of a line, without what the axes cannot show."""
    return series.drawable(series.column(measured, "epoch"), series.column(measured, name))


def _below(record: Record, norm: str) -> str:
    """How far a bound lies below or above that of a random order; empty if not known."""
    own, random = (series.number(record.get(name)) for name in (norm, f"random_{norm}"))
    if not (own > 0 and random > 0):
        return ""
    far = np.exp(abs(np.log(random) - np.log(own)))
    if far < 1.05:
        return "about equal to"
    text = f"{far:.1f}" if far < 100 else _short(far)
    return f"{text} times {'below' if own < random else 'above'}"


def _short(value: float) -> str:
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"
