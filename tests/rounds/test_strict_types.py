"""Who has to write down casts: hetjax, in every test of this suite; a user's loss, never."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rounds import problems


def train(**fields):
    result = problems.train(203, epochs=1, **fields)
    assert result.summary["examples_processed"] == 203
    return result.params


@pytest.fixture
def standard():
    """As a user has it who sets nothing: in this test, in all threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_a_loss_that_leaves_casts_to_jax_trains(local, standard):
    def loss_fn(weights, batch, rng):
        return problems.softmax_loss(weights, batch, rng) * (1 + batch["y"])

    def with_casts(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, rng)
        return losses * (1 + batch["y"]).astype(jnp.float32)

    params = [train(local=local, loss_fn=one, quota="equal") for one in (loss_fn, with_casts)]
    np.testing.assert_array_equal(*params)
