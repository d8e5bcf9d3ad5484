"""What are the key numbers of a run? Tiles, each of a name, a number and a line below."""

from collections.abc import Sequence

import numpy as np

from hetjax.report import gossip, series, words

Tile = tuple[str, str, str]  # what, number, line below; without a number it is left out


def tiles(summary: series.Record, history: series.History) -> str:
    """The key numbers as HTML, those without a number left out."""
    missing, twice = (words.count(summary.get(f"examples_{k}")) for k in ("missing", "duplicated"))
    both = f"{missing} and {twice}" if missing and twice else ""
    processed = words.plural(summary.get("examples_processed"), "example")
    rounds = words.plural(summary.get("rounds"), "round")
    everything: list[Tile] = [
        *_learning(summary),
        *_speed(summary),
        *_traffic(summary, history),
        ("Missing and duplicated", both, processed and f"of {processed} processed"),
        ("Quotas at the end", *_last_quotas(summary)),
        _start(summary),
        ("Wall time", words.time(summary.get("wall_secs")), rounds),
    ]
    return grid(everything)


def grid(everything: Sequence[Tile]) -> str:
    """Tiles as HTML, those without a number left out."""
    cells = [
        f'<div class="tile"><dt>{words.escaped(what)}</dt>'
        f'<dd class="value">{words.escaped(value)}</dd><dd>{words.escaped(below)}</dd></div>'
        for what, value, below in everything
        if value
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def _start(summary: series.Record) -> Tile:
    """How long it took to the end of the first round, and with what."""
    start = summary.get("start") or {}
    stages = {name: secs for name, secs in start.items() if name != "first_round" and secs >= 0.1}
    below = ", ".join(f"{name} {words.time(secs)}" for name, secs in stages.items())
    return "First round after", words.time(start.get("first_round")), below


def _learning(summary: series.Record) -> list[Tile]:
    """The metric of the best evaluation, accuracy with the losses below it, or a loss."""
    judged_by = str(summary.get("judged_by") or "")
    set_name = judged_by.partition("_")[0] or "test"
    title = set_name.capitalize()
    accuracy = words.percent(summary.get(f"{set_name}_accuracy"))
    best = words.percent(summary.get(f"best_{set_name}_accuracy"))
    evaluated = words.loss(summary.get(f"{set_name}_loss"))
    train = words.loss(summary.get("train_loss"))
    in_training = words.percent(summary.get("train_accuracy"))
    numbers = [
        ("best", best),
        ("in training", in_training),
        (f"{set_name} loss", evaluated),
        ("training loss", train),
    ]
    below = ", ".join(f"{name} {value}" for name, value in numbers if value)
    loss_name, loss = (f"{title} loss", evaluated) if evaluated else ("Training loss", train)
    return [
        _judged(summary, judged_by),
        (f"{title} accuracy", accuracy, below),
        (loss_name, "" if accuracy else loss, train and evaluated and f"training loss {train}"),
        ("Training accuracy", "" if accuracy else in_training, "over the last epoch"),
    ]


def _judged(summary: series.Record, judged_by: str) -> Tile:
    """The metric by which an evaluation is the best, if no other tile has it."""
    if judged_by.endswith(("_loss", "_accuracy")):
        return "", "", ""
    value, best = (words.loss(summary.get(name)) for name in (judged_by, f"best_{judged_by}"))
    naive = words.loss(summary.get(judged_by.replace("_", "_naive_", 1)))
    numbers = [("best", best), ("naive", naive)]
    below = ", ".join(f"{name} {value}" for name, value in numbers if value)
    return judged_by.replace("_", " ").capitalize(), value, below


def _speed(summary: series.Record) -> list[Tile]:
    """The mean round, beside the optimum and an equal split; nothing without a clock."""
    if not series.has_clock(summary):
        return []
    emulated = ", emulated speeds" if summary.get("emulated") else ""
    mean, optimum, equal = (
        series.number(summary.get(key))
        for key in ("round_secs_mean", "optimal_round_secs", "equal_split_secs")
    )
    ratio = equal / mean if mean > 0 and equal > 0 else float("nan")
    speed = "" if np.isnan(ratio) else f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
    optimum_text = f"optimum {words.time(optimum)}{emulated}" if optimum > 0 else ""
    fraction = words.percent(summary.get("fraction_of_optimum"))
    return [
        ("Mean round", words.time(mean), optimum_text),
        ("Against the optimum", fraction, f"of the speed of the best possible quotas{emulated}"),
        ("Against an equal split", speed, f"as fast; equal takes {words.time(equal)}{emulated}"),
        ("Waiting", words.percent(summary.get("waiting_fraction")), "of the workers' time"),
    ]


def _traffic(summary: series.Record, history: series.History) -> list[Tile]:
    """Examples a second if there is a gate; with several workers what they send, and how long."""
    per_sec = series.number(summary.get("examples_per_sec"))
    gated = bool(series.part(summary, "gate")) and per_sec > 0
    emulated = ", emulated speeds" if summary.get("emulated") else ""
    pace = f"{per_sec:,.0f}" if per_sec >= 100 else f"{per_sec:.3g}"
    sent = gossip.bytes_of_worker(summary, history)
    secs, of = (series.number(summary.get(f"{name}_secs_mean")) for name in ("exchange", "round"))
    took = f"; sums and update {words.time(secs)}, {words.percent(secs / of)}" if of > 0 else ""
    by_each = f"by each worker, in the mean{took if secs >= 0 else ''}"
    return [
        ("Examples a second", pace if gated else "", f"without the evaluations{emulated}"),
        ("Sent a round", words.size(sent) if sent > 0 else "", by_each),
    ]


def _last_quotas(summary: series.Record) -> tuple[str, str]:
    """The quotas of the last full round."""
    values = series.matrix([summary], "quotas")[-1]
    if not np.isfinite(values).any():
        return "", ""
    if len(values) <= 6:
        return " : ".join(words.count(value) or "-" for value in values), "microbatches a round"
    low, high = np.nanmin(values), np.nanmax(values)
    return f"{low:.0f} to {high:.0f}", f"microbatches a round, {len(values)} workers"
