"""Temporary memory over the number of lower steps, as XLA plans it."""

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import bilevel

_SGD = bilevel.descent(optax.sgd(0.1))

BY_STEPS = {  # and how often as much memory four times as many steps take
    "reverse": (lambda T: bilevel.unroll(_SGD, T), 4.0),
    "checkpointed": (lambda T: bilevel.unroll(_SGD, T, checkpoint=True), 2.0),
    "forward": (lambda T: bilevel.unroll(_SGD, T, mode="forward"), 1.0),
    "value gap": (lambda T: bilevel.value_gap(_SGD, T), 1.0),
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


@pytest.mark.parametrize("name", BY_STEPS)
def test_memory_grows_with_the_steps_as_it_is_said(name):
    """From 64 to 256 and to 1024 steps; beside what does not grow, such as y itself."""
    made, growth = BY_STEPS[name]
    small, middle, large = (temp_bytes(made(T)) for T in (64, 256, 1024))
    if growth == 1.0:
        assert small == middle == large
    else:
        assert (large - middle) / (middle - small) == pytest.approx(growth, rel=0.02)
