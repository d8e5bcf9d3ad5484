"""What quotas cost: affine costs of four workers, the water level, the exact quotas."""

import numpy as np
import style

from hetjax import quota

COSTS = quota.WorkerCosts([1.0, 1.0, 6.0, 2.0], [1.0, 1.5, 2.0, 4.5])
BUDGET = 24


def numbers():
    equal = np.full(COSTS.num_workers, BUDGET // COSTS.num_workers)
    shares = 1 / COSTS.secs_per_microbatch
    proportional = quota.largest_remainder(shares, BUDGET)
    best = quota.solve_quotas(COSTS, BUDGET)
    of = {"equal split": equal, "in proportion to 1/a": proportional, "exact": best}
    return {
        "quotas": of,
        "secs": {name: COSTS.round_secs(quotas) for name, quotas in of.items()},
        "bound": quota.continuous_bound_secs(COSTS, BUDGET),
    }


def draw(found):
    figure, axes = style.plt.subplots(figsize=(6.2, 3.8))
    ks = np.array([0.0, 16.0])
    marks = {"equal split": "s", "in proportion to 1/a": "^", "exact": "o"}
    for worker in range(COSTS.num_workers):
        a, c = COSTS.secs_per_microbatch[worker], COSTS.overhead_secs[worker]
        colour = style.COLOURS[worker]
        axes.plot(ks, c + a * ks, color=colour, linewidth=1.2)
        for name, mark in marks.items():
            axes.plot(
                found["quotas"][name][worker],
                found["secs"][name][worker],
                mark,
                markersize=8,
                color=colour,
                markerfacecolor=colour if name == "exact" else style.PAPER,
            )
        at = min(16.0, (31 - c) / a)
        axes.annotate(
            f"t = {c:g} + {a:g} k",
            (at, c + a * at),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
        )
    axes.axhline(found["bound"], color=style.INK, linestyle=":", linewidth=1)
    axes.text(
        19.6, found["bound"] - 0.3, f"water level {found['bound']:.2f} s", ha="right", va="top"
    )
    for name, mark in marks.items():
        longest = np.max(found["secs"][name])
        told = f"{name}: {' '.join(map(str, np.asarray(found['quotas'][name])))}, {longest:g} s"
        full = style.INK if name == "exact" else style.PAPER
        axes.plot([], [], mark, color=style.INK, markerfacecolor=full, markersize=7, label=told)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, 1.3),
        fontsize=9,
        handletextpad=0.2,
        columnspacing=1,
    )
    axes.set(
        xlabel="quota k, microbatches", ylabel="seconds of a round", xlim=(0, 19.8), ylim=(0, 32)
    )
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "costs")
