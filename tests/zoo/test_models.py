"""Reference models: sizes, pooling, what they refuse."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from hetjax.parts import options
from hetjax.zoo import config, models
from hetjax.zoo.models import layers


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("lenet", (32, 32, 3), {}, 62_006),
        ("lenet", (28, 28, 1), {}, 44_426),
        ("logistic", (28, 28, 1), {}, 7_850),
        ("mlp", (28, 28, 1), {"hidden": (256, 128)}, 235_146),
        ("small_cnn", (8, 8, 1), {}, 6_186),
        ("resnet8", (32, 32, 3), {}, 77_850),
        ("resnet18", (32, 32, 3), {"norm": "batch"}, 11_173_962),
    ],
)
def test_number_of_parameters(name, shape, options, count):
    def run(images):
        model = models.make(name, shape, 10, rngs=nnx.Rngs(0), **options)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(images)

    images = jax.ShapeDtypeStruct((2, *shape), jnp.uint8)
    params, logits = jax.eval_shape(run, images)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.float32)


def test_pooling_equals_max_pool_and_so_does_its_gradient():
    features = jax.random.normal(jax.random.key(0), (2, 7, 9, 2))

    def pool(features):
        return nnx.max_pool(features, (2, 2), strides=(2, 2))

    @jax.jit
    def both(features):
        pools = (layers.max_pool_2x2, pool)
        grads = [jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(features) for f in pools]
        return [f(features) for f in pools], grads

    for pair in both(features):
        np.testing.assert_array_equal(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (1, 17, 22, 2)])
def test_convolutions_equal_those_of_flax_and_so_do_their_gradients(shape):
    images = jax.random.uniform(jax.random.key(0), shape)
    rng = np.random.default_rng(1)
    filters = [
        (0.2 * rng.normal(size=(5, 5, *widths)), 0.1 * rng.normal(size=widths[-1]))
        for widths in ((shape[-1], 6), (6, 16))
    ]
    filters = jax.tree.map(jnp.float32, filters)

    def by_flax(images, filters):
        features = images
        for kernel, bias in filters:
            conv = linen.Conv(bias.size, (5, 5), padding="VALID")
            features = conv.apply({"params": {"kernel": kernel, "bias": bias}}, features)
            features = linen.max_pool(linen.relu(features), (2, 2), strides=(2, 2))
        return features

    expected, gradients = jax.value_and_grad(lambda *x: jnp.sum(by_flax(*x) ** 2), (0, 1))(
        images, filters
    )
    for form in (
        layers.conv_relu_pool,
        layers.conv_relu_pool_by_xla,
        layers._conv_relu_pool_by_rows,
    ):
        found = jax.jit(jax.value_and_grad(lambda *x, f=form: jnp.sum(f(*x) ** 2), (0, 1)))
        value, own = found(images, filters)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "lenet", "small_cnn"])
def test_pixels_are_scaled_by_their_range(name):
    images = np.random.default_rng(0).integers(0, 17, (3, 16, 16, 1)).astype(np.uint8)

    @jax.jit
    def both(images):
        by_range = models.make(name, (16, 16, 1), 4, rngs=nnx.Rngs(0), input_max=16.0)
        scaled = models.make(name, (16, 16, 1), 4, rngs=nnx.Rngs(0), input_max=1.0)
        return by_range(images), scaled(images.astype(jnp.float32) / 16.0)

    np.testing.assert_allclose(*both(images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["small_cnn", "resnet8"])
def test_normalised_examples_do_not_depend_on_their_batch(name):
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)

    @jax.jit
    def both(images):
        model = models.make(name, (16, 16, 3), 10, rngs=nnx.Rngs(0))
        return model(images)[1:2], model(images[1:2])

    np.testing.assert_allclose(*both(images), rtol=1e-5, atol=1e-5)


def test_the_configuration_allows_exactly_the_registered_names():
    assert set(options.options_of(config.ModelConfig)["name"].rule.names) == set(models.MODELS)


def test_every_model_says_what_it_takes_and_only_those():
    assert models.TAKES.keys() == models.MODELS.keys()
    assert models.options_of("mlp") == ("hidden", "input_max", "param_dtype")
    assert models.options_of("logistic") == ()


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"model: got 'lenet5', must be .* Did you mean 'lenet'"):
        models.make("lenet5", (32, 32, 3), 10, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet", (8, 8, 1)), ("small_cnn", (64,)), ("resnet8", (4, 4, 1))]
)
def test_images_that_a_model_cannot_take_are_refused(name, shape):
    with pytest.raises(ValueError, match=r"model .* got examples of shape"):
        models.make(name, shape, 10, rngs=nnx.Rngs(0))
