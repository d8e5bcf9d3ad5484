"""What did the gate leave undone? Microbatches finished and returned, a picture and a table."""

import numpy as np

from hetjax.report import over_rounds, series, words

TABLE_WORKERS = 16
HEADS = ["worker", "given", "finished", "returned", "examples counted"]


def microbatches(history: series.History) -> tuple[np.ndarray, np.ndarray]:
    """What was given and what was finished, f64[num_rounds, num_workers]; the rest was returned."""
    return series.matrix(history, "quotas"), series.matrix(history, "microbatches_done")


def share(history: series.History) -> np.ndarray:
    """Finished over given, f64[num_rounds, num_workers]; NaN if none was given."""
    given, finished = microbatches(history)
    return finished / np.where(given > 0, given, np.nan)


def draw_microbatches(history: series.History, *, width: int) -> str:
    """A map of the share that each worker finished, bright is all of it."""
    return over_rounds.heat_map(
        100 * share(history),
        series.round_ids(history),
        width=width,
        name="gate",
        label="Share of the microbatches given that was finished, as a heat map",
        most=100.0,
        title="finished, % of what was given",
    )


def caption(part: series.Record) -> str:
    """Says which gate, what share came back, and what became of microbatches in flight."""
    text = f"The gate '{part['trigger']}' closes a round {part['closes']}. "
    if part.get("in_flight") == "drop":
        text += "What is in flight then is given up, which exists only on the virtual clock."
    else:
        text += "What is in flight then is finished and counts."
    share = words.percent(part.get("returned_fraction"))
    text += " What was not begun goes back to the head of the order."
    return f"{text} {share} of the microbatches came back."


def table(history: series.History) -> str:
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
