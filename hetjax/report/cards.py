"""What does the last line of a notebook's cell show? A card: some numbers, and pictures beside.

A card is inline HTML of at most `MOST_BYTES`, without a frame, a script or a style sheet. So
neither do a notebook's styles reach into it nor its into them, and it looks alike in Jupyter,
Colab and on a page of documentation. Its text has the colour of the text around it; all other
colours can be seen on a light and on a dark ground.
"""

import re
from collections.abc import Sequence

import numpy as np

from hetjax.report import bilevel, graph_pictures, losses, over_rounds, series, timeline, words

MOST_BYTES = 60_000
WIDTH = 330  # pixels, of a picture

_MOST_BARS = 32  # workers, whose rounds are drawn as bars

Rows = Sequence[tuple[str, str]]  # (name, text)

_COLOURS = {  # seen on light and on dark ground
    "ink": "currentColor",
    "muted": "#7a808a",
    "grid": "rgba(128,128,128,.3)",
    "accent": "#7b6ef0",
    "font": "system-ui,sans-serif",
    "page": "transparent",
}
_WORKERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6d3b", "#7a8894"]
_ON_WORKERS = ["#fff", "#171b22", "#fff", "#171b22", "#171b22", "#fff", "#fff", "#171b22"]
_COLOURS |= {f"w{j}": colour for j, colour in enumerate(_WORKERS)}
_COLOURS |= {f"on-w{j}": colour for j, colour in enumerate(_ON_WORKERS)}

_SWATCH = "display:inline-block;vertical-align:-1px;width:20px;margin:0 5px 0 0"
_FILLED = "linear-gradient(90deg,var(--w0) 50%,var(--w1) 50%)"
_HATCHED = "repeating-linear-gradient(135deg,var(--muted) 0 1px,transparent 1px 4px)"
_BARS = "".join(
    f'<span><i style="{_SWATCH};height:11px;background:{fill}"></i>{name}</span>'
    for fill, name in ((_FILLED, "computing"), (_HATCHED, "waiting"))
)


def card(
    title: str, rows: Rows, pictures: Sequence[str] = (), *, key: str = "", width: int = WIDTH
) -> str:
    """Numbers and pictures as inline HTML.

    Args:
        title: above all.
        rows: (name, text) of each number.
        pictures: as HTML; side by side as far as there is room. Those that
            would make the card larger than `MOST_BYTES` are left out.
        key: what the lines are, as HTML.
        width: of a picture, in pixels.
    """
    cells = "".join(
        f'<span style="color:var(--muted)">{words.escaped(name)}</span>'
        f'<span style="overflow-wrap:anywhere">{words.escaped(text)}</span>'
        for name, text in rows
    )
    grid = "display:grid;grid-template-columns:max-content minmax(0,1fr);gap:1px 14px"
    parts = [
        f'<div style="font-weight:600;margin-bottom:4px">{words.escaped(title)}</div>',
        f'<div style="{grid};font-variant-numeric:tabular-nums;max-width:720px">{cells}</div>',
    ]
    size = sum(len(part.encode()) for part in parts) + len(key.encode()) + 1000
    shown = []
    for picture in map(_inline, pictures):
        size += len(picture.encode()) + 100
        if picture and size <= MOST_BYTES:
            shown.append(f'<div style="width:{width}px;max-width:100%">{picture}</div>')
    if shown:
        row = "display:flex;flex-wrap:wrap;gap:8px 16px;align-items:flex-start;margin-top:8px"
        parts.append(f'<div style="{row}">{"".join(shown)}</div>')
    if key:
        below = "display:flex;flex-wrap:wrap;gap:2px 16px;color:var(--muted);font-size:12px"
        parts.append(f'<div style="{below}">{key}</div>')
    style = "font:14px/1.45 var(--font);text-align:left"
    return _inline(f'<div style="{style}">{"".join(parts)}</div>')


def of_run(
    title: str,
    rows: Rows,
    *,
    summary: series.Record,
    history: series.History,
    rounds: series.History = (),
) -> str:
    """The card of a run: its losses, its quotas, computing and waiting.

    Args:
        title: of the card.
        rows: its numbers.
        summary: as summary.json.
        history: a record a round, or of a bilevel run an outer step.
        rounds: of a bilevel run a record a round of either level, as far as they are known.
    """
    history = series.taken(history)
    if any("upper_loss" in record for record in history[:1]):
        pictures, key = bilevel.losses(history, width=WIDTH)
        history = bilevel.numbered(rounds)
    else:
        pictures, key = [], ""
        evaluated = series.evaluations(history, "loss")
        has_training = bool(np.isfinite(series.column(history, "loss")).any())
        if has_training or evaluated:
            pictures.append(losses.draw_losses(history, summary, width=WIDTH, most_panels=1))
            key = losses.key(evaluated, has_training=has_training)
        if series.count_workers(history):
            pictures.append(over_rounds.draw_quotas(history, width=WIDTH))
    if 0 < series.count_workers(history) <= _MOST_BARS and series.has_clock(summary):
        pictures.append(timeline.draw_timeline(history, width=WIDTH))
        key += _BARS
    return card(title, rows, pictures, key=key)


def of_links(
    title: str,
    rows: Rows,
    num_workers: int,
    links: Sequence[tuple[Sequence[Sequence[int]], Sequence[float] | None]],
    *,
    in_turn: bool = False,
) -> str:
    """The card of a graph of workers.

    Args:
        title, rows: as of `card`.
        num_workers: n.
        links: of each picture the pairs of workers, and how strong each is, 0 to 1.
        in_turn: whether the pictures are phases, in which the first of a pair sends.
    """
    pictures = [
        graph_pictures.draw_links(
            num_workers,
            pairs,
            label=title,
            weights=weights,
            arrows=in_turn,
            title=f"phase {index}" if in_turn else "",
        )
        for index, (pairs, weights) in enumerate(links)
    ]
    told = graph_pictures.left_out(max(len(pairs) for pairs, _ in links))
    return card(title, rows, pictures, key=told, width=graph_pictures.WIDTH)


def _inline(text: str) -> str:
    """HTML without the variables and classes that the report's style sheet has."""
    text = re.sub(r"var\(--([\w-]+)\)", lambda match: _COLOURS[match[1]], text)
    text = text.replace('class="picture"', 'style="display:block;width:100%;height:auto"')
    return text.replace('class="line" style="', f'style="{_SWATCH};vertical-align:4px;')
