"""The tables that the benchmark programs print."""

import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from experiments import markdown

MOST_WORDS = 8  # of a name


class Row(NamedTuple):
    """One figure. What else is to be said of it is a note."""

    name: str  # at most eight words
    target: str
    figure: str  # with its unit; a range in brackets
    n: int | str = 1  # runs, rounds or kills that it rests on


Found = Iterable[Row | str]
"""The rows of a group, and its notes: sentences that stand below its table, each once."""


def middle(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """The median, and the range where there are several."""
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{unit}{spread}"


def around(values: Sequence[float], form: str = ".4f") -> str:
    """The mean, and the standard deviation."""
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def most(values: Sequence[float], form: str = ".3g", unit: str = "") -> str:
    """The median, and the greatest."""
    return f"{statistics.median(values):{form}}{unit} (most {max(values):{form}})"


def share(good: Sequence[object]) -> str:
    """How many of them are true: `9 of 10`."""
    return f"{sum(map(bool, good))} of {len(good)}"


def processor() -> str:
    """Its model and widest vectors, where the system tells: ratios of libraries depend on them."""
    told = pathlib.Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    vectors = {"avx512f": "AVX-512", "avx2": "AVX2"}
    return ", ".join([model, *[vectors[flag] for flag in vectors if flag in flags][:1]])


def machine() -> str:
    """What this process computes on."""
    return (
        f"{processor()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}, Python {platform.python_version()}, "
        f"JAX {jax.__version__}"
    )


def table(found: Found) -> Iterator[str]:
    """The lines of a table in Markdown, and of its notes.

    Raises:
        ValueError: at the end, a name has more than eight words.
    """
    notes, wrong = dict[str, None](), []

    def rows() -> Iterator[Row]:
        for row in found:
            if isinstance(row, str):
                notes[row] = None
            else:
                yield row
                wrong.extend([row.name] if len(row.name.split()) > MOST_WORDS else [])

    yield from markdown.lines(Row._fields, rows())
    yield from ["", *(f"- {note}" for note in notes)] if notes else []
    if wrong:
        raise ValueError(f"Names of more than {MOST_WORDS} words: {'; '.join(wrong)}")


def read(text: str) -> Iterator[Row | str]:
    """The rows and notes of printed tables; each cell is a text."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| name | target |"):
            yield Row(*line[2:-2].split(" | "))
        elif line.startswith("- "):
            yield line[2:]


def print_tables(
    groups: Mapping[str, Callable[[], Found]],
    only: Sequence[str],
    machine: Callable[[], str] = machine,
) -> None:
    """Measures the groups, or those in `only`, and prints a table in Markdown of each.

    Seconds of each group go to stderr. Exits with a message where `only` has an unknown name.
    `machine` says what they are measured on.
    """
    if unknown := set(only) - set(groups):
        sys.exit(f"--only: there is no {', '.join(unknown)}; allowed are {', '.join(groups)}")
    print(machine())
    for name in [name for name in groups if not only or name in only]:
        began = time.perf_counter()
        print(f"\n## {name}\n")
        for line in table(groups[name]()):
            print(line, flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
