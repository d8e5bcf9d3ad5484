"""Tables in Markdown."""

from collections.abc import Iterable, Iterator, Sequence


def lines(header: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """The lines of a table, each as soon as its row is there."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """All of them."""
    return "\n".join(lines(header, rows))
