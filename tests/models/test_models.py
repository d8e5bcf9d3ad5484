"""Reference models: sizes, pooling, what they refuse."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax import config, models
from hetjax.models import layers


def num_parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("lenet", (32, 32, 3), {}, 62_006),
        ("lenet", (28, 28, 1), {}, 44_426),
        ("logistic", (28, 28, 1), {}, 7_850),
        ("mlp", (28, 28, 1), {"hidden": (256, 128)}, 235_146),
        ("small_cnn", (8, 8, 1), {}, 6_186),
    ],
)
def test_number_of_parameters(name, shape, options, count):
    model = models.make(name, shape, 10, rngs=nnx.Rngs(0), **options)
    assert num_parameters(model) == count
    assert model(np.zeros((2, *shape), np.uint8)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(2, 8, 6, 3), (1, 7, 9, 2), (3, 5, 4, 1)])
def test_pooling_equals_max_pool_and_so_does_its_gradient(shape):
    features = jax.random.normal(jax.random.key(0), shape)

    def pool(features):
        return nnx.max_pool(features, (2, 2), strides=(2, 2))

    np.testing.assert_array_equal(layers.max_pool_2x2(features), pool(features))
    grads = [
        jax.grad(lambda features, f=f: jnp.sum(f(features) ** 2))(features)
        for f in (layers.max_pool_2x2, pool)
    ]
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("name", models.MODELS)
def test_pixels_are_scaled_by_their_range(name):
    images = np.random.default_rng(0).integers(0, 17, (3, 16, 16, 1)).astype(np.uint8)
    by_range = models.make(name, (16, 16, 1), 4, rngs=nnx.Rngs(0), input_max=16.0)
    scaled = models.make(name, (16, 16, 1), 4, rngs=nnx.Rngs(0), input_max=1.0)
    np.testing.assert_allclose(by_range(images), scaled(images / 16.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", models.MODELS)
def test_examples_do_not_depend_on_their_batch(name):
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    model = models.make(name, (16, 16, 3), 10, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(model(images)[1:2], model(images[1:2]), rtol=1e-5, atol=1e-5)


def test_the_configuration_allows_exactly_the_registered_names():
    rule = inspect.getattr_static(config.ModelConfig, "__dataclass_fields__")["name"].metadata
    assert set(rule["rule"].names) == set(models.MODELS)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"model: got 'lenet5', must be .* Did you mean 'lenet'"
    ):
        models.make("lenet5", (32, 32, 3), 10, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("name", "shape"), [("lenet", (8, 8, 1)), ("small_cnn", (64,))])
def test_images_that_a_model_cannot_take_are_refused(name, shape):
    with pytest.raises(
        ValueError, match=r"model .* got examples of shape .* height and width of"
    ):
        models.make(name, shape, 10, rngs=nnx.Rngs(0))
