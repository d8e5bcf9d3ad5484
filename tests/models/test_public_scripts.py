"""Public training scripts in small: unequal workers train each as its own loop does."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hetjax
from tests.models import plain_loops
from tests.models.plain_loops import F64

DATA = plain_loops.examples(1)
KEYS = dict(zip(("params", "dropout", "lstm"), jax.random.split(jax.random.key(0), 3), strict=True))
FIRST = jax.tree.map(lambda leaf: leaf[:1], DATA)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def of_nnx(model, loss):
    nnx.update(model, plain_loops.as_float64(nnx.state(model)))
    return plain_loops.of_nnx(model, loss), *hetjax.nnx_loss(model, loss)


def of_linen(module, loss, *args, streams=("dropout",), **kwargs):
    variables = plain_loops.as_float64(module.init(KEYS, *args, **kwargs))
    of_hetjax = hetjax.linen_loss(module, variables, loss, streams=streams)
    return plain_loops.of_linen(module, variables, loss, streams), *of_hetjax


def of_function(loss, params):
    return plain_loops.of_function(loss, params), loss, params


class Cnn(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs, **F64)
        self.norm = nnx.BatchNorm(4, rngs=rngs, **F64)
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.dropout, self.out = nnx.Dropout(0.3), nnx.Linear(16, 3, rngs=rngs, **F64)

    def __call__(self, x, rngs):
        x = self.pool(nnx.relu(self.norm(self.conv(x))))
        return self.out(self.dropout(x.reshape(len(x), -1), rngs=rngs))


def flax_mnist():
    def loss(model, batch, rngs):
        return cross_entropy(model(batch["image"], rngs), batch["label"])

    return of_nnx(Cnn(nnx.Rngs(0)), loss)


class DecoderCell(nn.RNNCellBase):
    """Of a random prediction of its own comes the next input, as in Flax's addition."""

    @nn.compact
    def __call__(self, carry, x):
        state, last = carry
        state, y = nn.LSTMCell(4, **F64)(state, (x + last) / 2)
        logits = nn.Dense(5, **F64)(y)
        drawn = jax.random.categorical(self.make_rng("lstm"), logits)
        return (state, jax.nn.one_hot(drawn, 5, dtype=float)), logits

    num_feature_axes = 1


class Seq2seq(nn.Module):
    @nn.compact
    def __call__(self, inputs, outputs, lengths):
        encoder = nn.RNN(nn.LSTMCell(4, **F64), return_carry=True)
        state, _ = encoder(inputs, seq_lengths=lengths)
        decoder = nn.RNN(DecoderCell(), split_rngs={"params": False, "lstm": True})
        return decoder(outputs, initial_carry=(state, outputs[:, 0]))


def flax_seq2seq():
    def of(model, batch):
        ids = jax.nn.one_hot(batch["ids"], 5, dtype=float)
        return model(ids, ids[:, ::-1], batch["lengths"])

    def loss(model, batch):
        mask = (jnp.arange(3)[None] < batch["lengths"][:, None]).astype(float)
        return cross_entropy(of(model, batch), batch["ids"]), mask

    ids = jax.nn.one_hot(FIRST["ids"], 5, dtype=float)
    given = ids, ids, FIRST["lengths"]
    return of_linen(Seq2seq(), loss, *given, streams=("lstm",))


def equinox_mnist():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Conv2d(4, 3, 2, padding=1, key=keys[0]),
        eqx.nn.MaxPool2d(2, 1),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Dropout(0.2),
        eqx.nn.MLP(24, 3, 5, 1, key=keys[1]),
    ]

    def losses_of(model, batch, rng):
        split = jax.random.split(rng, len(batch["y"]))
        logits = jax.vmap(lambda x, key: model(x, key=key))(batch["image"], split)
        return cross_entropy(logits, batch["label"])

    params, static = eqx.partition(eqx.nn.Sequential(layers), eqx.is_inexact_array)
    params = plain_loops.as_float64(params)
    return of_function(lambda params, *rest: losses_of(eqx.combine(params, static), *rest), params)


def equinox_batch_norm():
    """Statistics over an axis of `vmap` that the loss makes; the state is an argument."""
    eqx = pytest.importorskip("equinox")

    def make(key):
        keys = jax.random.split(key)
        norm = eqx.nn.BatchNorm(6, "batch", mode="batch", dtype=float)
        ends = eqx.nn.Linear(12, 6, key=keys[0]), eqx.nn.Linear(6, 3, key=keys[1])
        return eqx.nn.Sequential([eqx.nn.Lambda(jnp.ravel), ends[0], norm, ends[1]])

    model, state = eqx.nn.make_with_state(make)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    begun, counter = eqx.partition(state, eqx.is_inexact_array)

    def loss(params, state, batch, rng):
        model = eqx.combine(params, static)
        called = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, after = called(batch["x"], eqx.combine(state, counter))
        return cross_entropy(logits, batch["label"]), eqx.filter(after, eqx.is_inexact_array)

    def total(params, state, batch, key):
        losses, after = loss(params, state, batch, key)
        return losses.sum(), (len(losses), after)

    of_microbatch, params = jax.jit(jax.grad(total, has_aux=True)), plain_loops.as_float64(params)
    return (of_microbatch, params, begun), hetjax.StatefulLoss(loss, begun), params


# Each gives a run something that no other does.
SCRIPTS = [flax_mnist, flax_seq2seq, equinox_mnist, equinox_batch_norm]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_public_script_trains_as_its_own_loop(script, float64):
    plain_loops.check(*script(), DATA)
