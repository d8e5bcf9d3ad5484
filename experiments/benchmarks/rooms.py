"""Draws the rooms of hetjax from its imports: a room imports only from rooms below it.

    python -m experiments.benchmarks.rooms [--out=FILE]

Loose modules are one room, `base`, but for a few of other rooms. Arrows that others imply are left
out, and those to `base`.
"""

import ast
import pathlib
from collections.abc import Iterator
from typing import Any

import matplotlib
from absl import flags

from experiments import command_line

matplotlib.use("svg")

from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE, PICTURE = ROOT / "hetjax", ROOT / "experiments/results/structure/rooms.svg"
_OUT = flags.DEFINE_string("out", str(PICTURE), "Where the picture is written.")
INK, FAINT, PAPER = "#22272e", "#b9c0c8", "#fbfbf8"
LOOSE = {"launch": "launcher", "simulate": "simulate"}


def room_of(path: pathlib.Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return first if (PACKAGE / first).is_dir() else LOOSE.get(first, "base")


def imported(path: pathlib.Path) -> Iterator[str]:
    """The modules and rooms of hetjax that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("hetjax"):
            continue
        inner = node.module.split(".")[1:]
        yield from inner[:1] or (alias.name for alias in node.names)


def numbers() -> dict[str, Any]:
    """Of each room: its lines, those that it imports from, and its height above the lowest."""
    lines: dict[str, int] = {}
    below: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE and path.stem == "__init__":
            continue
        own = room_of(path)
        lines[own] = lines.get(own, 0) + len(path.read_text().splitlines())
        targets = {room_of(PACKAGE / name) for name in imported(path) if name[:1] != "_"}
        below.setdefault(own, set()).update(targets - {own})

    def reached(room: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in below[room]), set())

    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max((height(other) for other in below[room]), default=-1)
        return heights[room]

    direct = {
        room: sorted(others - set().union(*(reached(other) for other in others), set()))
        for room, others in below.items()
    }
    return {"lines": lines, "below": direct, "heights": {room: height(room) for room in below}}


def draw(found: dict[str, Any]) -> plt.Figure:
    heights, most = found["heights"], max(found["heights"].values())
    places = {}
    for level in range(most + 1):
        row = sorted(room for room, at in heights.items() if at == level)
        for index, room in enumerate(row):
            places[room] = ((index + 0.5 + 0.25 * (level % 2)) * 8 / len(row), level)
    figure, axes = plt.subplots(figsize=(7.5, 0.75 * (most + 1)))
    for room, others in found["below"].items():
        for other in set(others) - {"base"}:
            arrow = {"arrowstyle": "->", "color": FAINT, "shrinkA": 12, "shrinkB": 12}
            axes.annotate("", places[other], places[room], arrowprops=arrow)
    for room, (x, y) in places.items():
        box = {"facecolor": PAPER, "edgecolor": INK, "boxstyle": "round"}
        label = f"{room}\n{found['lines'][room]:,}"
        axes.text(x, y, label, ha="center", va="center", fontsize=8, bbox=box)
    axes.set(xlim=(0, 8.4), ylim=(-0.5, most + 0.5))
    axes.set_axis_off()
    return figure


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "hetjax", "svg.fonttype": "none"})
    out = pathlib.Path(_OUT.value)
    draw(numbers()).savefig(out, metadata={"Date": None}, bbox_inches="tight", facecolor=PAPER)
    out.write_text("\n".join(line.rstrip() for line in out.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    command_line.run(main)
