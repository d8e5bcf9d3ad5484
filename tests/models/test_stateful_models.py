"""Flax models that keep state: what the adapters make of them, and what stays fixed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

X = np.random.default_rng(0).normal(2.0, 3.0, size=(50, 4)).astype(np.float32)
DATA = {"x": X, "y": (X.sum(-1) > 8).astype(np.int32)}
QUICK = {
    "microbatch_size": 6,
    "budget": 4,
    "epochs": 30,
    "workers": 2,
    "quota": "equal",  # or the loss that is reached depends on clocks
    "progress": False,
}
OPTIMIZER = optax.sgd(0.3)


class Counter(nnx.Variable):
    """A variable of the user's own kind."""


class Normed(nnx.Module):
    def __init__(self, rngs, *, counts=False):
        self.norm = nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.calls = Counter(jnp.zeros((), jnp.int32))
        self.counts = counts

    def __call__(self, x):
        if self.counts:
            self.calls[...] += jnp.ones((), jnp.int32)
        return self.out(self.drop(self.norm(x)))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch)


def training_loss(model, batch):
    return cross_entropy(model(batch["x"], train=True), batch)


def metrics(model, batch):
    logits = model(batch["x"])
    return {"loss": cross_entropy(logits, batch), "accuracy": logits.argmax(-1) == batch["y"]}


def linen():
    module = LinenNormed()
    return module, module.init(jax.random.key(0), X[:1])


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_model_with_batch_norm_trains_is_evaluated_and_comes_back_whole(kind, tmp_path):
    if kind == "nnx":
        model = Normed(nnx.Rngs(0))
        loss_fn, params = hetjax.nnx_loss(model, loss)
        metrics_fn = hetjax.nnx_metrics(model, metrics)
    else:
        module, variables = linen()
        loss_fn, params = hetjax.linen_loss(module, variables, training_loss)
        metrics_fn = hetjax.linen_metrics(module, variables, metrics)
    fields = {"eval_source": DATA, "metrics_fn": metrics_fn, "workdir": tmp_path}
    result = hetjax.fit(loss_fn, params, OPTIMIZER, DATA, **fields, **QUICK)
    loaded = hetjax.load(tmp_path)
    if kind == "nnx":
        np.testing.assert_allclose(result.model_state["norm"]["mean"], X.mean(0), atol=0.6)
        np.testing.assert_array_equal(model.norm.mean[...], 0)
        trained = hetjax.nnx_model(model, loaded.params, loaded.model_state)
        trained.eval()
    else:
        found = hetjax.linen_variables(variables, loaded.params, loaded.model_state)
        assert sorted(found) == ["batch_stats", "params"]
        trained = lambda x: module.apply(found, x)  # noqa: E731
    accuracy = float((trained(X).argmax(-1) == DATA["y"]).mean())
    assert result.summary["test_accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.85
    again = hetjax.evaluate(result.params, DATA, metrics_fn, model_state=result.model_state)
    assert again["accuracy"] == pytest.approx(accuracy)


# --- Fixed state ---


def frozen_nnx():
    model = Normed(nnx.Rngs(0))
    model.eval()
    return hetjax.nnx_loss(model, loss)


def frozen_linen():
    return hetjax.linen_loss(*linen(), loss)


@pytest.mark.parametrize("made", [frozen_nnx, frozen_linen])
def test_fixed_statistics_stay_and_let_every_order_pass(made):
    loss_fn, params = made()
    before = jax.device_get(loss_fn.model_state)
    result = hetjax.fit(loss_fn, params, OPTIMIZER, DATA, ordering="d_grab", **QUICK)
    jax.tree.map(np.testing.assert_array_equal, before, result.model_state)
    assert result.summary["train_loss"] < 0.6


def test_a_key_for_each_example_goes_with_fixed_statistics_alone():
    model = Normed(nnx.Rngs(0))
    moves, params = hetjax.nnx_loss(model, loss)
    model.norm.use_running_average = True
    fixed, _ = hetjax.nnx_loss(model, loss)
    keys = jax.random.split(jax.random.key(0), 50)
    losses = fixed.apply(params, fixed.model_state, DATA, keys)[0]
    one = jax.tree.map(lambda leaf: leaf[:1], DATA)
    np.testing.assert_allclose(losses[:1], fixed(params, one, keys[0]), rtol=1e-5)
    with pytest.raises(ValueError, match="with per_example_rng no call may change"):
        moves(params, DATA, keys)


class WithConstants(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        scale = self.variable("constants", "scale", lambda: jnp.ones(()))
        return LinenNormed()(x, train=train) * scale.value


def test_statistics_of_linen_move_beside_constants():
    module = WithConstants()
    loss_fn, params = hetjax.linen_loss(
        module, module.init(jax.random.key(0), X[:1]), training_loss
    )
    _, after = loss_fn.apply(params, loss_fn.model_state, DATA, jax.random.key(0))
    mean = after["batch_stats"]["LinenNormed_0"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.2 * X.mean(0), rtol=1e-5)


def plain_axis(params, batch, rng):
    return (batch["x"] @ params - jax.lax.pmean(batch["x"][:, 0], "batch")) ** 2


@pytest.mark.parametrize("name", ["nnx", "plain"])
def test_statistics_over_an_axis_are_refused_by_its_name(name):
    norm = nnx.BatchNorm(4, axis_name="batch", rngs=nnx.Rngs(0))
    of_model = hetjax.nnx_loss(nnx.Sequential(norm, nnx.Linear(4, 2, rngs=nnx.Rngs(0))), loss)
    given = of_model if name == "nnx" else (plain_axis, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"unbound axis name: batch\. A .*leave axis_name out"):
        hetjax.fit(*given, OPTIMIZER, DATA, **QUICK)


# --- Other state ---


def test_variables_of_ones_own_kind_are_state_where_they_are_named():
    model = Normed(nnx.Rngs(0), counts=True)
    loss_fn, params = hetjax.nnx_loss(model, loss)
    with pytest.raises(ValueError, match=r"The model keeps .* changes calls"):
        hetjax.fit(loss_fn, params, OPTIMIZER, DATA, **QUICK)
    loss_fn, params = hetjax.nnx_loss(model, loss, state=(nnx.BatchStat, Counter))
    result = hetjax.fit(loss_fn, params, OPTIMIZER, DATA, **QUICK)
    assert int(result.model_state["calls"]) == result.summary["rounds"]
    result = hetjax.fit(loss_fn, params, OPTIMIZER, DATA, state_reduce={"calls": "sum"}, **QUICK)
    assert int(result.model_state["calls"]) == 30 * 9


class Counted(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += jnp.ones((), jnp.int32)
        return nn.Dense(2)(x)


def test_collections_of_ones_own_are_state_where_they_are_named():
    module = Counted()
    variables = module.init(jax.random.key(0), X[:1])
    loss_fn, params = hetjax.linen_loss(module, variables, loss)
    with pytest.raises(ValueError, match=r"The model keeps .* changes counts\.calls"):
        hetjax.fit(loss_fn, params, OPTIMIZER, DATA, **QUICK)
    loss_fn, params = hetjax.linen_loss(module, variables, loss, mutable=("counts",))
    more = {"state_reduce": {"counts": "sum"}}
    result = hetjax.fit(loss_fn, params, OPTIMIZER, DATA, **more, **QUICK)
    assert int(result.model_state["counts"]["calls"]) == 30 * 9


@pytest.mark.parametrize("made", ["nnx", "linen"])
def test_two_calls_in_a_loss_go_on_from_each_other(made):
    """As plain Flax does it."""

    def twice(model, batch):
        more = {"train": True} if made == "linen" else {}
        model(batch["x"], **more)
        return cross_entropy(model(batch["x"] + 1, **more), batch)

    if made == "nnx":
        loss_fn, params = hetjax.nnx_loss(Normed(nnx.Rngs(0)), twice)
        (mean,) = [loss_fn.apply(params, loss_fn.model_state, DATA, jax.random.key(0))[1]["norm"]]
    else:
        loss_fn, params = hetjax.linen_loss(*linen(), twice)
        _, state = loss_fn.apply(params, loss_fn.model_state, DATA, jax.random.key(0))
        mean = state["batch_stats"]["BatchNorm_0"]
    expected = 0.8 * 0.2 * X.mean(0) + 0.2 * (X + 1).mean(0)
    np.testing.assert_allclose(mean["mean"], expected, rtol=1e-5)


def test_a_model_that_runs_eagerly_changes_no_array_that_it_was_given():
    loss_fn, params = hetjax.nnx_loss(Normed(nnx.Rngs(0)), loss)
    state = jax.tree.map(np.array, loss_fn.model_state)
    _, after = loss_fn.apply(params, state, DATA, jax.random.key(0))
    np.testing.assert_array_equal(state["norm"]["mean"], 0)
    assert np.abs(after["norm"]["mean"]).min() > 0.1


def test_what_does_not_fit_a_model_with_state_is_refused():
    model = Normed(nnx.Rngs(0))
    _, params = hetjax.nnx_loss(model, loss)
    with pytest.raises(ValueError, match=r"nnx_model: model_state do not fit"):
        hetjax.nnx_model(model, params, {"norm": {"mean": np.zeros(4)}})
    plain = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="nnx_loss: the function takes a mask"):
        hetjax.nnx_loss(plain, lambda model, batch, more: more)
