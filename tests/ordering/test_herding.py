import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ordering import herding


def slow_bound(vectors, orders):
    """One addition at a time, with the mean of all examples taken off each vector."""
    num_workers, num_examples, dim = vectors.shape
    mean = sum(vectors[j, t] for j in range(num_workers) for t in range(num_examples))
    mean = mean / (num_workers * num_examples)
    prefix, inf_norm, two_norm = np.zeros(dim), 0.0, 0.0
    for t in range(num_examples):
        for j in range(num_workers):
            prefix = prefix + vectors[j, orders[j, t]] - mean
        inf_norm = max(inf_norm, max(abs(prefix)))
        two_norm = max(two_norm, sum(prefix**2) ** 0.5)
    return inf_norm, two_norm


@st.composite
def problems(draw):
    """Gaussian vectors with a mean of their own, and an order for each worker."""
    num_workers, num_examples, dim = (draw(st.integers(1, most)) for most in (5, 12, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vectors = rng.normal(draw(st.integers(-3, 3)), 1, (num_workers, num_examples, dim))
    orders = rng.permuted(np.tile(np.arange(num_examples), (num_workers, 1)), axis=1)
    return vectors, orders


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([1, 7, 40, 1 << 19]))
def test_the_bound_is_that_of_the_plain_loop_whatever_the_chunks(problem, chunk_numbers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(herding, "_CHUNK_NUMBERS", chunk_numbers)
        bounds = herding.parallel_herding_bound(*problem)
    np.testing.assert_allclose(bounds, slow_bound(*problem), rtol=1e-10, atol=1e-12)


def test_float32_vectors_are_added_in_float64():
    # In float32, 2^24 + 1 = 2^24: 99 additions of 1 would be lost.
    examples = np.ones((1, 201, 1), np.float32)
    examples[0, 0], examples[0, 100], examples[0, 101:] = 2**24, -(2**24), -1
    examples[0, 200] = -1 + 1  # 99 of each sign
    inf_norm, _ = herding.parallel_herding_bound(examples, np.arange(201)[None])
    assert inf_norm == 2**24 + 99


def test_a_nan_is_not_hidden():
    vectors = np.zeros((1, 3, 2))
    vectors[0, 1, 1] = np.nan
    assert np.isnan(herding.parallel_herding_bound(vectors, [[0, 1, 2]])).all()


def test_no_second_copy_of_the_vectors_is_made():
    vectors = np.random.default_rng(0).normal(size=(4, 50_000, 16)).astype(np.float32)
    orders = np.tile(np.arange(50_000), (4, 1))
    herding.parallel_herding_bound(vectors[:, :2], orders[:, :2])
    tracemalloc.start()
    herding.parallel_herding_bound(vectors, orders)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < vectors.nbytes


@pytest.mark.parametrize(
    ("vectors_shape", "orders", "message"),
    [
        ((3, 2), [[0, 1, 2]], r"vectors has shape \(3, 2\)"),
        ((2, 3, 1), [[0, 1, 2]], r"orders is int64\[1, 3\]; it must be i\[2, 3\]"),
        ((2, 3, 1), [[0, 1, 2], [0, 1, 1]], "worker 1 is not a permutation"),
    ],
)
def test_wrong_arguments_are_named(vectors_shape, orders, message):
    with pytest.raises(ValueError, match=message):
        herding.parallel_herding_bound(np.zeros(vectors_shape), orders)
