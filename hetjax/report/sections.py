"""Which pictures does the page show, and what does it say of each? Headings, captions, keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetjax.report import (
    canvas,
    gates,
    gossip,
    losses,
    order,
    quotas,
    round_times,
    series,
    timeline,
    words,
)
from hetjax.report.series import Record

SCREENS = {"wide": 900, "narrow": 340}  # pixels; the reader sees the one that fits
MOST_METRICS = 6
TRAINING = '<span><i class="line muted"></i>training, each round</span>'


def sections(summary: Record, history: Sequence[Record]) -> list[str]:
    """The sections of the page as HTML; those without numbers are left out."""
    if not history:
        return []
    has_clock, parts = series.has_clock(summary), [_losses(summary, history)]
    if has_clock:
        parts = [_round_times(summary, history), *parts]
    if series.count_workers(history):
        parts = [_quotas(history), _gate(summary, history), *parts]
        parts = [_timeline(summary, history), *parts] if has_clock else parts
    if series.evaluations(history, "accuracy"):
        parts.append(_accuracies(summary, history))
    parts += [_evaluated(summary, history), _metrics(summary, history)]
    return [part for part in (*parts, _gossip(summary, history), _order(summary, history)) if part]


def section(
    heading: str,
    caption: str,
    draw: Callable[[int], str] | None,
    *,
    key: str = "",
    below: str = "",
) -> str:
    """A heading, a caption, a key and a picture, if any, drawn for each of `SCREENS`.

    Each line of the caption is a paragraph; `below` is HTML under the picture.
    """
    paragraphs = "".join(f"<p>{words.escaped(line)}</p>" for line in caption.splitlines())
    pictures = []
    if draw is not None:
        pictures = [f'<div class="{name}">{draw(width)}</div>' for name, width in SCREENS.items()]
    return (
        f"<section><h2>{words.escaped(heading)}</h2>{paragraphs}"
        + (f'<div class="key">{key}</div>' if key else "")
        + f"{''.join(pictures)}{below}</section>"
    )


def _timeline(summary: Record, history: Sequence[Record]) -> str:
    caption = "Each bar is one worker in one round, with the number of microbatches it computed. "
    gate = gates.gate(summary)
    if not gate:
        caption += "With good quotas all bars of a round end together."
    elif gate.get("in_flight") == "drop":
        caption += (
            "The gate closes a round before every quota is done and gives up what is in flight, "
            "so that a bar may hold time that nothing came of."
        )
    else:
        caption += (
            "The gate closes a round before every quota is done. What is in flight then is "
            "finished, so the bars of a round need not end together."
        )
    if np.nansum(series.matrix(history, "host_secs")) > 0:
        caption += " Before its bar a worker's process makes the update, by itself."
    waiting = series.column(series.full_rounds(history), "waiting_fraction")
    waiting = waiting[np.isfinite(waiting)]
    if len(waiting) >= 4:
        first, last = waiting[0], float(np.mean(waiting[-min(6, len(waiting) - 1) :]))
        caption += (
            f" Waiting was {words.percent(first)} of the workers' time in the first round and "
            f"{words.percent(last)} in the last ones."
        )
    return section(
        "Who computes, who waits",
        caption,
        lambda width: timeline.draw_timeline(
            history, width=width, rounds=3 if width < canvas.NARROW else 6
        ),
        key=_timeline_key(series.count_workers(history), gated=bool(gate)),
    )


def _timeline_key(num_workers: int, *, gated: bool) -> str:
    filled = "ramp" if num_workers > canvas.NUM_COLOURS else "computing"
    empty = "grey" if num_workers > 16 else "waiting"
    for_whom = "the last to finish" if gated else "the slowest"
    return (
        f'<span><i class="{filled}"></i>computing</span>'
        f'<span><i class="{empty}"></i>waiting for {for_whom}</span>'
        "<span>gap: synchronisation; a long pause is cut short and its length written</span>"
    )


def _quotas(history: Sequence[Record]) -> str:
    caption = "Microbatches that each worker is given a round. "
    if series.count_workers(history) > canvas.NUM_COLOURS:
        caption += "Bright is many, dark is few; rows of one colour have settled."
    else:
        caption += "Steps show where the quotas moved; flat lines have settled."
    caption += (
        " Single rounds of equal quotas are trials: adaptive quotas are compared with equal split."
    )
    return section(
        "Quotas",
        caption + _left_out(history),
        lambda width: quotas.draw_quotas(history, width=width),
    )


def _gate(summary: Record, history: Sequence[Record]) -> str:
    part, num_workers = gates.gate(summary), series.count_workers(history)
    if not part:
        return ""
    caption, key, drawn = gates.caption(part), "", gates.can_draw(history)
    if drawn and num_workers > gates.TABLE_WORKERS:
        caption += f" The table holds the {gates.TABLE_WORKERS} workers that returned most."
    if drawn and num_workers > canvas.NUM_COLOURS:
        caption += " In the picture bright is finished, dark is returned."
    elif drawn:
        key = (
            '<span><i class="computing"></i>finished</span>'
            '<span><i class="returned"></i>returned</span>'
        )
    return section(
        "Rounds that close early",
        caption,
        (
            lambda width: gates.draw_microbatches(
                history, width=width, rounds=3 if width < canvas.NARROW else 6
            )
        )
        if drawn
        else None,
        key=key,
        below=gates.table(history) if drawn else "",
    )


def _round_times(summary: Record, history: Sequence[Record]) -> str:
    caption = (
        "From the start of a round to the start of the next; the number beside the run is the "
        "median of its last 20 rounds. Triangles at the top are rounds that took longer still."
    )
    optimum = series.column([summary, *history], "optimal_round_secs")
    if np.isfinite(optimum).any():
        caption += (
            " The optimum is that of the best whole-numbered quotas for the true speeds: "
            "the closer the run lies to it, the less is left to gain."
        )
    return section(
        "Time of a round",
        caption + _left_out(history),
        lambda width: round_times.draw_round_times(history, summary, width=width),
    )


def _left_out(history: Sequence[Record]) -> str:
    short = len(history) - len(series.full_rounds(history))
    return " The short last round of each epoch is left out." if short else ""


def _losses(summary: Record, history: Sequence[Record]) -> str:
    caption = (
        "Against time it shows how soon a loss is reached, which is what good quotas improve; "
        "against epochs, how much each pass over the data teaches, whatever the speeds."
    )
    if not series.has_clock(summary):
        caption = "Against epochs: how much each pass over the data teaches, whatever the speeds."
    has_training = np.isfinite(series.column(history, "loss")).any()
    if not (has_training or series.evaluations(history, "loss")):
        return ""
    return section(
        "Loss",
        caption + _replicas("loss", history),
        lambda width: losses.draw_losses(history, summary, width=width),
        key=(TRAINING if has_training else "") + _evaluated_key("loss", history),
    )


def _accuracies(summary: Record, history: Sequence[Record]) -> str:
    has_training = "accuracy" in series.training_metrics(history)
    training = TRAINING if has_training else ""
    return section(
        "Accuracy",
        "The share of examples classified correctly, at each evaluation."
        + _replicas("accuracy", history),
        lambda width: losses.draw_accuracies(history, summary, width=width),
        key=training + _evaluated_key("accuracy", history),
    )


def _evaluated(summary: Record, history: Sequence[Record]) -> str:
    """Empty where losses and accuracies are all that is evaluated."""
    found = series.evaluated_metrics(history)
    if not found:
        return ""
    shown = dict(list(found.items())[:MOST_METRICS])
    more = f" The first {MOST_METRICS} of {len(found)}." if len(found) > MOST_METRICS else ""
    ending, of_sets = max(shown.items(), key=lambda item: len(item[1]))
    return section(
        "Evaluated metrics",
        f"Of the evaluated sets, at each evaluation.{more}" + _replicas(ending, history),
        lambda width: losses.draw_evaluated(shown, history, summary, width=width),
        key=_key_of([name.removesuffix(f"_{ending}") for name in of_sets]),
    )


def _metrics(summary: Record, history: Sequence[Record]) -> str:
    """Empty where the loss function returned none, or those that are drawn elsewhere."""
    names = list(series.training_metrics(history))
    if "accuracy" in names and series.evaluations(history, "accuracy"):
        names.remove("accuracy")
    if not names:
        return ""
    more = f" The first {MOST_METRICS} of {len(names)}." if len(names) > MOST_METRICS else ""
    return section(
        "Training metrics",
        f"What the loss function returned beside its losses: the mean over each round.{more}",
        lambda width: losses.draw_metrics(names[:MOST_METRICS], history, summary, width=width),
    )


def _replicas(ending: str, history: Sequence[Record]) -> str:
    """Whose numbers those of the test set are, where the replicas differ; else empty."""
    if not {f"test_{ending}", f"worst_test_{ending}"} <= set(series.evaluations(history, ending)):
        return ""
    return (
        " The replicas differ: the test set is tried on the mean of their parameters and on the "
        "worst of them, the one with the highest test loss."
    )


def _gossip(summary: Record, history: Sequence[Record]) -> str:
    """Empty for replicas that stay equal."""
    if not series.part(summary, "gossip"):
        return ""
    caption = (
        "The consensus distance is how far the replicas lie from the mean of their parameters, "
        "as a root mean square over the workers, here relative to the mean's norm. It is "
        "measured at the end of each epoch."
    )
    drawn = len(gossip.consensus(history, summary)[0]) > 0
    if not drawn:
        caption += " None that was measured is finite and above zero."
    return section(
        "Gossip",
        f"{caption}\n{gossip.mixing(summary, history)}".strip(),
        (lambda width: gossip.draw_consensus(history, summary, width=width)) if drawn else None,
    )


def _order(summary: Record, history: Sequence[Record]) -> str:
    """Empty for an order that costs nothing and was not measured."""
    part, measured = series.part(summary, "ordering"), order.measurements(history)
    if not measured and not series.number(part.get("running_sum_bytes")) > 0:
        return ""
    caption = (
        "The herding bound is the largest sum of gradients less their mean on the way through "
        "the rounds of an epoch (\N{INFINITY}-norm): small is good."
    )
    drawn = order.can_draw(measured)
    if not measured:
        caption += " It was not measured; ordering.herding_every switches that on."
    elif not drawn:
        caption += " None that was measured is finite and above zero."
    return section(
        "Example order",
        f"{caption} {order.compared(measured)}\n{order.cost(part, measured)}".strip(),
        (lambda width: order.draw_bounds(measured, width=width)) if drawn else None,
    )


def _evaluated_key(ending: str, history: Sequence[Record]) -> str:
    return _key_of(list(series.evaluations(history, ending)))


def _key_of(found: Sequence[str]) -> str:
    """The names of the lines of `losses.EVALUATION_STYLES`."""
    styles = ["line", "line ink", "line dotted"]
    names = [name.replace("_", " ") for name in found]
    for i, name in enumerate(found):
        if f"worst_{name}" in found:
            names[i] += ", mean of the replicas"
        elif name.startswith("worst_"):
            names[i] = f"{names[i].removeprefix('worst ')}, worst replica"
    pairs = zip(styles, names, strict=False)
    return "".join(f'<span><i class="{css}"></i>{words.escaped(n)}</span>' for css, n in pairs)
