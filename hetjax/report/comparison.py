"""How do runs compare? Their figures, losses, quotas and waiting side by side, on one page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hetjax.report import canvas, files, line_panels, over_rounds, page, sections, series, words
from hetjax.writers import kept

MOST_RUNS = 16
_POINTS = 80  # of a curve: more would hide those of other runs
_STYLES = ("-", "--")  # of the first eight runs, and of the others

Named = Sequence[tuple[str, files.Written]]


def render(runs: Sequence[files.Written]) -> str:
    """The page of several runs of training as the text of an HTML file that loads nothing.

    Args:
        runs: at most `MOST_RUNS`, finished or not.

    Raises:
        ValueError: there are too many, or one is of another kind.
    """
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for a page: at most {MOST_RUNS}")
    for run in runs:
        run.check_training()
    told = [run._replace(summary=run.numbers) for run in runs]
    named = list(zip(names(runs), told, strict=True))
    drawn = [(name, run) for name, run in named if run.history]
    going = [name for name, run in zip(names(runs), runs, strict=True) if not run.has_ended]
    parts = [
        _section("Final figures", "Of each run, so far.", _figures(named)),
        _section("What sets them apart", "Of the configurations.", _differences(named)),
        _losses(drawn, "Training loss", lambda run: series.column(run.history, "loss")),
        _losses(drawn, "Evaluated loss", _evaluated),
        _waiting(drawn),
        _quotas(drawn),
    ]
    body = [
        f"<h1>{len(runs)} runs</h1>",
        '<p class="about">hetjax report · runs side by side</p>',
        *(f'<p class="note">{words.escaped(n)} goes on, or was killed.</p>' for n in going),
        *(part for part in parts if part),
    ]
    return page.frame(f"{len(runs)} runs", "\n".join(body))


def names(runs: Sequence[files.Written]) -> list[str]:
    """A name for each run: that of its directory, or as much of its path as sets it apart."""
    paths = [run.directory.absolute() for run in runs]
    found = [path.name for path in paths]
    if len(set(found)) == len(found):
        return found
    shared = os.path.commonpath(paths)
    return [str(path.relative_to(shared)) for path in paths]


def _style(index: int) -> tuple[str, str]:
    return canvas.WORKERS[index % canvas.NUM_COLOURS], _STYLES[index // canvas.NUM_COLOURS]


def _curve(axes: canvas.Axes, x: np.ndarray, y: np.ndarray, index: int, count: int) -> None:
    """That of a run of so many; the first ones are wider, so that equal ones all show."""
    colour, shape = _style(index)
    width, at = 1.6 + 1.2 * min(count - 1 - index, 3), np.isfinite(y)
    middle, mean, *_ = series.thin(x[at], y[at], points=_POINTS)
    canvas.curve(axes, middle, mean, shape, colour=colour, linewidth=width)


def _heads(runs: Named) -> list[str]:
    """The names, which may be broken behind some characters."""
    return [re.sub(r"([_/.-])", "\\1\u200b", name) for name, _ in runs]


def _key(runs: Named) -> str:
    return line_panels.key([("", *_style(i), name) for i, (name, _) in enumerate(runs)])


def _section(heading: str, caption: str, table: str) -> str:
    return sections.section(heading, caption, None, below=table) if table else ""


# --- Tables ---


def _figures(runs: Named) -> str:
    figures: list[tuple[str, Callable[[series.Record], str]]] = [
        ("training loss", lambda s: words.loss(s.get("train_loss"))),
        *((name.replace("_", " "), partial(_metric, name)) for name in _evaluated_names(runs)),
        ("rounds", lambda s: words.count(s.get("rounds"))),
        ("examples", lambda s: words.count(s.get("examples_processed"))),
        ("mean round", lambda s: words.time(s.get("round_secs_mean")) * series.has_clock(s)),
        ("of the optimum", lambda s: words.percent(s.get("fraction_of_optimum"))),
        ("waiting", lambda s: words.percent(s.get("waiting_fraction")) * series.has_clock(s)),
        ("time of rounds", lambda s: words.time(s.get("train_secs")) * series.has_clock(s)),
        ("wall time", lambda s: words.time(s.get("wall_secs"))),
    ]
    lines = [[name, *(text(run.summary) for _, run in runs)] for name, text in figures]
    shown = [[cell or "-" for cell in line] for line in lines if any(line[1:])]
    return words.table(["", *_heads(runs)], shown)


def _evaluated_names(runs: Named) -> list[str]:
    """Of the evaluated metrics of all runs, without those of worst replicas."""
    found = [name for _, run in runs for line in run.history for name in line.get("eval") or ()]
    return [name for name in dict.fromkeys(found) if not name.startswith("worst_")][:4]


def _metric(name: str, summary: series.Record) -> str:
    shown = words.percent if name.endswith("accuracy") else words.loss
    return shown(summary.get(name))


def _differences(runs: Named) -> str:
    """The fields of the configuration that differ, a row each; empty where none does."""
    flat = [kept.flat(run.config) for _, run in runs]
    fields = dict.fromkeys(name for config in flat for name in config)
    rows = [[field, *(_short(config.get(field, "-")) for config in flat)] for field in fields]
    lines = [row for row in rows if len(set(row[1:])) > 1]
    return words.table(["", *_heads(runs)], lines) if lines else ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# --- Pictures ---


def _losses(runs: Named, heading: str, values: Callable[[files.Written], np.ndarray]) -> str:
    """Over rounds, examples and seconds; empty where no run has any."""
    if not any(np.isfinite(values(run)).any() for _, run in runs):
        return ""
    caption = "Each point is the mean of a stretch of rounds."
    if without := [name for name, run in runs if not series.has_clock(run.summary)]:
        caption += f" Without seconds, since it has no clock: {', '.join(without)}."
    draw = partial(_draw_losses, runs, heading, values)
    return sections.section(heading, caption, draw, key=_key(runs))


def _evaluated(run: files.Written) -> np.ndarray:
    """Of the first evaluated set, f64[num_rounds]."""
    found = series.evaluations(run.history, "_loss")
    own = [values for name, values in found.items() if not name.startswith("worst_")]
    return own[0] if own else np.full(len(run.history), np.nan)


@canvas.own_settings
def _draw_losses(
    runs: Named, heading: str, values: Callable[[files.Written], np.ndarray], *, width: int
) -> str:
    clocks = [
        series.clock(run.history) if series.has_clock(run.summary) else None for _, run in runs
    ]
    longest = max((float(secs[-1]) for secs in clocks if secs is not None), default=0.0)
    factor, unit = words.time_unit(longest)
    abscissas: list[tuple[str, str, list[np.ndarray | None]]] = [
        ("rounds", "rounds", [series.round_ids(run.history) + 1 for _, run in runs]),
        ("examples", "examples", [series.column(r.history, "examples_processed") for _, r in runs]),
    ]
    if longest > 0:
        scaled = [None if secs is None else secs * factor for secs in clocks]
        abscissas.append(("time", f"{unit} since the start", scaled))
    figure, panels = canvas.panels(width, len(abscissas), height=200, beside=width >= canvas.NARROW)
    drawn = [values(run) for _, run in runs]
    for axes, (name, label, columns) in zip(panels, abscissas, strict=True):
        canvas.log_where_wide(axes, np.concatenate(drawn))
        for index, (x, y) in enumerate(zip(columns, drawn, strict=True)):
            if x is not None:
                _curve(axes, x, y, index, len(runs))
        known = np.concatenate([x for x in columns if x is not None])
        canvas.finish(axes, f"over {name}", known, label)
    return canvas.to_svg(figure, f"{heading}-{width}", heading)


def _waiting(runs: Named) -> str:
    """Empty where no run has a clock."""
    runs = [(name, run) for name, run in runs if series.has_clock(run.summary)]
    if not runs:
        return ""
    caption = "The part of the workers' time that they waited, in the mean of a stretch of rounds."
    return sections.section("Waiting", caption, partial(_draw_waiting, runs), key=_key(runs))


@canvas.own_settings
def _draw_waiting(runs: Named, *, width: int) -> str:
    figure, (axes,) = canvas.panels(width, 1, height=170)
    ends, top = [], 1.0
    for index, (_, run) in enumerate(runs):
        shown = series.full_rounds(run.history)
        ids, y = series.round_ids(shown), 100 * series.column(shown, "waiting_fraction")
        _curve(axes, ids, y, index, len(runs))
        ends.append(ids[-1] + 1)
        top = max(top, float(np.nanmax(y, initial=0.0)))
    axes.set_ylim(0, 1.08 * top)
    canvas.finish(axes, "waiting, % of the workers' time", np.array(ends), "round")
    canvas.round_axis(axes, 0, max(ends))
    return canvas.to_svg(figure, f"waiting-{width}", "Waiting over the rounds")


def _quotas(runs: Named) -> str:
    """A picture for each run, side by side as far as there is room."""
    caption = "Microbatches that each worker is given a round; short last rounds are left out."
    cells = []
    for name, run in runs:
        if series.count_workers(run.history):
            picture = over_rounds.draw_quotas(run.history, width=sections.SCREENS["narrow"])
            cells.append(f"<div><h3>{words.escaped(name)}</h3>{picture}</div>")
    if not cells:
        return ""
    below = f'<div class="runs">{"".join(cells)}</div>'
    return sections.section("Quotas", caption, None, below=below)
