"""Public training scripts in small: unequal workers train each as its own loop does."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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


class Decoder(nnx.Module):
    """As Gemma: scaled embeddings that are tied, RMS norms, grouped queries, gated units."""

    def __init__(self, rngs):
        make = functools.partial(nnx.Einsum, rngs=rngs, **F64)
        self.embed = nnx.Embed(5, 4, rngs=rngs, **F64)
        self.norms = nnx.List([nnx.RMSNorm(4, rngs=rngs, **F64) for _ in range(2)])
        self.q, self.kv = make("btd,dnh->btnh", (4, 2, 4)), make("btd,cdh->cbth", (2, 4, 4))
        self.o, self.gate = make("btnh,nhd->btd", (2, 4, 4)), make("btd,cdf->cbtf", (2, 4, 6))
        self.down = nnx.Linear(6, 4, use_bias=False, rngs=rngs, **F64)

    def __call__(self, ids):
        x = self.embed(ids) * 2.0
        y = self.norms[0](x)
        q, (k, v) = self.q(y), self.kv(y)
        scores = jnp.einsum("btnh,bsh->bnts", rotated(q), rotated(k[:, :, None])[:, :, 0])
        scores = jnp.where(nnx.make_causal_mask(ids) > 0, jnp.tanh(scores / 5) * 5, -1e9)
        x = x + self.o(jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(scores), v))
        gate, up = self.gate(self.norms[1](x))
        return self.embed.attend(x + self.down(nnx.gelu(gate) * up))


def rotated(x):
    angle = jnp.arange(x.shape[1])[None, :, None, None] / jnp.array([[[[1.0, 10.0]]]])
    one, two = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def flax_gemma():
    def loss(model, batch):
        weights = (jnp.arange(2)[None] < batch["lengths"][:, None] - 1).astype(float)
        return cross_entropy(model(batch["ids"])[:, :-1], batch["ids"][:, 1:]), weights

    return of_nnx(Decoder(nnx.Rngs(0)), loss)


class Vae(nn.Module):
    @nn.compact
    def __call__(self, x, rng):
        h = nn.relu(nn.Dense(8, **F64)(x))
        mean, logvar = nn.Dense(2, **F64)(h), nn.Dense(2, **F64)(h)
        z = mean + jnp.exp(logvar / 2) * jax.random.normal(rng, mean.shape)
        return nn.Dense(x.shape[1], **F64)(nn.relu(nn.Dense(8, **F64)(z))), mean, logvar


def flax_vae():
    def loss(model, batch, rng):
        x = batch["image"].reshape(len(batch["y"]), -1)
        logits, mean, logvar = model(x, rng)
        likelihood = optax.sigmoid_binary_cross_entropy(logits, (x > 0).astype(float)).sum(-1)
        return likelihood - 0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1)

    return of_linen(Vae(), loss, FIRST["image"].reshape(1, -1), KEYS["dropout"])


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


class GraphNet(nn.Module):
    """One graph an example: three nodes, edges along `ids`, and labels of which some lack."""

    @nn.compact
    def __call__(self, nodes, receivers, lengths):
        present = (jnp.arange(3)[None] < lengths[:, None]).astype(float)[..., None]
        nodes = nn.Dense(4, **F64)(nodes)
        for _ in range(2):
            messages = nn.relu(nn.Dense(4, **F64)(nodes)) * present
            summed = jax.vmap(lambda m, to: jax.ops.segment_sum(m, to, 3))(messages, receivers)
            nodes = nn.LayerNorm(**F64)(nodes + nn.Dense(4, **F64)(summed))
        nodes = nn.Dropout(0.2, deterministic=False)(nodes) * present
        return nn.Dense(3, **F64)(nodes.sum(1) / present.sum(1))


def flax_graphs():
    def loss(model, batch):
        logits = model(batch["x"], batch["ids"] % 3, batch["lengths"])
        labels = jnp.where(batch["x"][:, 0, :3] > 1, jnp.nan, (batch["x"][:, 1, :3] > 0) * 1.0)
        known = ~jnp.isnan(labels)
        losses = optax.sigmoid_binary_cross_entropy(logits, jnp.where(known, labels, 0))
        return losses, known

    return of_linen(GraphNet(), loss, FIRST["x"], FIRST["ids"] % 3, FIRST["lengths"])


def mlp(params, x):
    return jnp.tanh(x.reshape(len(x), -1) @ params["w"]) @ params["out"] + params["bias"][None]


def weights():
    drawn = np.random.default_rng(3)
    shapes = {"w": (12, 6), "out": (6, 3), "bias": (3,)}
    return {name: drawn.normal(0, 0.5, shape) for name, shape in shapes.items()}


def optax_lookahead():
    def plain(params, batch, rng):
        return cross_entropy(mlp(params, batch["x"]), batch["label"])

    def loss(pair, batch, rng):
        return plain(pair.fast, batch, rng)

    pair = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, weights()))
    optimizer = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    of_microbatch, _, state = plain_loops.of_function(plain, pair.fast)
    return (of_microbatch, pair, state), loss, pair, optimizer


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


SCRIPTS = [  # each gives a run something that no other does
    *(flax_mnist, flax_gemma, flax_vae, flax_seq2seq, flax_graphs),
    *(optax_lookahead, equinox_mnist, equinox_batch_norm),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_public_script_trains_as_its_own_loop(script, float64):
    reference, loss_fn, params, *optimizer = script()
    plain_loops.check(reference, loss_fn, params, DATA, *optimizer)
