"""Where the examples of an order go: cut by quotas, returned by a gate, counted once."""

import numpy as np
import style

from hetjax import ordering, quota
from hetjax.data import ledger, stream

EXAMPLES, BUDGET = 22, 8  # microbatches of one example each, so that a box is both
SHARES = (4, 3, 2, 1)
DONE = ((3, 2, 1, 1), (2, 2, 2, 1))  # what a gate let the workers finish


def numbers():
    """For each round the order as it lies ahead, and what becomes of each place of it."""
    shared = stream.SharedStream(
        EXAMPLES, 4, microbatch_size=1, ordering=ordering.random_reshuffling(), seed=1
    )
    state, rounds = shared.init(), []
    finished = list(DONE)
    while shared.epoch(state) == 0:
        ahead = state.passes[0].remaining.copy()
        quotas = quota.largest_remainder(SHARES, shared.total(state, BUDGET, gated=True))
        done = quotas if shared.is_last(state, quotas) else np.array(finished.pop(0))
        plan = shared.plan(state, quotas)
        owners = np.repeat(np.arange(4), quotas)
        place = np.concatenate([np.arange(count) for count in quotas])
        is_done = place < np.repeat(done, quotas)
        processed = state.examples_processed + int(done.sum())
        state = shared.commit(state, plan, done)
        rounds.append({"ahead": ahead, "owners": owners, "done": is_done, "processed": processed})
    return {
        "rounds": rounds,
        "missing": ledger.missing(state.ledger),
        "duplicated": ledger.duplicated(state.ledger),
    }


def draw(found):
    figure, axes = style.plt.subplots(figsize=(6.4, 2.4))
    for row, of_round in enumerate(found["rounds"]):
        offset = EXAMPLES - len(of_round["ahead"])
        for place, example in enumerate(np.asarray(of_round["ahead"]).tolist()):
            colour, hatch, text = "none", None, style.FAINT
            if place < len(of_round["owners"]):
                colour = style.COLOURS[of_round["owners"][place]]
                text = "white"
                if not of_round["done"][place]:
                    colour, hatch, text = "none", "////", style.INK
            edge = style.FAINT if hatch or colour == "none" else style.PAPER
            axes.add_patch(
                style.plt.Rectangle(
                    (offset + place, row - 0.38),
                    1,
                    0.76,
                    facecolor=colour,
                    hatch=hatch,
                    edgecolor=edge,
                    linewidth=0.8,
                )
            )
            axes.text(
                offset + place + 0.5,
                row,
                example,
                ha="center",
                va="center",
                fontsize=7.5,
                color=text,
            )
        axes.text(EXAMPLES + 0.4, row, f"{of_round['processed']} counted", va="center", fontsize=9)
    for worker in range(4):
        axes.plot([], [], "s", color=style.COLOURS[worker], label=f"worker {worker}")
    axes.add_patch(
        style.plt.Rectangle(
            (0, 0), 0, 0, hatch="////", facecolor="none", edgecolor=style.FAINT, label="returned"
        )
    )
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, 1.28),
        ncols=5,
        fontsize=9,
        handletextpad=0.1,
        columnspacing=1.2,
    )
    count = len(found["rounds"])
    axes.set(xlim=(-0.1, EXAMPLES + 4.5), ylim=(count - 0.5, -0.6), xticks=[])
    axes.set_yticks(range(count), [f"round {index}" for index in range(count)])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    told = f"after the pass: {found['missing']} missing, {found['duplicated']} duplicated"
    axes.text(0, count - 0.45, told, va="top", fontsize=9)
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "ledger")
