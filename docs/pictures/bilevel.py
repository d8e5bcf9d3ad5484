"""What one hypergradient asks for: the requests of three estimators, each of them a round."""

import jax.numpy as jnp
import numpy as np
import optax
import style

from hetjax import bilevel
from hetjax.bilevel import problem as problem_lib

STEPS = 6
KINDS = {
    "gradient of f": style.COLOURS[0],
    "gradient of F": style.COLOURS[1],
    "product with f''": style.COLOURS[2],
}


def estimators():
    lower = bilevel.descent(optax.sgd(0.2))
    return {
        "unroll": bilevel.unroll(lower, STEPS),
        "implicit": bilevel.implicit(lower, STEPS, solve=bilevel.cg(4)),
        "value_gap": bilevel.value_gap(lower, STEPS, multiplier=10.0),
    }


def requests(estimator):
    """Kind and novelty of each request of one hypergradient, and the gradient at its end."""
    problem = bilevel.Bilevel(
        lambda x, y, batch: jnp.sum((y - 1.0) ** 2),
        lambda x, y, batch: jnp.sum((y - x) ** 2 * jnp.array([1.0, 3.0])),
    )
    x, y = jnp.array([2.0, -1.0]), jnp.zeros(2)
    position, asked = estimator.init(x, y), []
    while not position.is_done:
        what, at = estimator.request(position)
        of = "f" if what.level == problem_lib.LOWER else "F"
        is_product = what.kind == problem_lib.Kind.PRODUCTS
        kind = "product with f''" if is_product else f"gradient of {of}"
        asked.append([list(KINDS).index(kind), int(what.is_new)])
        position = estimator.receive(position, problem_lib.answer(problem, what, at, None))
    return asked, np.asarray(estimator.result(position).grad_x)


def numbers():
    found = {}
    for name, estimator in estimators().items():
        asked, grad_x = requests(estimator)
        found[name] = {"asked": asked, "grad_x": grad_x}
    return found


def draw(found):
    figure, axes = style.plt.subplots(figsize=(6.2, 2.5))
    for row, of in enumerate(found.values()):
        for place, (kind, is_new) in enumerate(of["asked"]):
            axes.barh(
                row,
                0.9,
                left=place + 0.05,
                height=0.6,
                facecolor=list(KINDS.values())[kind],
                alpha=1.0 if is_new else 0.55,
                hatch=None if is_new else "////",
                edgecolor=style.PAPER,
            )
        axes.text(
            len(of["asked"]) + 0.3, row, f"{len(of['asked'])} rounds", va="center", fontsize=9
        )
    for name, colour in KINDS.items():
        axes.plot([], [], "s", color=colour, label=name)
    held = {"facecolor": style.FAINT, "hatch": "////", "edgecolor": style.PAPER}
    axes.add_patch(style.plt.Rectangle((0, -9), 1, 1, label="batch of before", **held))
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.04, 1.26),
        ncols=4,
        fontsize=9,
        handletextpad=0.2,
        columnspacing=1.2,
    )
    most = max(len(of["asked"]) for of in found.values())
    axes.set(xlim=(0, most + 4), ylim=(len(found) - 0.5, -0.5), xlabel="requests, in their order")
    axes.set_yticks(range(len(found)), list(found))
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "bilevel")
