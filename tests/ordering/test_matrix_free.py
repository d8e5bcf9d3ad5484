"""When one forward pass may serve for the signs and for the gradients of both halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.ordering import matrix_free
from tests.training import problems


def by_position(weights, batch, rng):
    """The label's log probability by absolute position: kept by the backward pass."""
    log_probabilities = jax.nn.log_softmax(batch["x"] @ weights)
    return -log_probabilities[jnp.arange(len(batch["y"])), batch["y"]]


def with_dropout(weights, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return problems.softmax_loss(weights, {**batch, "x": batch["x"] * kept}, rng)


def with_a_scan(weights, batch, rng):
    def step(hidden, _):
        return jnp.tanh(hidden @ weights @ weights.T), ()

    hidden, _ = jax.lax.scan(step, batch["x"], None, length=3)
    return problems.softmax_loss(weights, {**batch, "x": hidden}, rng)


def first_examples(count=8):
    return {name: x[:count] for name, x in problems.classification(dtype=np.float32).items()}


@pytest.mark.parametrize("loss_fn", [problems.softmax_loss, with_dropout])
def test_residuals_are_reused(loss_fn):
    weights = problems.initial_weights(np.float32)
    assert matrix_free.can_reuse_residuals(loss_fn, weights, first_examples(), jax.random.key(0))


def test_a_loss_that_keeps_positions_is_not_trusted():
    """Whatever the decision is, what is reused is right."""
    weights = problems.initial_weights(np.float32)
    examples, key = first_examples(), jax.random.key(0)
    for loss_fn in (by_position, with_a_scan):
        if matrix_free.can_reuse_residuals(loss_fn, weights, examples, key):
            check_halves(loss_fn, weights, examples, key)


def test_wrong_halves_are_noticed():
    """A backward pass that weighs by position: the halves cannot be had by taking examples."""

    @jax.custom_vjp
    def weigh(x):
        return x

    def forward(x):
        return x, jnp.arange(len(x), dtype=x.dtype)

    def backward(positions, cotangent):
        return (cotangent * (1 + jnp.arange(len(positions))),)

    weigh.defvjp(forward, backward)

    def loss_fn(weights, batch, rng):
        return weigh(problems.softmax_loss(weights, batch, rng))

    weights = problems.initial_weights(np.float32)
    assert not matrix_free.can_reuse_residuals(
        loss_fn, weights, first_examples(), jax.random.key(0)
    )


def check_halves(loss_fn, weights, examples, key):
    halves = jnp.array([0, 3, 5, 6]), jnp.array([1, 2, 4, 7])

    def losses(weights, units):
        taken = (
            examples if units is None else {k: jnp.take(v, units, 0) for k, v in examples.items()}
        )
        return loss_fn(weights, taken, key)

    sums = matrix_free.residual_gradient_sums(losses, weights, None, halves, size=8)
    for half, gradient_sum in zip(halves, sums, strict=True):
        right = jax.grad(lambda w, half=half: losses(w, half).sum())(weights)
        np.testing.assert_allclose(gradient_sum, right, rtol=1e-4, atol=1e-5)


def test_the_halves_of_a_microbatch():
    check_halves(
        problems.softmax_loss,
        problems.initial_weights(np.float32),
        first_examples(),
        jax.random.key(0),
    )
