"""hetjax beside PyTorch DDP and torchft: examples a second, and over time while workers die.

The numbers are those of `python -m experiments.benchmarks.processes --only=mlp,lenet,torchft`: of
the page of its results, and of the file of runs beside it.
"""

import json
import pathlib

import numpy as np
import style

from experiments.benchmarks.rows import Row, read

RESULTS = pathlib.Path(__file__).parents[2] / "experiments/results/processes"
SIDES = ("hetjax", "torchft")
PER = 3  # seconds of a step of the curves


def over_ddp(page, title):
    """Examples a second of hetjax, and of the fastest DDP, in a section of the page."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [row for row in read(section) if isinstance(row, Row)]
    speeds = {
        row.name: int(row.figure.split()[0].replace(",", ""))
        for row in rows
        if row.name.endswith(": examples a second")
    }
    return speeds["adaptive: examples a second"], max(
        speeds[name] for name in speeds if "DDP" in name
    )


def numbers():
    runs = json.loads((RESULTS / "torchft.json").read_text())
    page = (RESULTS / "README.md").read_text()
    speeds = {
        "MLP: PyTorch DDP": over_ddp(page, "The MLP in four processes"),
        "LeNet: PyTorch DDP": over_ddp(page, "LeNet in four processes"),
    }
    for every, name in (("inf", "LeNet: torchft"), ("30", "the same, a kill each 30 s")):
        speeds[name] = [round(np.mean(runs[f"{side} {every}"]["speeds"])) for side in SIDES]
    return {
        "examples a second": speeds,
        "in turn": {side: runs[f"{side} 30"]["speeds"] for side in SIDES},
        "kills": {side: runs[f"{side} 30"]["kills"] for side in SIDES},
    }


def draw(found):
    figure, (bars, curves) = style.plt.subplots(1, 2, figsize=(9.4, 3.2), width_ratios=(1, 1.25))
    names = list(found["examples a second"])
    at = np.arange(len(names))[::-1].astype(float)
    for side, (colour, shift) in enumerate(((style.COLOURS[0], 0.19), (style.FAINT, -0.19))):
        speeds = [found["examples a second"][name][side] for name in names]
        bars.barh(at + shift, speeds, height=0.36, color=colour)
        for y, speed in zip(at + shift, speeds, strict=True):
            bars.text(speed, y, f" {speed:,}", va="center", fontsize=8.5)
    bars.set_yticks(at, names)
    bars.set(title="examples a second", xticks=[])
    bars.spines[["bottom", "left"]].set_visible(False)
    bars.tick_params(length=0)
    bars.margins(x=0.2)
    for side, colour in zip(SIDES, (style.COLOURS[0], "#8a929c"), strict=True):
        speeds = np.array(found["in turn"][side])
        steps = speeds[: speeds.size // PER * PER].reshape(-1, PER).mean(1)
        curves.stairs(
            steps, PER * np.arange(len(steps) + 1), color=colour, linewidth=1.4, baseline=None
        )
        curves.text(PER * len(steps) + 2, steps[-4:].mean(), side, color=colour, va="center")
    for kill in found["kills"]["hetjax"]:
        curves.axvline(kill, color=style.COLOURS[1], linewidth=0.8, linestyle=":")
    curves.set(title="LeNet, a worker killed at each dotted line", xlabel="seconds", ylim=(0, None))
    curves.margins(x=0)
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "beside")
