"""What did single rounds look like in numbers? A table of the first and the last ones."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.report import series, words

TABLE_ROUNDS = 12  # at each end of the run
HEADS = ["round", "epoch", "examples", "loss", "round time", "waiting", "quotas", "evaluated"]


def rounds_table(history: series.History) -> str:
    """The first and the last `TABLE_ROUNDS` rounds as an HTML table."""
    first, *last = series.first_and_last(history, TABLE_ROUNDS)
    lines = [_line(record) for record in first]
    if (hidden := len(history) - 2 * TABLE_ROUNDS) > 0:
        lines.append([f"… {hidden:,} rounds …"])
    lines += [_line(record) for part in last for record in part]
    return words.table(HEADS, lines, kind="rounds")


def _line(record: series.Record) -> list[str]:
    return [
        words.count(record.get("round")),
        words.count(record.get("epoch")),
        words.count(record.get("examples")),
        words.loss(record.get("loss")) or "-",
        words.time(record.get("round_secs")),
        words.percent(record.get("waiting_fraction")),
        _quotas(record),
        _evaluated(record.get("eval")),
    ]


def _quotas(record: series.Record) -> str:
    """Microbatches given to each worker; if fewer were done, those done "of" those given."""
    given, done = (_numbers(record.get(name)) for name in ("quotas", "microbatches_done"))
    return f"{done} of {given}" if given and done.strip(" -") and done != given else given


def _numbers(values: Sequence[float] | None) -> str:
    return " ".join(words.count(value) or "-" for value in values or ())


def _evaluated(numbers: series.Record | None) -> str:
    return ", ".join(
        f"{name} {series.number(value):.4g}" for name, value in (numbers or {}).items()
    )
