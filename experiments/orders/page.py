"""The blocks of a report, as Markdown."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments import markdown as tables


class Heading(NamedTuple):
    text: str
    level: int = 2


class Text(NamedTuple):
    """A paragraph; `**bold**` and `code` in it, and a command in a block of its own."""

    text: str


class Bullets(NamedTuple):
    lines: Sequence[str]


class Table(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Iterable[object]]


class Picture(NamedTuple):
    path: pathlib.Path  # an SVG file beside the report
    says: str


Block = Heading | Text | Bullets | Table | Picture


def markdown(blocks: Iterable[Block]) -> str:
    """The text of a Markdown file; pictures are links to files beside it."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Table(header, rows):
            return tables.table(header, rows)
        case Picture(path, says):
            return f"![{says}]({path.name})"
