"""When one forward pass may serve for the signs and for the gradients of both halves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from hetjax import models
from hetjax.ordering import matrix_free
from tests.training import problems


def with_dropout(weights, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return problems.softmax_loss(weights, {**batch, "x": batch["x"] * kept}, rng)


def with_dropout_by_example(weights, batch, rng):
    kept = jnp.cos(100 * batch["x"]) > 0  # a mask that belongs to the example
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


@pytest.mark.parametrize("name", models.MODELS)
def test_residuals_of_the_reference_models_are_reused(name):
    model = models.make(name, (16, 16, 1), 4, rngs=nnx.Rngs(0))
    loss_fn, params = hetjax.nnx_loss(
        model,
        lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
            model(batch["image"]), batch["label"]
        ),
    )
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 16, 16, 1)).astype(np.uint8)
    batch = {"image": images, "label": rng.integers(0, 4, 8)}
    assert matrix_free.can_reuse_residuals(loss_fn, params, batch, jax.random.key(0))


def test_half_precision_is_reused_too():
    weights = problems.initial_weights(np.float32).astype(jnp.bfloat16)
    assert matrix_free.can_reuse_residuals(
        problems.softmax_loss, weights, first_examples(), jax.random.key(0)
    )


def test_the_direction_does_not_overflow_in_half_precision():
    """The signs do not depend on the running sum's size, and so must not its dtype's range."""
    params = {"w": jnp.ones(3, jnp.float16)}
    large = {"w": jnp.array([1e6, -2e6, 0.0])}
    direction = matrix_free._direction(large, params)["w"]
    assert direction.dtype == jnp.float16
    np.testing.assert_allclose(direction, [0.5, -1.0, 0.0])


def last_token(params, batch, rng):
    """Takes each example's row by its absolute position, below a head of zeros."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"])
    taken = hidden[jnp.arange(len(batch["y"])), batch["y"]]
    return (taken * params["head"] - 1) ** 2


def test_what_is_reused_is_right():
    weights = problems.initial_weights(np.float32)
    examples, key = first_examples(), jax.random.key(0)
    assert matrix_free.can_reuse_residuals(with_a_scan, weights, examples, key)
    for loss_fn in (problems.softmax_loss, with_dropout_by_example, with_a_scan):
        check_halves(loss_fn, weights, examples, key)


def test_a_loss_that_keeps_positions_is_not_trusted():
    """Nor where a head of zeros hides it, or the weights keep them."""
    weights = problems.initial_weights(np.float32)
    examples, key = first_examples(), jax.random.key(0)
    params = {"hidden": weights, "head": np.zeros((), np.float32)}
    assert not matrix_free.can_reuse_residuals(last_token, params, examples, key)

    def by_weight(weights, batch, rng):
        kept = jnp.exp(batch["x"] @ weights)[jnp.arange(len(batch["y"])), batch["y"]]
        return problems.softmax_loss(weights, batch, rng) * kept

    assert not matrix_free.can_reuse_residuals(by_weight, weights, examples, key)


@pytest.mark.parametrize("method", ["random_reshuffling", "d_grab"])
def test_such_a_loss_trains_as_it_should(method, float64):
    """The whole of the data in a round: no order matters."""
    data = problems.classification(64)
    params = {"hidden": problems.initial_weights(), "head": np.zeros(())}
    result = problems.fit(
        data,
        params,
        loss_fn=last_token,
        local="virtual",
        epochs=20,
        budget=16,
        ordering={"method": method, "herding_every": 0},
    )
    expected = params
    optimizer = optax.sgd(0.3, momentum=0.9)
    state = optimizer.init(expected)
    for _ in range(20):
        grads = jax.grad(lambda p: last_token(p, data, None).mean())(expected)
        updates, state = optimizer.update(grads, state)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), result.params, expected)


def test_a_forward_derivative_that_is_missing_is_said():
    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(lambda x: (x / 2, ()), lambda _, g: (g / 2,))

    def loss_fn(weights, batch, rng):
        return halved(problems.softmax_loss(weights, batch, rng))

    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    with pytest.raises(ValueError, match=r"'d_grab' cannot work .*custom_vjp"):
        problems.fit(data, weights, loss_fn=loss_fn, ordering={"method": "d_grab"}, epochs=1)
    problems.fit(
        data,
        weights,
        loss_fn=loss_fn,
        ordering={"method": "d_grab_exact", "herding_every": 0},
        local="virtual",
        epochs=1,
    )


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


def test_gradients_of_zero_prove_nothing():
    def loss_fn(weights, batch, rng):
        return 0 * problems.softmax_loss(weights, batch, rng)

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
