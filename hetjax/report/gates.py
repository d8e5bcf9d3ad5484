"""What did the gate leave undone? Microbatches finished and returned, a picture and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetjax.report import heat_map, series, words
from hetjax.report.series import FloatArray, Record

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
    return Microbatches(np.where(np.isnan(finished), np.nan, given), finished)


def can_draw(history: Sequence[Record]) -> bool:
    """Whether a microbatch was given, and it is known whether it was finished."""
    return bool(np.nansum(microbatches(history).given) > 0)


def draw_microbatches(history: Sequence[Record], *, width: int) -> str:
    """A map of the share that each worker finished, bright is all of it."""
    return heat_map.draw(
        100 * microbatches(history).share(),
        series.round_ids(history),
        width=width,
        name="gate",
        label="Share of the microbatches given that was finished, as a heat map",
        most=100.0,
        title="finished, % of what was given",
    )


def caption(part: Record) -> str:
    """Says which gate, what share came back, and what became of microbatches in flight."""
    text = f"The gate '{part['trigger']}' closes a round {part['closes']}. "
    if part.get("in_flight") == "drop":
        text += "What is in flight then is given up, which exists on the virtual clock alone."
    else:
        text += "What is in flight then is finished and counts."
    share = words.percent(part.get("returned_fraction"))
    text += " What was not begun goes back to the head of the order."
    return f"{text} {share} of the microbatches came back."


def table(history: Sequence[Record]) -> str:
    """Microbatches and examples of each worker over the whole run, as HTML.

    With more than `TABLE_WORKERS` workers: those that returned most, and the others in one line.
    """
    given, finished = (np.nansum(x, axis=0) for x in microbatches(history))
    examples = series.matrix(history, "examples_counted")
    numbers = np.stack([given, finished, given - finished, np.nansum(examples, axis=0)])
    num_workers = len(given)
    most = np.sort(np.argsort(-numbers[2], kind="stable")[:TABLE_WORKERS])
    named = [(f"worker {j}", numbers[:, j]) for j in most]
    if num_workers > TABLE_WORKERS:
        others = np.delete(numbers, most, axis=1)
        named.append((f"{num_workers - TABLE_WORKERS} others", others.sum(axis=1)))
    named.append(("all", numbers.sum(axis=1)))
    lines = [[name, *(words.count(x) or "-" for x in values)] for name, values in named]
    return words.table(HEADS, lines, kind="totals")
