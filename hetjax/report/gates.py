"""What did the gate leave undone? Microbatches finished and returned, a picture and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hetjax.report import canvas, heat_map, series, words
from hetjax.report.series import FloatArray, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE_WORKERS = 16
HEADS = ["worker", "given", "finished", "returned", "examples counted"]


def gate(summary: Record) -> Record:
    """The summary's part on the gate; empty in runs without one."""
    part = series.part(summary, "gate")
    return part if part.get("trigger") != "none" else {}


class Microbatches(NamedTuple):
    """Microbatches of each round, f64[num_rounds, num_workers] or f64[num_rounds] of one worker.

    NaN if they are not known.
    """

    given: FloatArray
    finished: FloatArray  # the others were returned

    def share(self) -> FloatArray:
        """Finished over given; NaN if none was given."""
        given = np.where(self.given > 0, self.given, np.nan)
        return self.finished / given


def microbatches(history: Sequence[Record]) -> Microbatches:
    """What was given and what was finished, if both are known."""
    given, finished = (series.matrix(history, k) for k in ("quotas", "microbatches_done"))
    known = (given >= 0) & (given < 1e9) & (finished >= 0)
    given = np.where(known, given, np.nan)
    return Microbatches(given, np.minimum(np.where(known, finished, np.nan), given))


def can_draw(history: Sequence[Record]) -> bool:
    """Whether a microbatch was given, and it is known whether it was finished."""
    return bool(np.nansum(microbatches(history).given) > 0)


def draw_microbatches(history: Sequence[Record], *, width: int, rounds: int | None = None) -> str:
    """Bars of the first and the last `rounds` rounds; a map of all rounds for many workers."""
    if series.count_workers(history) <= canvas.NUM_COLOURS:
        return _draw_bars(history, width=width, rounds=rounds)
    return heat_map.draw(
        100 * microbatches(history).share(),
        series.round_ids(history),
        width=width,
        name="gate",
        label="Share of the microbatches given that was finished, as a heat map",
        most=100.0,
        title="finished, % of what was given",
    )


@canvas.own_settings
def _draw_bars(history: Sequence[Record], *, width: int, rounds: int | None) -> str:
    """A row for each worker and a column for each round, all of one scale."""
    figure, panels = canvas.worker_rows(
        history, rounds, width=width, row=25.0, foot=8, title_end=", microbatches"
    )
    columns = max(3, *(len(part) for _, part in panels))
    found = [microbatches(part) for _, part in panels]
    most = max(np.nanmax(these.given, initial=1.0) for these in found)
    for (axes, part), these in zip(panels, found, strict=True):
        axes.set_xlim(0, columns)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        ids = series.round_ids(part)
        canvas.name_rounds(axes, range(len(ids)), [f"round {name:.0f}" for name in ids])
        room = 1 - 14 * canvas.pixel(axes)  # part of a column for the largest quota
        for j, colour in enumerate(canvas.worker_colours(these.given.shape[1])):
            of_worker = Microbatches(these.given[:, j], these.finished[:, j])
            _row(axes, j, of_worker, scale=room / most, colour=colour)
    return canvas.to_svg(figure, f"gate-{width}", "Microbatches finished and returned")


def _row(axes: Axes, j: int, of_worker: Microbatches, *, scale: float, colour: str) -> None:
    """A worker's bars with numbers: finished microbatches filled, returned ones as an outline."""
    pixel, half = canvas.pixel(axes), 0.4
    split, end = of_worker.finished * scale, of_worker.given * scale
    solid = [(float(i), i + split[i], j) for i in np.flatnonzero(split > 0)]
    canvas.fill_boxes(axes, solid, half=half, facecolor=colour)
    inset = 0.6 * pixel  # half of a line 1.2 pixels wide
    back = np.flatnonzero(end > split)
    hollow = [(i + split[i] + inset, i + end[i] - inset, j) for i in back]
    outline: dict[str, Any] = {"edgecolor": colour, "linewidth": 1.2, "facecolor": "none"}
    canvas.fill_boxes(axes, hollow, half=half - 0.6 / 25.0, **outline)
    returned = of_worker.given - of_worker.finished
    for starts, ends, values, ink in (
        (0 * split, split, of_worker.finished, canvas.ink_on(colour)),
        (split, end, returned, canvas.INK),
    ):
        for i in np.flatnonzero(ends > starts):
            text = words.count(values[i])
            if ends[i] - starts[i] > (6 + 7 * len(text)) * pixel:
                canvas.number(axes, i + (starts[i] + ends[i]) / 2, j, text, color=ink)


def caption(part: Record) -> str:
    """Says which gate, what share came back, and what became of microbatches in flight."""
    trigger = part.get("trigger")
    words_of_gate = part.get("closes")
    when = words_of_gate if isinstance(words_of_gate, str) else "before every quota is done"
    when = when if isinstance(trigger, str) else ""
    text = f"The gate '{trigger}' closes a round {when}. " if when else ""
    if part.get("in_flight") == "drop":
        text += (
            "What is in flight then is given up, which exists on the virtual clock alone, to "
            "compare with; it goes back to the head of the order with what was not begun."
        )
    else:
        text += (
            "What is in flight then is finished and counts; what was not begun goes back to the "
            "head of the order."
        )
    share = words.percent(part.get("returned_fraction"))
    return text + (f" {share} of the microbatches came back." if share else "")


def table(history: Sequence[Record]) -> str:
    """Microbatches and examples of each worker over the whole run, as HTML.

    With more than `TABLE_WORKERS` workers: those that returned most, and the others in one line.
    """
    given, finished = (np.nansum(x, axis=0) for x in microbatches(history))
    examples = series.matrix(history, "examples_counted")
    examples = np.where((examples >= 0) & (examples < 1e15), examples, np.nan)
    counted = np.where(np.isfinite(examples).any(axis=0), np.nansum(examples, axis=0), np.nan)
    numbers = np.stack([given, finished, given - finished, counted])
    num_workers = len(given)
    most = np.sort(np.argsort(-numbers[2], kind="stable")[:TABLE_WORKERS])
    named = [(f"worker {j}", numbers[:, j]) for j in most]
    if num_workers > TABLE_WORKERS:
        others = np.delete(numbers, most, axis=1)
        named.append((f"{num_workers - TABLE_WORKERS} others", others.sum(axis=1)))
    named.append(("all", numbers.sum(axis=1)))
    lines = [[name, *(words.count(x) or "-" for x in values)] for name, values in named]
    return words.table(HEADS, lines, kind="totals")
