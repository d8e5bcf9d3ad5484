"""How does the report write a number? Short texts, empty where there is no number."""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hetjax.report.series import Record, number

MOST_ROWS = 12  # at each end of a table


def escaped(value: Any) -> str:
    """`value` as text that HTML shows as it is, in an element and in an attribute."""
    return html.escape(str(value), quote=True)


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, kind: str = "names") -> str:
    """An HTML table, which scrolls if it is wide; `kind` is its class in style.css.

    A line of one cell is as wide as all columns.
    """
    heads = "".join(f"<th>{escaped(name)}</th>" for name in head)
    marked = [f"<tr>{heads}</tr>"]
    for cells in lines:
        start = f'<td colspan="{len(head)}">' if len(cells) == 1 else "<td>"
        marked.append(f"<tr>{start}{'</td><td>'.join(map(escaped, cells))}</td></tr>")
    return f'<div class="scroll"><table class="{kind}">{"".join(marked)}</table></div>'


def ends(rows: Sequence[Any], line: Callable[[Any], list[str]], name: str) -> list[list[str]]:
    """The lines of a table's first and last `MOST_ROWS` rows, and how many `name` are between.

    Example:
        >>> ends(range(3), lambda row: [str(row)], "rounds")
        [['0'], ['1'], ['2']]
    """
    if (hidden := len(rows) - 2 * MOST_ROWS) <= 0:
        return [line(row) for row in rows]
    first, last = rows[:MOST_ROWS], rows[-MOST_ROWS:]
    return [*map(line, first), [f"… {hidden:,} {name} …"], *map(line, last)]


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """(name, text) of each row, as lines whose texts begin in one column.

    Example:
        >>> print(aligned([("loss", "0.1"), ("rounds", "20")]))
          loss    0.1
          rounds  20
    """
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def time_unit(secs: float) -> tuple[float, str]:
    """The factor and the name of the unit in which `secs` reads best.

    Example:
        >>> time_unit(0.25)
        (1000.0, 'ms')
    """
    limits = [(2e-3, 1e6, "µs"), (2.0, 1e3, "ms"), (300.0, 1.0, "s"), (10800.0, 1 / 60, "min")]
    for limit, factor, name in limits:
        if not secs >= limit:
            return factor, name
    return 1 / 3600, "h"


def time(value: Any) -> str:
    """Seconds in the unit that reads best.

    Example:
        >>> time(0.0412), time(61.5), time(None)
        ('41.2 ms', '61.5 s', '')
    """
    secs = number(value)
    if np.isnan(secs):
        return ""
    factor, unit = time_unit(secs)
    digits = max(0, 2 - int(np.floor(np.log10(max(secs * factor, 1e-2)))))
    return f"{secs * factor:,.{min(digits, 2)}f} {unit}"


def size(value: Any) -> str:
    """Bytes in the unit that reads best.

    Example:
        >>> size(496_048), size(12e9), size(None)
        ('496 kB', '12.0 GB', '')
    """
    amount = number(value)
    if np.isnan(amount):
        return ""
    for limit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= limit:
            digits = max(0, 2 - int(np.floor(np.log10(amount / limit))))
            return f"{amount / limit:,.{digits}f} {name}"
    return f"{amount:.0f} bytes"


def percent(value: Any) -> str:
    """A fraction in percent, to one decimal."""
    part = number(value)
    return "" if np.isnan(part) else f"{100 * part:.1f} %"


def loss(value: Any) -> str:
    """A number to four digits."""
    amount = number(value)
    return "" if np.isnan(amount) else f"{amount:.4g}"


def count(value: Any) -> str:
    """A number of things, with commas at thousands; to two decimals if it is not whole."""
    amount = number(value)
    if np.isnan(amount):
        return ""
    return f"{amount:,.0f}" if amount == round(amount) else f"{amount:,.2f}"


def plural(value: Any, noun: str) -> str:
    """A number of things with their name.

    Example:
        >>> plural(1, "round"), plural(35940, "example")
        ('1 round', '35,940 examples')
    """
    amount = count(value)
    return f"{amount} {noun}{'' if amount == '1' else 's'}" if amount else ""


def overruns(summary: Record) -> str:
    """That the machine was too slow to play the emulated workers; "" where it was not."""
    fraction = summary.get("overrun_fraction") or 0.0
    if fraction <= 0.01:
        return ""
    return (
        f"{fraction:.1%} of the microbatches took longer than the emulated worker: its times are "
        "void; raise cluster.secs_per_microbatch"
    )
