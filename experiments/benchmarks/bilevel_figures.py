"""What the bilevel estimators hold, call and agree in, as rows."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks import rows
from hetjax import bilevel

_SGD = bilevel.descent(optax.sgd(0.1))

BY_STEPS: dict[str, tuple[Callable[[int], bilevel.Estimator], str]] = {
    "reverse": (lambda T: bilevel.unroll(_SGD, T), "O(T): 4, 4"),
    "reverse, 32 back": (lambda T: bilevel.unroll(_SGD, T, back=32), "flat: 1, 1"),
    "checkpointed": (lambda T: bilevel.unroll(_SGD, T, checkpoint=True), "O(sqrt T): 2, 2"),
    "forward": (lambda T: bilevel.unroll(_SGD, T, mode="forward"), "flat: 1, 1"),
    "implicit": (lambda T: bilevel.implicit(_SGD, T, solve=bilevel.cg(10)), "flat: 1, 1"),
    "value gap": (lambda T: bilevel.value_gap(_SGD, T), "flat: 1, 1"),
}


def temp_bytes(estimator: bilevel.Estimator, y_size: int = 1000) -> int:
    """Temporary memory of one hypergradient, x of 4 numbers, y of so many; float32."""

    def lower(x, y, batch):
        return jnp.sum(jnp.exp(x[0]) * y**2 + jnp.sin(x[1] * y)) / y_size

    def upper(x, y, batch):
        return jnp.sum((y - batch) ** 2) + jnp.sum(x**2)

    problem = bilevel.Bilevel(upper, lower)

    def call(x, y, target):
        batches = bilevel.Batches(target, None)
        return bilevel.hypergradient(problem, estimator, x, y, batches)

    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (4, y_size, y_size)]
    analysis = jax.jit(call).lower(*shapes).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def memory_rows() -> list[rows.Row]:
    steps, found = (64, 256, 1024), []
    for name, (made, target) in BY_STEPS.items():
        sizes = [temp_bytes(made(T)) for T in steps]
        growth = ", ".join(f"{b / a:.2f}" for a, b in itertools.pairwise(sizes))
        told = ", ".join(f"{size / 4000:.1f}" for size in sizes)
        found.append(
            rows.Row(
                f"temporary memory, {name}, T = 64, 256, 1024: copies of y (1000 numbers), "
                "and growth",
                target,
                f"{told}; {growth}",
            )
        )
    return found


def count_rows() -> list[rows.Row]:
    """What each estimator says that it costs: the table of the survey, from the code."""
    estimators = {
        "unroll, T = 100": bilevel.unroll(_SGD, 100),
        "20 steps back": bilevel.unroll(_SGD, 100, back=20),
        "checkpointed": bilevel.unroll(_SGD, 100, checkpoint=True),
        "forward, x of 4 numbers": bilevel.unroll(_SGD, 100, mode="forward"),
        "worst iterate (at most)": bilevel.unroll(_SGD, 100, pick="worst"),
        "aggregate": bilevel.unroll(bilevel.aggregate(optax.sgd(0.1)), 100),
        "implicit, T = 100, CG 10": bilevel.implicit(_SGD, 100, solve=bilevel.cg(10)),
        "Neumann 10, cold": bilevel.implicit(_SGD, 100, solve=bilevel.neumann(10, 0.1), warm=False),
        "scaled": bilevel.implicit(_SGD, 100, solve=bilevel.scaled(0.1)),
        "scaled, differences": bilevel.implicit(_SGD, 100, solve=bilevel.scaled(0.1), cross="fd"),
        "rank one": bilevel.implicit(_SGD, 100, solve=bilevel.rank_one()),
        "value gap, 100 steps of z and y": bilevel.value_gap(_SGD, 100),
        "central": bilevel.value_gap(_SGD, 100, central=True),
        "dynamic": bilevel.value_gap(_SGD, 100, multiplier=bilevel.dynamic(0.5)),
    }
    found = []
    for name, estimator in estimators.items():
        position = estimator.init(jnp.zeros(4), jnp.zeros(3))
        cost = vars(estimator.result(position).info.cost)
        told = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in cost.items() if n)
        found.append(rows.Row(f"calls of {name}", "counted in tests", told))
    return found


def identity_rows() -> list[rows.Row]:
    from tests.bilevel import identities, slopes

    jax.config.update("jax_enable_x64", True)
    found = [
        rows.Row(f"largest distance: {name}", "≤ 1e-10", f"{distance():.1e}")
        for name, distance in identities.IDENTITIES.items()
    ]
    for name, slope in slopes.SLOPES.items():
        fitted, wanted = slope()
        told = f"{fitted:.4f} for {wanted:.4f}, {abs(fitted / wanted - 1):.1%} off"
        found.append(rows.Row(f"slope of log error, {name}", "within 2 %", told))
    jax.config.update("jax_enable_x64", False)
    return found
