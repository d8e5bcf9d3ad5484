"""Language models, the head on words and the forecaster, each beside a slow NumPy reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.zoo import models
from hetjax.zoo.models import forecasting

VOCABULARY, LENGTH = 11, 6


def tokens_of(count):
    shape = (count, LENGTH + 1)
    return np.random.default_rng(0).integers(VOCABULARY, size=shape, dtype=np.int32)


def make(name, **options):
    shape = (LENGTH + 1,)
    return models.make(name, shape, VOCABULARY, rngs=nnx.Rngs(0), **options)


SMALL = {"lstm": {"hidden": (4, 4)}, "transformer": {"width": 8}}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_lstm_equals_its_formula_step_by_step():
    model, tokens = make("lstm", hidden=(4, 4)), tokens_of(3)
    table = np.asarray(model.embedding[...], np.float64)
    for row, found in zip(tokens, np.asarray(model(tokens)), strict=True):
        states = [(np.zeros(4), np.zeros(4)) for _ in model.layers]  # output and cell
        for place, token in enumerate(row[:-1]):
            features = table[token]
            for index, layer in enumerate(model.layers):
                output, cell = states[index]
                inputs, recurrent = (np.asarray(layer[k][...]) for k in ("inputs", "states"))
                gates = features @ inputs + output @ recurrent + np.asarray(layer["bias"][...])
                take, keep, new, give = np.split(gates, 4)
                cell = sigmoid(keep) * cell + sigmoid(take) * np.tanh(new)
                features = sigmoid(give) * np.tanh(cell)
                states[index] = features, cell
            np.testing.assert_allclose(found[place], features @ table.T, rtol=1e-4, atol=1e-6)


def test_the_transformer_attends_as_its_formula_says():
    model = make("transformer", width=8, blocks=1, heads=2)
    block = model.blocks[0]
    features = np.random.default_rng(1).normal(size=(1, LENGTH, 8)).astype(np.float32)
    mixed = np.asarray(block.mixed(features))[0]
    query, key, value = np.split(mixed.astype(np.float64), 3, axis=1)
    expected = np.zeros((LENGTH, 8))
    for head in (slice(0, 4), slice(4, 8)):
        for place in range(LENGTH):
            scores = key[: place + 1, head] @ query[place, head] / 2.0  # √4
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[place, head] = weights @ value[: place + 1, head]
    found = block._attention(jnp.asarray(features))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_a_word_is_told_by_those_before_it_alone(name):
    model, tokens = make(name, **SMALL[name]), tokens_of(2)
    before = np.asarray(model(tokens))
    for place in range(LENGTH + 1):
        other = tokens.copy()
        other[:, place] = (other[:, place] + 1) % VOCABULARY
        after = np.asarray(model(other))
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert place == LENGTH or (after[:, place:] != before[:, place:]).any()


@pytest.mark.parametrize("name", SMALL)
def test_chunks_do_not_depend_on_their_batch_nor_on_padding(name):
    model, tokens = make(name, **SMALL[name]), tokens_of(3)
    whole = model(tokens)
    np.testing.assert_allclose(model(tokens[1:2]), whole[1:2], rtol=1e-5, atol=1e-6)
    padded = tokens.copy()
    padded[:, 4:] = -1
    np.testing.assert_allclose(model(padded)[:, :4], whole[:, :4], rtol=1e-5, atol=1e-6)


def test_the_head_on_words_equals_a_product_with_the_features_written_down():
    model = models.make("bag_of_words", (9,), 3, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    table, bias = rng.normal(size=(9, 3)), rng.normal(size=3)
    model.table[...], model.bias[...] = jnp.float32(table), jnp.float32(bias)
    words = np.array([[0, 3, 8], [2, -1, -1], [-1, -1, -1]], np.int32)
    features = np.zeros((3, 9))
    for row, found in zip(features, words, strict=True):
        row[found[found >= 0]] = 1
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-9)
    np.testing.assert_allclose(model(words), features @ table + bias, rtol=1e-5, atol=1e-6)


def test_a_forecaster_that_learned_nothing_is_the_naive_forecast_whatever_the_scale():
    model = models.make("forecaster", (5,), 2, rngs=nnx.Rngs(0), hidden=(4,))
    past = np.random.default_rng(0).normal(100, 3, size=(3, 5)).astype(np.float32)
    told = np.asarray(model(past))
    np.testing.assert_allclose(model(1000 * past + 7), 1000 * told + 7, rtol=1e-5)
    model.layers[-1].kernel[...] *= 0
    np.testing.assert_array_equal(model(past), np.repeat(past[:, -1:], 2, axis=1))
    assert np.isfinite(np.asarray(model(np.zeros((1, 5), np.float32)))).all()


def test_a_forecast_goes_on_from_itself():
    class Steps(nnx.Module):
        def __call__(self, past):  # of 1, 2: 3, 4
            return past[:, -1:] + jnp.float32([[1.0, 2.0]])

    past = np.array([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]], np.float32)
    found = forecasting.forecast(Steps(), past, 5)
    assert found.tolist() == [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert forecasting.forecast(Steps(), past, 2).tolist() == [[3, 4], [8, 9]]
