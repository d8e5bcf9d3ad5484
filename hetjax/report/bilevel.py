"""How did a bilevel run go? The page of `fit_bilevel`: losses of both levels, and their rounds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hetjax.report import (
    canvas,
    line_panels,
    over_rounds,
    page,
    sections,
    series,
    tiles,
    timeline,
    words,
)

LOSSES: list[line_panels.Line] = [
    ("upper_loss", canvas.ACCENT, "-", "F, the upper loss"),
    ("lower_loss", canvas.WORKERS[0], "-", "f, the lower loss"),
]
_FAR = "It tells how far the lower level is from its minimum: "
_GAP = "the gap, f(x, y) - f(x, z)."
_RESIDUAL = "the residual of the linear system, over its right side."
_EVALUATED = "Of the lower variable that was reached, at each evaluation."
_MOST_KINDS = 4  # whose quotas are drawn
_METRIC_COLOURS = [canvas.ACCENT, canvas.WORKERS[0], canvas.WORKERS[2], canvas.WORKERS[5]]


def render(
    *,
    config: series.Record,
    summary: series.Record,
    history: series.History,
    rounds: series.History,
) -> str:
    """The page as the text of an HTML file that loads nothing from elsewhere.

    Args:
        config: the resolved configuration, shown as it is.
        summary: as in summary.json.
        history: one record an outer step, as the lines of metrics.jsonl.
        rounds: one record a round of either level, in their order.
    """
    workers = words.plural(summary["num_workers"], "worker")
    found = _sections(summary, drawn(history), rounds) if history else []
    return page.of_run(
        f"A bilevel problem · {workers}",
        about=page.about(summary, "outer_steps", "rounds"),
        notes=[*page.endings(summary, "outer step"), *series.not_finite(history)],
        parts=[tiles.grid(_tiles(summary)), *found],
        config=config,
        summary=summary,
    )


def drawn(history: series.History) -> list[dict[str, Any]]:
    """The records with the fields that `line_panels` draws."""
    found = []
    for record in history:
        secs = series.number(record.get("start_secs")) + series.number(record.get("step_secs"))
        of_sets = series.part(record, "eval")
        found.append({**record, **of_sets, "train_secs": secs, "step": record["step"] + 1})
    return found


def numbered(rounds: series.History) -> list[dict[str, Any]]:
    """The rounds of both levels as those of one run."""
    return [{**record, "round": index, "full": True} for index, record in enumerate(rounds)]


def losses(history: series.History, *, width: int) -> tuple[list[str], str]:
    """The picture of F and f that a card shows, if one is known, and the key of its lines."""
    steps = drawn(history)
    lines = line_panels.known(LOSSES, steps)
    draw = partial(line_panels.draw_lines, "loss", steps, lines, x_label="outer steps")
    return [draw(width=width)] if lines else [], line_panels.key(lines)


def _tiles(summary: series.Record) -> list[tiles.Tile]:
    missing, twice, processed, again = (
        sum(of_level[f"examples_{what}"] for of_level in summary["levels"].values())
        for what in ("missing", "duplicated", "processed", "revisited")
    )
    best = words.loss(summary.get("best_upper_loss"))
    each = summary["cost_of_a_hypergradient"]
    products = each["hessian_products"] + each["cross_products"]
    gap, residual = (words.loss(summary.get(name)) for name in ("gap", "residual"))
    accuracies = (name for name in summary if name.endswith("accuracy"))
    first = next((name for name in accuracies if not name.startswith("best_")), "")
    return [
        (
            first.replace("_", " ").capitalize(),
            words.percent(summary.get(first)),
            f"best {words.percent(summary.get(f'best_{first}'))}",
        ),
        ("Upper loss F", words.loss(summary.get("upper_loss")), best and f"best {best}"),
        ("Gap", gap, f"multiplier {words.loss(summary.get('multiplier'))}"),
        ("Residual", residual, "of the linear system, over its right side"),
        ("An outer step", words.time(summary["step_secs_mean"]), "in the mean"),
        ("Waiting", words.percent(summary["waiting_fraction"]), "of the workers' time"),
        (
            "A hypergradient",
            words.plural(each["gradients"], "gradient"),
            f"{words.plural(products, 'product')}, {words.plural(each['losses'], 'loss')}",
        ),
        (
            "Missing and duplicated",
            f"{missing:,} and {twice:,}",
            f"of {processed:,} processed; {again:,} more in batches held",
        ),
        ("Sent an outer step", words.size(summary["bytes_sent_per_step"]), "by all workers"),
        (
            "Wall time",
            words.time(summary["wall_secs"]),
            f"first step after {words.time(summary['start']['first_step'])}",
        ),
    ]


def _sections(summary: series.Record, history: series.History, rounds: series.History) -> list[str]:
    metrics = list(series.evaluations(history, ""))[: len(_METRIC_COLOURS)]
    accuracies = [name for name in metrics if name.endswith("accuracy")]
    others = [name for name in metrics if name not in accuracies]
    losses = "F and f at the lower variable that was reached, over outer steps and over time."
    pictures = (
        ("Losses", losses, LOSSES),
        ("Gap", _FAR + _GAP, [("gap", canvas.INK, "-", _GAP)]),
        ("Residual", _FAR + _RESIDUAL, [("residual", canvas.INK, "-", _RESIDUAL)]),
        ("Accuracy", _EVALUATED, _lines(accuracies)),
        ("Evaluated", _EVALUATED, _lines(others)),
    )
    found = [_picture(heading, caption, history, lines) for heading, caption, lines in pictures]
    return [*(part for part in found if part), *round_sections(summary, rounds)]


def _lines(metrics: Sequence[str]) -> list[line_panels.Line]:
    styled = zip(metrics, _METRIC_COLOURS, strict=False)
    return [(name, colour, "-", name.replace("_", " ")) for name, colour in styled]


def _picture(
    heading: str, caption: str, history: series.History, lines: Sequence[line_panels.Line]
) -> str:
    """Curves over steps and over seconds, of lines that have a number; empty if none has."""
    if not (known := line_panels.known(lines, history)):
        return ""
    draw = partial(
        line_panels.draw_lines,
        heading.lower(),
        history,
        known,
        percent=heading == "Accuracy",
        x_label="outer steps",
    )
    return sections.section(heading, caption, draw, key=line_panels.key(known))


def round_sections(summary: series.Record, rounds: series.History) -> list[str]:
    """The sections on workers and rounds: waiting, quotas, time of each kind, and the ledger.

    Args:
        summary: with `kinds` and `levels`.
        rounds: as of `render`.
    """
    time = "Every sum that the estimator asks for is a round. Each kind has quotas of its own."
    visits = "A batch that is held is done again within its outer step; this is a revisit."
    return [
        *(_of_rounds(rounds) if series.count_workers(rounds) else []),
        sections.section("Where the time goes", time, None, below=_kinds_table(summary)),
        sections.section("Who was visited how often", visits, None, below=_ledger_table(summary)),
    ]


def _of_rounds(rounds: series.History) -> list[str]:
    """Pictures of the workers: their last rounds, and their quotas for the costliest kinds."""
    in_turn = numbered(rounds)
    bars = "Each bar is one worker in one round of either level, with its microbatches."
    draw = partial(timeline.draw_timeline, in_turn)
    found = [sections.section("Who computes, who waits", bars, draw)]
    of_kind: dict[str, list[series.Record]] = {}
    for record in in_turn:
        of_kind.setdefault(f"{record['level']} level, {record['request']}", []).append(record)
    secs = {name: np.nansum(series.column(own, "round_secs")) for name, own in of_kind.items()}
    given = "Microbatches that each worker is given in a round of this kind."
    for name in sorted(of_kind, key=lambda name: -secs[name])[:_MOST_KINDS]:
        own = [{**record, "round": index} for index, record in enumerate(of_kind[name])]
        if len(own) > 1:
            draw = partial(over_rounds.draw_quotas, own)
            found.append(sections.section(f"Quotas: {name}", given, draw))
    return found


def _kinds_table(summary: series.Record) -> str:
    total = sum(kind["secs"] for kind in summary["kinds"].values()) or 1.0
    head = ("level: what is asked", "rounds", "a round", "share of time", "sent a round", "quotas")
    lines = [
        (
            name,
            words.count(kind["rounds"]),
            words.time(kind["secs"] / kind["rounds"]),
            words.percent(kind["secs"] / total),
            words.size(kind["bytes_sent"] / kind["rounds"]),
            " ".join(map(words.count, kind["quotas"])),
        )
        for name, kind in summary["kinds"].items()
    ]
    return words.table(head, lines)


def _ledger_table(summary: series.Record) -> str:
    head = ("level", "processed", "missing", "duplicated", "never processed", "revisits")
    names = ("processed", "missing", "duplicated", "never_processed", "revisited")
    lines = [
        (name, *(words.count(of_level[f"examples_{what}"]) for what in names))
        for name, of_level in summary["levels"].items()
    ]
    return words.table(head, lines)
