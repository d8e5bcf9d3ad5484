"""Float16: what does not overflow as the mean of a batch in plain JAX does not overflow here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.losses import loss as losses_lib
from tests.rounds import problems

SIZE = 256
RATE = 4e-3


def examples():
    x = np.random.default_rng(0).uniform(2, 3, size=(512, 4)).astype(np.float32)
    return {"x": x, "y": 11 * x @ np.array([1, -2, 3, 0.5], np.float32)}


def squares(params, batch, rng):
    """Computed in float16, whatever the parameters are; a gradient is about -350 an example."""
    del rng
    x, y = batch["x"].astype(jnp.float16), batch["y"].astype(jnp.float16)
    return (x @ params.astype(jnp.float16) - y) ** 2


def varying(params, batch, rng):
    """With weights of the same kind that depend on the parameters, by nothing."""
    found = squares(params, batch, rng)
    weights = jnp.ones_like(found) + 0 * params.sum().astype(found.dtype)[None]
    return hetjax.Losses(found, weights=weights)


def fit(dtype, loss_fn, order):
    fields = {"cluster": {"num_workers": 2}, "microbatch_size": SIZE, "budget": 2, "epochs": 20}
    fields |= {"loss_fn": loss_fn, "optimizer": optax.sgd(RATE), "ordering": order}
    return problems.fit(examples(), np.zeros(4, dtype), **fields)


def plain(dtype):
    """Of the mean loss over all examples, in one call of JAX."""

    def mean(params):
        return squares(params, examples(), None).astype(jnp.float32).mean()

    @jax.jit
    def step(params):
        value, grad = jax.value_and_grad(mean)(params)
        return params - jnp.asarray(RATE, params.dtype) * grad, value

    params, values = jnp.zeros(4, dtype), []
    for _ in range(20):
        params, value = step(params)
        values.append(float(value))
    return np.asarray(params), values


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["parameters", "mixed"])
@pytest.mark.parametrize(
    ("order", "loss_fn"),
    [
        *[("random_reshuffling", squares), ("random_reshuffling", varying)],
        *[("d_grab", squares), ("d_grab_exact", squares)],
    ],
)
def test_a_gradient_of_a_mean_that_is_finite_is_finite_here(dtype, order, loss_fn):
    expected, values = plain(dtype)
    result = fit(dtype, loss_fn, order)
    assert values[-1] < values[0] / 10
    found = [line["loss"] for line in result.history]
    np.testing.assert_allclose(found, values, rtol=0.02)
    np.testing.assert_allclose(result.params, expected, rtol=0.02)


def linear(params, batch, rng):
    """In float32, of parameters of any kind."""
    return batch["y"] * params.sum().astype(jnp.float32)


def scanned(params, batch, rng):
    """Float16 in the inner program alone."""
    del rng

    def body(total, column):
        return total + (column.astype(jnp.float16) ** 2).astype(total.dtype), None

    return jax.lax.scan(body, batch["y"] * params.sum(), batch["x"].T)[0]


@pytest.mark.parametrize(
    ("dtype", "loss_fn", "divisor"),
    [
        *[(np.float16, linear, 8), (jnp.bfloat16, linear, 1), (np.float32, linear, 1)],
        *[(np.float32, squares, 8), (np.float32, scanned, 8)],
    ],
)
def test_losses_are_divided_where_there_is_float16_alone(dtype, loss_fn, divisor):
    first = jax.tree.map(lambda leaf: leaf[:8], examples())
    traced = losses_lib.check_loss(loss_fn, jnp.zeros(4, dtype), first, jax.random.key(0))
    assert traced.divisor == divisor
