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
    ("name", "shape", "outputs", "options", "count"),
    [
        ("lenet", (32, 32, 3), 10, {}, 62_006),
        ("lenet", (28, 28, 1), 10, {}, 44_426),
        ("logistic", (28, 28, 1), 10, {}, 7_850),
        ("mlp", (28, 28, 1), 10, {"hidden": (256, 128)}, 235_146),
        ("small_cnn", (8, 8, 1), 10, {}, 6_186),
        ("resnet8", (32, 32, 3), 10, {}, 77_850),
        ("resnet18", (32, 32, 3), 10, {"norm": "batch"}, 11_173_962),
        ("lstm", (36,), 10_000, {"hidden": (32, 32)}, 10_000 * 33 + 2 * 4 * 32 * 65),
        ("transformer", (129,), 10_000, {}, 10_128 * 128 + 2 * 198_272 + 256),
        ("bag_of_words", (65_536,), 2, {}, 2 * 65_537),
        ("forecaster", (20,), 6, {}, 21 * 64 + 2 * 65 * 64 + 65 * 6),
    ],
)
def test_number_of_parameters(name, shape, outputs, options, count):
    def run(images):
        model = models.make(name, shape, outputs, rngs=nnx.Rngs(0), **options)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(images)

    dtype = jnp.uint8 if len(shape) == 3 else jnp.float32 if name == "forecaster" else jnp.int32
    params, found = jax.eval_shape(run, jax.ShapeDtypeStruct((2, *shape), dtype))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count
    of_words = (shape[0] - 1,) if name in ("lstm", "transformer") else ()
    assert (found.shape, found.dtype) == ((2, *of_words, outputs), jnp.float32)


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
    forms = (layers.conv_relu_pool, layers.conv_relu_pool_by_xla, layers._conv_relu_pool_by_rows)
    for form in forms:
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


def test_every_model_has_a_name_in_the_configuration_and_says_what_it_takes():
    assert set(options.options_of(config.ModelConfig)["name"].rule.names) == set(models.MODELS)
    assert models.TAKES.keys() == models.MODELS.keys()
    assert models.options_of("mlp") == ("hidden", "input_max", "param_dtype")
    assert models.options_of("logistic") == ()


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("lenet5", (32, 32, 3), {}, r"model: got 'lenet5', must be .* Did you mean 'lenet'"),
        ("lenet", (8, 8, 1), {}, "model .* got examples of shape"),
        ("small_cnn", (64,), {}, "model .* got examples of shape"),
        ("resnet8", (4, 4, 1), {}, "model .* got examples of shape"),
        ("lstm", (7,), {"hidden": (32, 16)}, r"hidden: got \(32, 16\), must be one or more equal"),
        ("transformer", (7,), {"width": 8, "heads": 3}, "heads: got 3, must divide model.width=8"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        models.make(name, shape, 10, rngs=nnx.Rngs(0), **options)
