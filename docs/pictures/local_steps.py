"""Where local steps come to rest by their weights: four unlike quadratics, 8, 4, 2 and 1 steps."""

import jax
import numpy as np
import optax
import style

import hetjax

CENTRES, CURVES, COUNTS = [-1.0, 0.0, 0.5, 2.0], [1.0, 0.5, 2.0, 1.5], [8, 4, 2, 1]
RATES, ROUNDS = (0.04, 0.02, 0.01, 0.005), 60
SAME = hetjax.quota.QuotaPolicy(  # shards are of one size, and quotas always the same
    init=lambda workers, budget: (),
    assign=lambda state, total, caps: (np.array(COUNTS), state),
    observe=lambda state, times: state,
)
FIELDS = {
    "microbatch_size": 1,
    "budget": sum(COUNTS),
    "local": "virtual",
    "data": {"sharing": "private"},
    "cluster": {"num_workers": 4},
    "quota": SAME,
}


def loss(params, batch, rng):
    return 0.5 * batch["curve"] * (params - batch["centre"]) ** 2


def at_rest(rate, weights):
    """The parameter after many rounds of a run whose shards have one quadratic each."""
    zeros = {name: np.zeros(32 * sum(COUNTS)) for name in ("curve", "centre")}
    with hetjax.Run(loss, 0.0, optax.sgd(1.0), zeros, **FIELDS) as run:
        shards = run.setup.stream.shards
    data = {name: of.copy() for name, of in zeros.items()}
    for ids, curve, centre in zip(shards, CURVES, CENTRES, strict=True):
        data["curve"][ids], data["centre"][ids] = curve, centre
    far = np.mean([1 - (1 - rate * c) ** n for c, n in zip(CURVES, COUNTS, strict=True)])
    rule = hetjax.local_steps(optax.sgd(rate), weights)
    fields = {**FIELDS, "epochs": 1000, "max_rounds": ROUNDS, "progress": False}
    result = hetjax.fit(loss, 0.0, optax.sgd(1 / far), data, rule=rule, **fields)
    return float(result.params)


def numbers():
    best = float(np.dot(CURVES, CENTRES) / np.sum(CURVES))
    weights = ("uniform", "fednova")
    return {w: [abs(at_rest(rate, w) - best) for rate in RATES] for w in weights}


def draw(found):
    figure, axes = style.plt.subplots(figsize=(5.2, 3.0), layout="constrained")
    for colour, (name, distances) in zip(style.COLOURS, found.items(), strict=False):
        axes.plot(RATES, distances, "o-", color=colour, markersize=4)
        for rate, distance in zip(RATES, distances, strict=True):
            axes.annotate(
                f"{distance:.3f}", (rate, distance), xytext=(0, 6), textcoords="offset points",
                ha="center", fontsize=8.5, color=colour,
            )  # fmt: skip
        axes.text(RATES[0] * 1.12, distances[0], f'"{name}"', color=colour, va="center")
    axes.set(xscale="log", yscale="log", xlabel="rate of the inner steps", ylim=(0.004, 1.6))
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.minorticks_off()
    axes.set_xlim(RATES[-1] * 0.85, RATES[0] * 1.9)
    axes.set_title("distance from the minimum at rest, by 8, 4, 2 and 1 steps")
    return figure


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    style.write(numbers(), draw, "local_steps")
