"""Rounds where JAX promotes no types by itself: every cast of hetjax is written down."""

import jax
import numpy as np
import pytest

from tests.rounds import problems

CASES = [
    {"local": "stepped"},
    {"local": "fused"},
    {"local": "virtual", "ordering": "d_grab"},
    {"reducer": "matcha", "loss_fn": problems.weighted_softmax_loss},
]


@pytest.fixture
def strict():
    """No promotion of types in this test, in all threads."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


def train(dtype, fields):
    data, weights = problems.classification(dtype=dtype), problems.initial_weights(dtype)
    result = problems.fit(data, weights, epochs=1, **fields)
    assert result.summary["examples_processed"] == 203
    return result.params


@pytest.mark.parametrize("fields", CASES)
def test_rounds_in_float32(fields, strict):
    train(np.float32, fields)


@pytest.mark.parametrize("fields", CASES)
def test_rounds_in_float64(fields, strict, float64):
    assert train(np.float64, fields).dtype == np.float64
