"""Which pictures does the page show, and what does it say of each? Headings, captions, keys."""

from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from hetjax.report import canvas, gates, gossip, losses, over_rounds, series, timeline, words

SCREENS = {"wide": 900, "narrow": 340}  # pixels; the reader sees the one that fits
MOST_METRICS = 6


def sections(summary: series.Record, history: series.History) -> list[str]:
    """The sections of the page as HTML; those without numbers are left out."""
    if not history:
        return []
    has_clock, has_workers = series.has_clock(summary), series.count_workers(history) > 0
    parts = [
        has_workers and has_clock and _timeline(summary, history),
        has_workers and _quotas(history),
        _changes(history),
        has_workers and _gate(summary, history),
        has_clock and _round_times(summary, history),
        _losses(summary, history),
        _accuracies(summary, history),
        _metrics(summary, history),
        _gossip(summary, history),
    ]
    return [part for part in parts if part]


def section(
    heading: str, caption: str, draw: Callable[..., str] | None, *, key: str = "", below: str = ""
) -> str:
    """A heading, a caption, a key and a picture, if any, drawn for each of `SCREENS`.

    Each line of the caption is a paragraph. `draw(width=pixels)` gives a picture as HTML. `below`
    is HTML under it.
    """
    found = [f"<h2>{words.escaped(heading)}</h2>"]
    found += [f"<p>{words.escaped(line)}</p>" for line in caption.splitlines()]
    if key:
        found.append(f'<div class="key">{key}</div>')
    if draw is not None:
        found += [f'<div class="{name}">{draw(width=px)}</div>' for name, px in SCREENS.items()]
    return f"<section>{''.join(found)}{below}</section>"


def _timeline(summary: series.Record, history: series.History) -> str:
    caption = "Each bar is one worker in one round, with the number of microbatches it computed. "
    if not series.part(summary, "gate"):
        for_whom = "the slowest"
        caption += "With good quotas all bars of a round end together."
    else:
        for_whom = "the last to finish"
        caption += "The gate closes a round before every quota is done; bars need not end together."
    if np.nansum(series.matrix(history, "host_secs")) > 0:
        caption += " In the gap before its bar its process works for itself, as at the update."
    waiting = series.column(series.full_rounds(history), "waiting_fraction")
    waiting = waiting[np.isfinite(waiting)]
    if len(waiting) >= 4:
        first, last = waiting[0], float(np.mean(waiting[-min(6, len(waiting) - 1) :]))
        caption += (
            f" Waiting was {words.percent(first)} of the workers' time in the first round and "
            f"{words.percent(last)} in the last ones."
        )
    num_workers = series.count_workers(history)
    filled = "ramp" if num_workers > canvas.NUM_COLOURS else "computing"
    empty = "grey" if num_workers > 16 else "waiting"
    key = (
        f'<span><i class="{filled}"></i>computing</span>'
        f'<span><i class="{empty}"></i>waiting for {for_whom}</span>'
        "<span>gap: synchronisation; a long pause is cut short and its length written</span>"
    )
    draw = partial(timeline.draw_timeline, history)
    return section("Who computes, who waits", caption, draw, key=key)


def _quotas(history: series.History) -> str:
    caption = "Microbatches that each worker is given a round. "
    if series.count_workers(history) > canvas.NUM_COLOURS:
        caption += "Bright is many, dark is few. "
    caption += "Single rounds of equal quotas are trials." + _left_out(history)
    return section("Quotas", caption, partial(over_rounds.draw_quotas, history))


def _changes(history: series.History) -> str:
    """Empty where no worker has come or gone."""
    found = [
        (words.count(record["round"]), words.time(record.get("start_secs")), f"worker {who}", what)
        for record in history
        for who, what in record.get("changes") or ()
    ]
    if not found:
        return ""
    caption = "In which round, and when it began. A joined worker computes from the next round on."
    table = words.table(["round", "began after", "who", "what"], words.ends(found, list, "changes"))
    return section("Who came and went", caption, None, below=table)


def _gate(summary: series.Record, history: series.History) -> str:
    """Empty in runs without a gate."""
    part, num_workers = series.part(summary, "gate"), series.count_workers(history)
    if not part:
        return ""
    heading, caption = "Rounds that close early", gates.caption(part)
    if num_workers > gates.TABLE_WORKERS:
        caption += f" The table holds the {gates.TABLE_WORKERS} workers that returned most."
    caption += " In the picture bright is finished, dark is returned."
    draw = partial(gates.draw_microbatches, history)
    return section(heading, caption, draw, below=gates.table(history))


def _round_times(summary: series.Record, history: series.History) -> str:
    caption = (
        "From the start of a round to the start of the next; the number beside the run is the "
        "median of its last 20 rounds. Triangles at the top are rounds that took longer still."
    )
    if np.isfinite(series.column(history, "optimal_round_secs")).any():
        caption += " The optimum is that of the best quotas for the true speeds."
    draw = partial(over_rounds.draw_times, history, summary)
    return section("Time of a round", caption + _left_out(history), draw)


def _left_out(history: series.History) -> str:
    short = len(history) - len(series.full_rounds(history))
    return " Rounds short of the budget, as the last of an epoch, are left out." if short else ""


def _losses(summary: series.Record, history: series.History) -> str:
    caption = "Against epochs: how much each pass over the data teaches, whatever the speeds."
    if series.has_clock(summary):
        caption = f"Against time: how soon a loss is reached. {caption}"
    has_training = bool(np.isfinite(series.column(history, "loss")).any())
    evaluated = series.evaluations(history, "loss")
    if not (has_training or evaluated):
        return ""
    draw = partial(losses.draw_losses, history, summary)
    key = losses.key(evaluated, has_training=has_training)
    return section("Loss", caption + _replicas(evaluated), draw, key=key)


def _accuracies(summary: series.Record, history: series.History) -> str:
    """Empty if none was evaluated."""
    evaluated = series.evaluations(history, "accuracy")
    if not evaluated:
        return ""
    caption = "The share of examples classified correctly, at each evaluation."
    draw = partial(losses.draw_accuracies, history, summary)
    key = losses.key(evaluated, has_training="accuracy" in series.training_metrics(history))
    return section("Accuracy", caption + _replicas(evaluated), draw, key=key)


def _metrics(summary: series.Record, history: series.History) -> str:
    """Empty if there are none but losses, and accuracies that are drawn elsewhere."""
    trained, evaluated = series.training_metrics(history), series.evaluated_metrics(history)
    names = dict.fromkeys([*evaluated, *trained])
    if series.evaluations(history, "accuracy"):
        names.pop("accuracy", None)
    if not names:
        return ""
    found = {name: (trained.get(name), evaluated.get(name, {})) for name in names}
    ending, (_, of_sets) = max(found.items(), key=lambda item: len(item[1][1]))
    caption = "In training the mean over each round; of evaluated sets, at each evaluation."
    if len(found) > MOST_METRICS:
        caption += f" The first {MOST_METRICS} of {len(found)}."
    draw = partial(losses.draw_metrics, dict(list(found.items())[:MOST_METRICS]), history, summary)
    sets = [name.removesuffix(f"_{ending}") for name in of_sets]
    key = losses.key(sets, has_training=bool(trained))
    return section("Metrics", caption + _replicas(of_sets), draw, key=key)


def _replicas(found: Collection[str]) -> str:
    """Says whose numbers those of the test set are, if the replicas differ; else empty."""
    if not any(name.startswith("worst_") for name in found):
        return ""
    return " The test set is tried on the mean of the replicas and on the worst of them."


def _gossip(summary: series.Record, history: series.History) -> str:
    """Empty for replicas that stay equal."""
    if not series.part(summary, "gossip"):
        return ""
    caption = (
        "How far the replicas lie from the mean of their parameters at the end of each epoch: a "
        "root mean square over the workers, relative to the mean's norm."
    )
    drawn = len(gossip.consensus(history, summary)[0]) > 0
    draw = partial(gossip.draw_consensus, history, summary) if drawn else None
    return section("Gossip", f"{caption}\n{gossip.mixing(summary, history)}".strip(), draw)
