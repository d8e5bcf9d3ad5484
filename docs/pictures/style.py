"""How the pictures of the pages look, and how they are written.

A picture is a module with `numbers() -> dict` and `draw(numbers) -> figure`. The numbers come from
hetjax; the SVG file holds them as its description, so a test can compare them. The background is
light and opaque: it reads the same on dark pages.
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np

HERE = pathlib.Path(__file__).parent
INK, FAINT, PAPER = "#22272e", "#b9c0c8", "#fbfbf8"
# Okabe and Ito's colours: told apart with any kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c00", "#22272e")

plt.rcParams.update(
    {
        "svg.hashsalt": "hetjax",
        "svg.fonttype": "none",
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.prop_cycle": plt.cycler(color=COLOURS),
        "font.size": 10,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        "hatch.linewidth": 0.6,
    }
)


def write(numbers: dict[str, Any], draw: Callable[[dict[str, Any]], plt.Figure], name: str) -> None:
    """Writes NAME.svg into the directory that the command line names, else beside this file."""
    directory = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    described = json.dumps({key: _plain(value) for key, value in numbers.items()})
    figure = draw(numbers)
    path = directory / f"{name}.svg"
    about = {"Date": None, "Description": described}
    figure.savefig(path, metadata=about, bbox_inches="tight", pad_inches=0.12)
    plt.close(figure)
    # Trailing blanks and a missing newline would be noise in a diff.
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    print(path, f"{path.stat().st_size / 1000:.0f} kB")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.array([float(f"{number:.5g}") for number in array.ravel()]).reshape(array.shape)
    return array.tolist()
