"""Eight CPU devices, the strictest settings, and float64 where a test asks for it."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def float64():
    """64-bit numbers in this test, in all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def test_data():
    """The original files of the benchmark data sets, where the machine has them."""
    path = os.environ.get("HETJAX_TEST_DATA")
    if not path or not pathlib.Path(path).is_dir():
        pytest.skip("HETJAX_TEST_DATA names no directory with the original data files")
    return pathlib.Path(path)
