"""Models that change variables of their own are refused, by name; those that only have some not."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hetjax
from hetjax.losses import forwarding

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
DATA = {"x": X, "y": X.sum(-1)}
BATCH = jax.tree.map(lambda leaf: leaf[:6], DATA)


def loss(model, batch):
    return (model(batch["x"]).sum(-1) - batch["y"]) ** 2


class Counter(nnx.Variable):
    """A variable of the user's own kind."""


class Codebook(nnx.Param):
    """A parameter of the user's own kind."""


class Block(nnx.Module):
    """With a constant, a dropout, and what `change` does to the variables."""

    def __init__(self, rngs, change=lambda block, x: None):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = nnx.Variable(jnp.ones((1, 4)))
        self.count = Counter(jnp.zeros((), jnp.int32))
        self.mean = nnx.Variable(jnp.zeros(4))
        self.codebook = Codebook(jnp.zeros(4))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.change = change
        self.calls, self.shape, self.seen = 0, None, None

    def __call__(self, x):
        self.change(self, x)
        return self.drop(self.linear(x)) * self.mask[...]


def counts(block, x):
    block.count[...] += jnp.ones((), jnp.int32)


def averages(block, x):
    block.mean.set_value(0.9 * block.mean[...] + 0.1 * x.mean(0))


def moves(block, x):
    block.codebook[...] = 0.5 * block.codebook[...] + 0.5 * x.mean(0)


def moves_bias(block, x):
    block.linear.bias.set_value(x.mean(0))


def made_anew(block, x):
    block.last = nnx.Variable(x.mean())


def first_statistics(block, x):
    block.last = nnx.BatchStat(x.mean())


def counts_in_python(block, x):
    block.calls += 1


def sets_alike(block, x):
    block.shape, block.seen = x.shape, x
    block.train()


def averages_in_training(block, x):
    if not block.drop.deterministic:
        averages(block, x)


def calls_block(wrap):
    class Outer(nnx.Module):
        def __init__(self, rngs, change=lambda block, x: None):
            self.block = Block(rngs, change)

        def __call__(self, x):
            return wrap(self.block, x)

    return Outer


MODELS = {
    "plain": Block,
    "remat in jit": calls_block(nnx.jit(nnx.remat(lambda block, x: block(x)))),
    "cond": calls_block(
        lambda block, x: nnx.cond(
            x.sum() > 0, lambda b, x: b(x), lambda b, x: b(x) * b.mask[...], block, x
        )
    ),
}


CHANGES = {
    counts: "count",
    counts_in_python: "calls",
    averages: "mean",
    moves: "codebook",
    moves_bias: "linear.bias",
}


@pytest.mark.parametrize(
    ("name", "change"),
    [*(("plain", change) for change in CHANGES), ("remat in jit", averages), ("cond", moves)],
)
def test_a_model_that_changes_variables_is_refused_and_they_are_named(name, change):
    loss_fn, params = hetjax.nnx_loss(MODELS[name](nnx.Rngs(0), change), loss)
    path = CHANGES[change] if name == "plain" else f"block.{CHANGES[change]}"
    for rng in (jax.random.key(0), jax.random.split(jax.random.key(0), 6)):
        with pytest.raises(ValueError, match=f"The model keeps .* changes {path}, which is lost"):
            jax.eval_shape(loss_fn, params, BATCH, rng)


@pytest.mark.parametrize(("name", "change"), [*((n, None) for n in MODELS), ("plain", sets_alike)])
def test_a_model_that_has_variables_or_sets_attributes_alike_trains(name, change):
    loss_fn, params = hetjax.nnx_loss(MODELS[name](nnx.Rngs(0), *filter(None, [change])), loss)
    assert jax.eval_shape(loss_fn, params, BATCH, jax.random.key(0)).shape == (6,)


@pytest.mark.parametrize("change", [made_anew, first_statistics])
def test_a_variable_that_a_call_makes_is_refused(change):
    loss_fn, params = hetjax.nnx_loss(Block(nnx.Rngs(0), change), loss)
    with pytest.raises(ValueError, match="changes last"):
        jax.eval_shape(loss_fn, params, BATCH, jax.random.key(0))


def test_a_parameter_that_is_not_trained_may_be_state():
    of_book = nnx.PathContains("codebook")
    fields = {"wrt": nnx.PathContains("kernel"), "state": (nnx.BatchStat, of_book)}
    model = Block(nnx.Rngs(0), moves)
    loss_fn, params = hetjax.nnx_loss(model, loss, **fields)
    _, after = loss_fn.apply(params, loss_fn.model_state, BATCH, jax.random.key(0))
    model(BATCH["x"])
    kept = hetjax.nnx_model(Block(nnx.Rngs(0)), params, after, **fields)
    np.testing.assert_array_equal(kept.codebook[...], model.codebook[...])


@pytest.mark.parametrize("norm", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_norm_that_writes_its_kernel_is_refused_and_a_copy_of_it_trains(norm):
    model = norm(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    loss_fn, params = hetjax.nnx_loss(model, loss)
    with pytest.raises(ValueError, match=r"changes layer_instance\.kernel.*nnx\.clone"):
        jax.eval_shape(loss_fn, params, BATCH, jax.random.key(0))
    loss_fn, params = hetjax.nnx_loss(model, lambda m, batch: loss(nnx.clone(m), batch))
    expected = loss(model, BATCH)
    np.testing.assert_allclose(loss_fn(params, BATCH, jax.random.key(0)), expected, rtol=1e-5)


def test_what_changes_in_training_alone_is_evaluated():
    def metrics(model, batch):
        return {"loss": loss(model, batch)}

    model = Block(nnx.Rngs(0), averages_in_training)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert hetjax.nnx_metrics(model, metrics)(params, BATCH)["loss"].shape == (6,)
    with pytest.raises(ValueError, match="changes mean"):
        hetjax.nnx_metrics(Block(nnx.Rngs(0), averages), metrics)(params, BATCH)


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_what_is_sown_may_be_read_in_the_loss():
    def sows(block, x):
        block.sow(nnx.Intermediate, "features", x)

    def with_penalty(model, batch):
        losses = loss(model, batch)
        (features,) = nnx.pop(model, nnx.Intermediate)["features"].get_value()
        return losses + features.sum(-1)

    def captured(model, batch):
        out, sown = nnx.capture(model, nnx.Intermediate)(batch["x"])
        (features,) = sown["features"].get_value()
        return (out.sum(-1) - batch["y"]) ** 2 + features.sum(-1)

    for function in (loss, with_penalty, captured):
        loss_fn, params = hetjax.nnx_loss(Block(nnx.Rngs(0), sows), function)
        assert loss_fn(params, BATCH, jax.random.key(0)).shape == (6,)


def linen_case(change, **init):
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.variable("constants", "scale", lambda: jnp.full((), 2.0))
            change(self, x)
            return nn.Dense(4)(x) * scale.value

    class Outer(nn.Module):
        wrap: str = "plain"

        @nn.compact
        def __call__(self, x):
            made = {"plain": Dense, "remat": nn.remat(Dense)}[self.wrap]
            return made(name="dense")(x)

    return Outer


def no_change(module, x):
    pass


def linen_counts(module, x):
    count = module.variable("state", "count", lambda: jnp.zeros(()))
    count.value += 1.0


def counts_where_it_may(module, x):
    count = module.variable("state", "count", lambda: jnp.zeros(()))
    if module.is_mutable_collection("state"):
        count.value += 1.0


def linen_sows(module, x):
    module.sow("losses", "penalty", (x**2).sum(-1))


@pytest.mark.parametrize("wrap", ["plain", "remat"])
def test_a_linen_module_that_changes_a_collection_is_refused(wrap):
    for change in (linen_counts, counts_where_it_may):
        module = linen_case(change)(wrap)
        variables = module.init(jax.random.key(0), X[:1])
        loss_fn, params = hetjax.linen_loss(module, variables, loss)
        message = r"The model keeps .* changes state\.dense\.count"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(loss_fn, params, BATCH, jax.random.key(0))
        metrics = hetjax.linen_metrics(module, variables, lambda m, b: {"loss": loss(m, b)})
        with pytest.raises(ValueError, match=message):
            metrics(params, BATCH)


def test_parameters_of_linen_that_a_call_may_change_are_refused():
    module = linen_case(no_change)()
    variables = module.init(jax.random.key(0), X[:1])
    with pytest.raises(ValueError, match="linen_loss: mutable names 'params'"):
        hetjax.linen_loss(module, variables, loss, mutable=("params",))


@pytest.mark.parametrize("wrap", ["plain", "remat"])
def test_a_linen_module_with_constants_trains(wrap):
    module = linen_case(no_change)(wrap)
    variables = module.init(jax.random.key(0), X[:1])
    loss_fn, params = hetjax.linen_loss(module, variables, loss)
    expected = loss(lambda x: module.apply(variables, x), BATCH)
    np.testing.assert_allclose(loss_fn(params, BATCH, jax.random.key(0)), expected, rtol=1e-6)


def test_what_a_linen_module_sows_is_left_out_of_variables_and_read():
    def with_penalty(model, batch):
        out, sown = model(batch["x"], mutable=["losses"])
        return (out.sum(-1) - batch["y"]) ** 2 + sown["losses"]["dense"]["penalty"][0]

    module = linen_case(linen_sows)()
    variables = module.init(jax.random.key(0), X[:1])
    assert "losses" in variables
    for function in (loss, with_penalty):
        loss_fn, params = hetjax.linen_loss(module, variables, function)
        with pytest.raises(ValueError, match=r"changes losses\.dense\.penalty"):
            loss_fn(params, BATCH, jax.random.key(0))
    variables = {name: part for name, part in variables.items() if name != "losses"}
    loss_fn, params = hetjax.linen_loss(module, variables, with_penalty)
    expected = loss(lambda x: module.apply(variables, x), BATCH) + (BATCH["x"] ** 2).sum(-1)
    np.testing.assert_allclose(loss_fn(params, BATCH, jax.random.key(0)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: [a, b], [False, False]),
        (lambda a, b: [b, a], [True, True]),
        (lambda a, b: jax.jit(lambda a, b: (a, a * b))(a, b), [False, True]),
        (lambda a, b: jax.checkpoint(lambda a, b: (a, jnp.sin(b)))(a, b), [False, True]),
        (
            lambda *ab: jax.lax.cond(ab[0] > 0, lambda a, b: [a, b], lambda a, b: [a, a], *ab),
            [False, True],
        ),
        (
            lambda *ab: jax.lax.scan(lambda c, _: ((c[0], sum(c)), None), ab, None, length=3)[0],
            [False, True],
        ),
        (
            lambda *ab: jax.lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, c[1] + 1), ab),
            [True, True],
        ),
    ],
)
def test_what_a_program_hands_on_is_told_from_what_it_makes(function, expected):
    values = [jnp.ones(()), jnp.ones(())]
    assert forwarding.changed(lambda v: list(function(*v)), values) == expected
