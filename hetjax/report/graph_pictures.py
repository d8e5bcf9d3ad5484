"""Who exchanges with whom? Workers on a circle, and the links between them."""

from collections.abc import Sequence

import numpy as np

from hetjax.report import words

WIDTH, _MARGIN = 250, 22  # pixels
_MOST_LINKS = 2000  # that are drawn
_MOST_NAMES = 32  # workers, above which a worker is a dot without its number


def draw_links(
    num_workers: int,
    links: Sequence[Sequence[int]],
    *,
    label: str,
    weights: Sequence[float] | None = None,
    arrows: bool = False,
    title: str = "",
) -> str:
    """Workers on a circle, from the top clockwise, as inline SVG.

    Args:
        num_workers: n.
        links: pairs of workers.
        label: what a screen reader reads out.
        weights: f64[num_links], 0 to 1: how strong each link is drawn; None: all alike.
        arrows: draw from the first worker of each pair to the second.
        title: above the circle.
    """
    angle = 2 * np.pi * np.arange(num_workers) / num_workers
    radius = WIDTH / 2 - _MARGIN if num_workers > 1 else 0.0
    x, y = WIDTH / 2 + radius * np.sin(angle), WIDTH / 2 + 16 - radius * np.cos(angle)
    dot = float(np.clip(190 / num_workers, 1.2, 11))
    parts = [
        f'<svg class="picture" role="img" aria-label="{words.escaped(label)}" '
        f'viewBox="0 0 {WIDTH} {WIDTH + 20}">'
    ]
    if title:
        style = "font:12px var(--font);fill:var(--ink)"
        parts.append(f'<text x="4" y="13" style="{style}">{words.escaped(title)}</text>')
    width = float(np.clip(60 / max(len(links), 1), 0.4, 1.6))
    drawn: dict[float, list[str]] = {}  # paths by weight
    for index in range(0, len(links), _step(len(links))):
        i, j = links[index]
        line = f"M{x[i]:.1f} {y[i]:.1f}L{x[j]:.1f} {y[j]:.1f}"
        line += _head(x[i], y[i], x[j], y[j], dot) if arrows else ""
        weight = 1.0 if weights is None else round(float(np.clip(weights[index], 0, 1)), 2)
        drawn.setdefault(weight, []).append(line)
    for weight, lines in sorted(drawn.items()):
        stroke = f"stroke:var(--accent);stroke-width:{width * (0.4 + 1.6 * weight):.2f}"
        opacity = f"opacity:{0.15 + 0.85 * weight:.2f}"
        parts.append(f'<path d="{"".join(lines)}" style="fill:none;{stroke};{opacity}"/>')
    dots = "".join(f"M{x[worker]:.1f} {y[worker]:.1f}h0" for worker in range(num_workers))
    stroke = f"stroke:var(--w0);stroke-width:{2 * dot:.1f};stroke-linecap:round"
    parts.append(f'<path d="{dots}" style="{stroke}"/>')
    size = min(11.0, 1.2 * dot + 1)
    style = f"font:{size:.0f}px var(--font);fill:var(--on-w0);text-anchor:middle"
    for worker in range(num_workers if num_workers <= _MOST_NAMES else 0):
        place = f'x="{x[worker]:.1f}" y="{y[worker] + 0.36 * size:.1f}"'
        parts.append(f'<text {place} style="{style}">{worker}</text>')
    return "".join(parts) + "</svg>"


def left_out(num_links: int) -> str:
    """Says that not all links are drawn; empty where they are."""
    step = _step(num_links)
    return f"one of {step} links is drawn" if step > 1 else ""


def _step(num_links: int) -> int:
    return max(1, -(-num_links // _MOST_LINKS))


def _head(x0: float, y0: float, x1: float, y1: float, dot: float) -> str:
    """The head of an arrow that ends at the rim of a dot."""
    length = max(float(np.hypot(x1 - x0, y1 - y0)), 1e-9)
    along = np.array([x1 - x0, y1 - y0]) / length
    across = np.array([-along[1], along[0]])
    tip = np.array([x1, y1]) - along * (dot + 1)
    (ax, ay), (bx, by) = (tip - 6 * along + side * 3 * across for side in (1, -1))
    return f"M{ax:.1f} {ay:.1f}L{tip[0]:.1f} {tip[1]:.1f}L{bx:.1f} {by:.1f}"
