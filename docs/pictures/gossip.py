"""How fast gossip brings the workers together, on four schedules of sixteen workers."""

import numpy as np
import style

from hetjax.topology import gossip, graphs

WORKERS, ROUNDS, SEED = 16, 40, 0
GRAPHS = {"ring": graphs.ring, "torus": graphs.torus, "exponential": graphs.exponential}


def plans():
    made = {name: gossip.d_psgd(make(WORKERS)) for name, make in GRAPHS.items()}
    half = gossip.matcha(graphs.exponential(WORKERS), 0.5, seed=SEED)
    return {**made, "exponential, MATCHA 0.5": half}


def numbers():
    start = np.random.default_rng(SEED).normal(size=(WORKERS, 50))
    start -= start.mean(axis=0)
    found = {}
    for name, plan in plans().items():
        replicas, distances, copies = start, [], 0.0
        for index in range(ROUNDS + 1):
            distances.append(np.sqrt(np.mean(np.sum(replicas**2, axis=1))))
            active = plan.active(index)
            copies += plan.sends(active).mean()
            replicas = plan.matrix(active) @ replicas
        found[name] = {
            "gap": plan.spectral_gap,
            "copies": copies / (ROUNDS + 1),
            "distance": np.array(distances) / distances[0],
        }
    return found


def draw(found):
    figure = style.plt.figure(figsize=(6.4, 4.2), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=(1, 3))
    angle = np.pi / 2 - 2 * np.pi * np.arange(WORKERS) / WORKERS
    places = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for row, (name, make) in enumerate(GRAPHS.items()):
        axes = figure.add_subplot(grid[row, 0])
        lines = [(*places[[i, j]], (np.nan, np.nan)) for i, j in make(WORKERS).edges]
        axes.plot(*np.concatenate(lines).T, color=style.COLOURS[row], linewidth=0.7)
        axes.plot(*places.T, "o", color=style.INK, markersize=2.5)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.text(1.3, 0, name, va="center", fontsize=9)
    axes = figure.add_subplot(grid[:, 1])
    for colour, (name, of) in zip(style.COLOURS, found.items(), strict=False):
        told = f"{name}: gap {of['gap']:.3f}, {of['copies']:.1f} copies a round"
        axes.plot(of["distance"], color=colour, label=told)
        axes.plot((1 - of["gap"]) ** np.arange(ROUNDS + 1), ":", color=colour, linewidth=1)
    axes.set_yscale("log")
    axes.set(xlabel="round", ylim=(1e-6, 1.5))
    axes.set_title("distance to the mean, over that of round 0")
    figure.legend(fontsize=8.5, loc="outside lower right", ncols=1)
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "gossip")
