"""How far an epoch strays: walks of one epoch in the plane, and the herding bound over epochs."""

import numpy as np
import style

from hetjax.ordering import balance_signs, orders, parallel_herding_bound

WORKERS, EXAMPLES, EPOCHS = 8, 128, 10


def vectors(dim):
    rng = np.random.default_rng(0)
    found = rng.normal(size=(WORKERS, EXAMPLES, dim)).astype(np.float32)
    found -= found.mean(axis=(0, 1))
    return found / np.linalg.norm(found, axis=-1, keepdims=True).mean()


def signed(visited, *, together):
    """Signs i8[n, m] of the vectors f32[n, m, d] as they are visited: s for a pair's first."""
    diffs = visited[:, 0::2] - visited[:, 1::2]
    zero = np.zeros(visited.shape[-1], np.float32)
    if together:  # D-GraB: one running sum, the workers take turns
        turns = diffs.swapaxes(0, 1).reshape(-1, visited.shape[-1])
        signs = np.asarray(balance_signs(turns, zero)[0]).reshape(-1, WORKERS).T
    else:  # PairBalance: each worker by itself
        signs = np.stack([np.asarray(balance_signs(own, zero)[0]) for own in diffs])
    return np.stack([signs, -signs], axis=-1).reshape(WORKERS, -1)


def epochs(found, method):
    """The order i[n, m] of each epoch, the first one random."""
    rng = np.random.default_rng(1)
    order = rng.permuted(np.tile(np.arange(EXAMPLES), (WORKERS, 1)), axis=1)
    for _ in range(EPOCHS):
        yield order
        if method == "random reshuffling":
            order = rng.permuted(order, axis=1)
            continue
        visited = np.take_along_axis(found, order[..., None], axis=1)
        signs = signed(visited, together=method == "D-GraB")
        rows = zip(order, signs, strict=True)
        order = np.stack([orders.place_signed(*row) for row in rows])


METHODS = ("random reshuffling", "PairBalance, each worker alone", "D-GraB")


def numbers():
    plane, space = vectors(2), vectors(16)
    walks = {}
    for method in ("random reshuffling", "D-GraB"):
        *_, last = epochs(plane, method)
        steps = np.take_along_axis(plane, last[..., None], axis=1).sum(axis=0)
        walks[method] = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    bounds = {
        method: [parallel_herding_bound(space, order)[0] for order in epochs(space, method)]
        for method in METHODS
    }
    return {"walks": walks, "bounds": bounds}


def draw(found):
    figure, (walk, bound) = style.plt.subplots(
        1, 2, figsize=(6.4, 3.2), width_ratios=(1, 1.35), layout="constrained"
    )
    colours = dict(
        zip(METHODS, (style.COLOURS[1], style.COLOURS[5], style.COLOURS[0]), strict=True)
    )
    for method, points in found["walks"].items():
        walk.plot(*np.asarray(points).T, color=colours[method], linewidth=1.1)
    walk.plot(0, 0, "o", color=style.INK, markersize=5)
    walk.set_aspect("equal")
    walk.set(xlabel="first coordinate", ylabel="second coordinate")
    walk.set_title("running sum of one epoch\n(vectors in the plane, d = 2)")
    shift = {"random reshuffling": 1.12, "PairBalance, each worker alone": 0.9}  # of their labels
    for method, values in found["bounds"].items():
        bound.plot(range(EPOCHS), values, "o-", markersize=4, color=colours[method])
        bound.text(
            EPOCHS - 0.7,
            values[-1] * shift.get(method, 1),
            method.replace(", ", ",\n"),
            color=colours[method],
            va="center",
            fontsize=9,
        )
    bound.set_yscale("log")
    bound.set_yticks([2, 5, 10], ["2", "5", "10"])
    bound.minorticks_off()
    bound.set(
        xlabel="epoch",
        ylabel="herding bound (logarithmic)",
        ylim=(1.2, 20),
        xlim=(-0.4, EPOCHS + 4.2),
    )
    bound.set_xticks(range(0, EPOCHS, 3))
    bound.set_title("herding bound over epochs\n(other vectors, d = 16)")
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "herding")
