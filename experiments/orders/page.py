"""A report as Markdown and as one HTML page with its pictures inside, of the same blocks."""

import base64
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hetjax.report import page, words

_SHORT = 40  # letters of a cell that is not broken


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
    rows: Sequence[Sequence[str]]


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
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Picture(path, says):
            return f"![{says}]({path.name})"


def html(title: str, blocks: Iterable[Block]) -> str:
    """The text of an HTML file that loads nothing from elsewhere."""
    parts, is_open = [], False
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            parts.append("</section>" * is_open + "<section>")
            is_open = True
        parts.append(_html(block))
    return page.frame(title, "\n".join([*parts, "</section>" * is_open]))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text) if text.startswith("```"):
            return f"<pre>{words.escaped(text.strip('`').partition(chr(10))[2])}</pre>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(lines):
            return f"<ul>{''.join(f'<li>{_inline(line)}</li>' for line in lines)}</ul>"
        case Table(header, rows):
            body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
            head = "".join(f"<th>{_inline(name)}</th>" for name in header)
            return f'<div class="scroll"><table class="names"><tr>{head}</tr>{body}</table></div>'
        case Picture(path, says):
            content = base64.b64encode(path.read_bytes()).decode()
            return (
                f'<img class="picture" alt="{words.escaped(says)}" '
                f'src="data:image/svg+xml;base64,{content}">'
            )


def _cell(text: str) -> str:
    style = ' style="white-space:normal;text-align:left"' if len(text) > _SHORT else ""
    return f"<td{style}>{_inline(text)}</td>"


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", words.escaped(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
