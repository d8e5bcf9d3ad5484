"""Libraries that leave casts to JAX, where the tests have JAX make none."""

import jax
import optax
import pytest


def promoting(optimizer):
    """`optimizer`, whose updates may promote types: Optax raises a float to an integer power."""

    def update(*args, **options):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args, **options)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


@pytest.fixture(autouse=True)
def casts_of_optax():
    """In a module that imports it, JAX promotes types in each test."""
    with jax.numpy_dtype_promotion("standard"):
        yield
