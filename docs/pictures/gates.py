"""What a gate does to a round of six delayed workers, and what it is worth as they get more."""

import numpy as np
import style

from hetjax import gates, simulate
from hetjax.cluster import emulate

QUOTA, WORKERS = 8, 6
GATES = {"none": gates.none(), "first": gates.first(), "quorum(36)": gates.quorum(36)}
NUMBERS_OF_WORKERS = (2, 4, 8, 16, 32, 64)


def delayed(num_workers, seed=3):
    return emulate.EmulatedCluster(
        (1.0,) * num_workers, delay="shifted_exponential", delay_per="round", seed=seed
    )


def numbers():
    quotas = np.full(WORKERS, QUOTA)
    ends = emulate.ends_of(delayed(WORKERS), 0, quotas)
    closings = {name: gates.close(gate, ends, quotas) for name, gate in GATES.items()}
    gains = []
    for count in NUMBERS_OF_WORKERS:
        how = {"budget": QUOTA * count, "num_rounds": 300}
        waits, closes = (
            simulate.simulate("equal", delayed(count), gate=gate, **how).microbatches_per_sec
            for gate in ("none", "first")
        )
        gains.append(closes / waits)
    return {
        "ends": ends,
        "done": {name: closing.microbatches_done for name, closing in closings.items()},
        "round_secs": {name: closing.round_secs for name, closing in closings.items()},
        "gains": gains,
    }


def draw(found):
    figure, rows = style.plt.subplots(2, 2, figsize=(6.2, 4.6), layout="constrained")
    rows = rows.ravel()
    ends = np.asarray(found["ends"])
    longest = ends[:, QUOTA - 1].max()
    for axes, name in zip(rows, GATES, strict=False):
        secs = float(found["round_secs"][name])
        for worker, (own, done) in enumerate(zip(ends, found["done"][name], strict=True)):
            starts = [0.0, *own[: done - 1]]
            bars = [(a, b - a) for a, b in zip(starts, own[:done], strict=True)]
            axes.broken_barh(
                bars, (worker - 0.36, 0.72), facecolor=style.COLOURS[0], edgecolor=style.PAPER
            )
            axes.barh(
                worker,
                secs - own[done - 1],
                left=own[done - 1],
                height=0.72,
                hatch="////",
                facecolor="none",
                edgecolor=style.FAINT,
                linewidth=0.6,
            )
        axes.axvline(secs, color=style.INK, linewidth=1.2)
        done = int(np.sum(found["done"][name]))
        axes.set_title(f"{name}\n{done} in {secs:.1f} s: {done / secs:.1f} a second", fontsize=9)
        axes.set(xlim=(0, longest * 1.02), xlabel="seconds", yticks=[], ylim=(WORKERS - 0.4, -0.6))
    for axes in rows[[0, 2]]:
        axes.set_ylabel("6 workers")
    axes = rows[3]
    axes.plot(NUMBERS_OF_WORKERS, found["gains"], "o-", color=style.COLOURS[1])
    axes.set_xscale("log", base=2)
    axes.set_xticks(NUMBERS_OF_WORKERS, map(str, NUMBERS_OF_WORKERS))
    axes.set(xlabel="workers", ylim=(1, 2.8))
    axes.set_title("microbatches a second,\nfirst over none", fontsize=9)
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "gates")
