"""`hetjax.per_example`: the loss of one example becomes that of a batch, and is separate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.rounds import independence
from tests.rounds import problems

pytestmark = pytest.mark.usefixtures("float64")


def one_softmax_loss(weights, example, rng):
    del rng
    return -jax.nn.log_softmax(example["x"] @ weights)[example["y"]]


def one_weighted_loss(weights, example, rng):
    return one_softmax_loss(weights, example, rng), jnp.maximum(example["x"][0], 0) ** 2


def one_with_dropout(weights, example, rng):
    kept = jax.random.bernoulli(rng, 0.5, example["x"].shape).astype(example["x"].dtype)
    return one_softmax_loss(weights, example | {"x": example["x"] * kept}, rng)


def one_wide_loss(weights, example, rng):
    """Elementwise alone, so that one example is added up as a batch is."""
    return jnp.sum(jnp.tanh(example["x"][:, None] * weights))


def wide_loss(weights, batch, rng):
    return jnp.sum(jnp.tanh(batch["x"][:, :, None] * weights[None]), axis=(1, 2))


def fit(loss_fn, **fields):
    return problems.train(loss_fn=loss_fn, epochs=2, local="virtual", **fields)


@pytest.mark.parametrize(
    ("of_one", "of_batch"),
    [
        (one_softmax_loss, problems.softmax_loss),
        (one_weighted_loss, problems.weighted_softmax_loss),
    ],
)
def test_it_has_the_losses_and_the_gradient_of_the_loss_of_the_batch(of_one, of_batch):
    data, weights = problems.classification(8), problems.initial_weights()
    loss_fn = hetjax.per_example(of_one)
    given = weights, data, jax.random.key(0)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-14),
        (loss_fn(*given), jax.jacobian(loss_fn)(*given)),
        (of_batch(*given), jax.jacobian(of_batch)(*given)),
    )


@pytest.mark.parametrize("method", ["random_reshuffling", "d_grab_exact"])
def test_a_run_is_that_of_the_loss_of_the_batch(method, capsys, monkeypatch):
    """To the bit, where one example is computed by the operations of a batch."""
    monkeypatch.setattr(independence, "_SLOW_SECS", float("inf"))
    of_batch = fit(wide_loss, ordering=method)
    own = fit(hetjax.per_example(one_wide_loss), ordering=method)
    np.testing.assert_array_equal(np.asarray(own.params), np.asarray(of_batch.params))
    assert own.summary["train_loss"] == of_batch.summary["train_loss"]
    assert "hetjax: " not in capsys.readouterr().err


def test_the_key_of_an_example_follows_its_id_or_its_place():
    keys = jax.random.split(jax.random.key(3), 4)
    loss_fn = hetjax.per_example(lambda params, example, rng: jax.random.uniform(rng))
    drawn = jax.vmap(jax.random.uniform)
    batch = {"x": np.zeros(4)}
    np.testing.assert_array_equal(loss_fn(0.0, batch, keys), drawn(keys))
    np.testing.assert_array_equal(loss_fn(0.0, batch, jax.random.key(3)), drawn(keys))
    raw = jax.random.key_data(jax.random.key(3))
    np.testing.assert_array_equal(loss_fn(0.0, batch, raw), drawn(keys))


@pytest.mark.slow
def test_nobody_looks_whether_its_examples_see_each_other(monkeypatch, capsys):
    def never(*given):
        raise AssertionError("it was looked at")

    monkeypatch.setattr(independence, "moved", never)
    fit(hetjax.per_example(one_with_dropout), loss_over="example")
    fit(hetjax.per_example(one_with_dropout), ordering="grab")
    assert "hetjax: " not in capsys.readouterr().err


def test_several_losses_of_an_example_without_weights_are_refused():
    loss_fn = hetjax.per_example(lambda weights, example, rng: example["x"])
    with pytest.raises(ValueError, match="loss_fn returned losses float"):
        fit(loss_fn)
