"""Who computes and who waits in a round: the adaptive policy on four emulated workers."""

import numpy as np
import style

from hetjax import quota
from hetjax.cluster import emulate

SPEEDS = (4, 3, 2, 1)
BUDGET, ROUNDS = 20, 3


def numbers():
    cluster = emulate.EmulatedCluster(tuple(12.0 / speed for speed in SPEEDS))
    quotas, busy, round_secs = emulate.simulate_policy(quota.adaptive(), cluster, BUDGET, ROUNDS)
    ends = [
        [
            cluster.microbatch_ends(index, worker, count).tolist()
            for worker, count in enumerate(row.tolist())
        ]
        for index, row in enumerate(quotas)
    ]
    waiting = 1 - busy.sum(axis=1) / (round_secs * len(SPEEDS))
    return {"quotas": quotas, "round_secs": round_secs, "waiting": waiting, "ends": ends}


def draw(found):
    figure, axes = style.plt.subplots(figsize=(6.2, 2.7))
    begun = 0.0
    for index, (secs, ends) in enumerate(zip(found["round_secs"], found["ends"], strict=True)):
        for worker, own in enumerate(ends):
            starts = [0.0, *own[:-1]]
            bars = [(begun + a, b - a) for a, b in zip(starts, own, strict=True)]
            axes.broken_barh(
                bars, (worker - 0.32, 0.64), facecolor=style.COLOURS[worker], edgecolor=style.PAPER
            )
            idle = secs - own[-1]
            if idle > 0:
                axes.barh(
                    worker,
                    idle,
                    left=begun + own[-1],
                    height=0.64,
                    hatch="////",
                    facecolor="none",
                    edgecolor=style.FAINT,
                    linewidth=0.6,
                )
        share = f"{100 * found['waiting'][index]:.0f} %"
        title = f"round {index}: {secs:.0f} s\n{share} waiting"
        axes.text(begun + 0.6, -0.6, title, va="bottom", fontsize=9)
        begun += secs
        axes.axvline(begun, color=style.INK, linewidth=1.2)
    quotas = [" → ".join(map(str, row)) for row in np.asarray(found["quotas"]).T]
    axes.set_yticks(
        range(len(SPEEDS)),
        [f"speed {speed}\n{row}" for speed, row in zip(SPEEDS, quotas, strict=True)],
    )
    axes.invert_yaxis()
    axes.set(xlabel="seconds of the virtual clock", xlim=(0, begun), ylim=(3.6, -1.6))
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "round")
