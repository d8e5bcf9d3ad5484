"""What the tests of checkpoints share."""

import os

import jax
import numpy as np

from hetjax.checkpoints import checkpoint


def bits(leaf) -> tuple:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    array = np.asarray(leaf)
    return type(leaf), array.dtype, array.shape, array.tobytes()


def assert_equal_arrays(actual, expected) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert bits(actual[name]) == bits(array), name


def save_all(directory, steps, **options) -> None:
    store = checkpoint.Checkpoints(directory, **options)
    for step in steps:
        store.save(step, arrays_of(step), {"round": step})
    store.close()


def arrays_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"params/w": rng.normal(size=(40, 50)), "order": rng.permutation(9).astype(np.int32)}


def names_in(directory) -> list[str]:
    return sorted(os.listdir(directory))
