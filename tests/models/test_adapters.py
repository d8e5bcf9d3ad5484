"""Adapters: per-example losses of NNX and Linen models as pure functions, and back."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

BATCH = 6


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])


def metrics(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {
        "loss": losses,
        "accuracy": (logits.argmax(-1) == batch["label"]).astype(jnp.float32),
    }


@pytest.fixture(name="batch")
def _batch():
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(BATCH, 5)), jnp.float32),
        "label": jnp.asarray(rng.integers(0, 3, BATCH)),
    }


class Dropping(nnx.Module):
    """Two dropouts whose masks are seen in the output."""

    def __init__(self, rngs):
        self.dense1 = nnx.Linear(5, 64, rngs=rngs)
        self.drop1 = nnx.Dropout(0.5, rngs=rngs)
        self.dense2 = nnx.Linear(64, 3, rngs=rngs)
        self.drop2 = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dense2(self.drop2(self.drop1(nnx.relu(self.dense1(x)))))


class LinenDropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def training_loss(model, batch):
    logits = model(batch["x"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def nnx_case(per_example_loss=loss):
    model = Dropping(nnx.Rngs(0))
    return hetjax.nnx_loss(model, per_example_loss)


def linen_case(per_example_loss=training_loss):
    module = LinenDropping()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 5)))
    return hetjax.linen_loss(module, variables, per_example_loss)


@pytest.fixture(params=[nnx_case, linen_case], name="case", scope="module")
def _case(request):
    loss_fn, params = request.param()
    return jax.jit(loss_fn), params


def test_dropout_follows_the_key_of_the_call_alone(case, batch):
    loss_fn, params = case
    first = loss_fn(params, batch, jax.random.key(1))
    np.testing.assert_array_equal(first, loss_fn(params, batch, jax.random.key(1)))
    assert not np.allclose(first, loss_fn(params, batch, jax.random.key(2)))
    raw = loss_fn(params, batch, jax.random.PRNGKey(1))
    np.testing.assert_array_equal(raw, first)


def test_with_a_key_for_each_example_a_loss_knows_no_neighbours(case, batch):
    loss_fn, params = case
    keys = jax.random.split(jax.random.key(3), BATCH)
    losses = loss_fn(params, batch, keys)
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = loss_fn(params, jax.tree.map(lambda leaf: leaf[order], batch), keys[order])
    np.testing.assert_allclose(permuted, losses[order], rtol=1e-6)
    assert losses.shape == (BATCH,)


def test_weights_pass_through(batch):
    def weighted(model, batch):
        return loss(model, batch), batch["label"].astype(jnp.float32)

    loss_fn, params = nnx_case(weighted)
    for key in (jax.random.key(0), jax.random.split(jax.random.key(0), BATCH)):
        losses, weights = loss_fn(params, batch, key)
        assert losses.shape == weights.shape == (BATCH,)
        np.testing.assert_array_equal(weights, batch["label"])


def test_the_model_that_was_passed_in_is_not_changed(batch):
    model = Dropping(nnx.Rngs(0))
    model.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    count = int(model.drop1.rngs.count[...])
    loss_fn, params = hetjax.nnx_loss(model, loss)
    jax.jit(jax.grad(lambda params: loss_fn(params, batch, jax.random.key(0)).sum()))(params)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(model.drop1.rngs.count[...]) == count
    assert model.drop1.deterministic is True


def chain(*layers):
    return nnx.Sequential(nnx.Linear(5, 8, rngs=nnx.Rngs(0)), *layers)


SURE = {"deterministic": True, "rngs": nnx.Rngs(1)}
MODES = {
    "eval": lambda: nnx.view(Dropping(nnx.Rngs(0)), deterministic=True),
    "dropout": lambda: chain(nnx.Dropout(0.5, **SURE)),
    "attention": lambda: chain(
        lambda x: x[:, None],
        nnx.MultiHeadAttention(2, 8, dropout_rate=0.5, decode=False, **SURE),
        lambda x: x[:, 0],
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_a_model_trains_in_the_mode_in_which_it_is(name, batch):
    model = MODES[name]()
    loss_fn, params = hetjax.nnx_loss(model, loss)
    losses = loss_fn(params, batch, jax.random.key(0))
    np.testing.assert_allclose(losses, loss(model, batch), rtol=1e-5)
    model.train()
    dropped, _ = hetjax.nnx_loss(model, loss)
    assert not np.allclose(dropped(params, batch, jax.random.key(0)), losses)


class Explicit(nnx.Module):
    """A dropout whose randomness is an argument of the call."""

    def __init__(self, rngs):
        self.dense, self.drop = nnx.Linear(5, 64, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return self.drop(self.dense(x), rngs=rngs)


def by_rngs(model, batch, rngs):
    return loss(lambda x: model(x, rngs), batch)


def by_keyword(model, batch, *, rngs=None):
    return by_rngs(model, batch, rngs)


def by_key(model, batch, rng):
    return by_rngs(model, batch, nnx.Rngs(rng))


def by_linen_rngs(model, batch, rngs):
    return loss(lambda x: model(x, train=True, rngs=rngs), batch)


def by_linen_key(model, batch, *, rng):
    return loss(model, batch) * jax.random.uniform(rng)


@pytest.mark.parametrize("function", [by_rngs, by_keyword, by_key, by_linen_rngs, by_linen_key])
def test_a_loss_takes_random_numbers_by_name(function, batch):
    if "linen" in function.__name__:
        loss_fn, params = linen_case(function)
    else:
        loss_fn, params = hetjax.nnx_loss(Explicit(nnx.Rngs(0)), function)
    first, again, other = (loss_fn(params, batch, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.any(np.isclose(first, other, rtol=1e-6))
    keys = jax.random.split(jax.random.key(0), BATCH)
    alone = loss_fn(params, jax.tree.map(lambda leaf: leaf[:1], batch), keys[0])
    np.testing.assert_allclose(loss_fn(params, batch, keys)[:1], alone, rtol=1e-6)


def test_random_streams_from_outside_are_refused_with_what_to_take(batch):
    rngs = nnx.Rngs(0)
    loss_fn, params = hetjax.nnx_loss(Explicit(rngs), lambda m, b: by_rngs(m, b, rngs))
    with pytest.raises(ValueError, match=r"RngCount .*def loss\(model, batch, rngs\)"):
        jax.eval_shape(loss_fn, params, batch, jax.random.key(0))


def test_metrics_have_no_dropout_and_take_any_params(batch):
    model = Dropping(nnx.Rngs(0))
    evaluate = jax.jit(hetjax.nnx_metrics(model, metrics))
    _, params = hetjax.nnx_loss(model, loss)
    values = evaluate(params, batch)
    assert jax.tree.map(jnp.shape, values) == {"loss": (BATCH,), "accuracy": (BATCH,)}
    model.eval()
    np.testing.assert_allclose(values["loss"], loss(model, batch), rtol=1e-5)
    module = LinenDropping()
    variables = module.init(jax.random.key(0), batch["x"])
    found = hetjax.linen_metrics(module, variables, metrics)(variables["params"], batch)
    expected = loss(lambda x: module.apply(variables, x), batch)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, params)
    np.testing.assert_allclose(evaluate(zeros, batch)["loss"], np.log(3.0), rtol=1e-6)
