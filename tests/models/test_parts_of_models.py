"""Training a part of a model: `wrt` of the adapters, and freezing by the optimiser."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
DATA = {"x": X, "y": X.sum(-1)}
QUICK = {"epochs": 3, "microbatch_size": 4, "budget": 8, "workers": 2, "progress": False}


def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def metrics(model, batch):
    return {"loss": loss(model, batch)}


class Adapted(nnx.Module):
    """A layer that is fixed, with a LoRA beside it, and a dropout."""

    def __init__(self, rngs):
        base = nnx.Linear(4, 8, rngs=rngs)
        self.hidden = nnx.LoRA(4, 2, 8, base_module=base, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.drop(self.hidden(x))))


def pure(model, wrt=nnx.Param):
    return nnx.to_pure_dict(nnx.state(model, wrt))


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))])
def test_only_what_the_filter_chooses_is_trained(wrt):
    model = Adapted(nnx.Rngs(0))
    _, params = hetjax.nnx_loss(model, loss, wrt=wrt)
    jax.tree.map(np.testing.assert_array_equal, params, pure(model, wrt))
    moved = jax.tree.map(lambda leaf: leaf + 1, params)
    trained = hetjax.nnx_model(model, moved, wrt=wrt)
    rest = nnx.All(nnx.Param, nnx.Not(wrt))
    jax.tree.map(np.testing.assert_array_equal, pure(trained, rest), pure(model, rest))
    jax.tree.map(np.testing.assert_array_equal, pure(trained, wrt), moved)
    trained.eval()
    found = hetjax.nnx_metrics(model, metrics, wrt=wrt)(moved, DATA)["loss"]
    np.testing.assert_allclose(found, loss(trained, DATA), rtol=1e-5)


def test_parameters_of_another_filter_are_refused_by_name():
    model = Adapted(nnx.Rngs(0))
    loss_fn, params = hetjax.nnx_loss(model, loss, wrt=nnx.LoRAParam)
    with pytest.raises(ValueError, match=r"nnx_model: params do not fit .*bias is missing"):
        hetjax.nnx_model(model, params)
    with pytest.raises(
        ValueError, match=r"nnx_loss: params do not fit .*out\.bias is \(1,\), must be left out"
    ):
        jax.eval_shape(loss_fn, pure(model), DATA, jax.random.key(0))
    with pytest.raises(ValueError, match=r"nnx_loss: wrt=.*BatchStat.* chooses no"):
        hetjax.nnx_loss(model, loss, wrt=nnx.BatchStat)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.variable("constants", "scale", lambda: jnp.full((), 2.0))
        hidden = nn.Dense(8, name="base")(x) + nn.Dense(8, name="lora")(x) * scale.value
        return nn.Dense(1, name="out")(nn.relu(hidden))


def is_lora(path, array):
    assert array.ndim in (1, 2)
    return "lora" in path


def test_only_what_the_function_chooses_of_a_linen_module_is_trained():
    module = Linen()
    variables = module.init(jax.random.key(0), X[:1])
    _, params = hetjax.linen_loss(module, variables, loss, wrt=is_lora)
    assert params.keys() == {"lora"}
    moved = jax.tree.map(lambda leaf: leaf + 1, params)
    trained = hetjax.linen_variables(variables, moved, wrt=is_lora)
    assert trained["constants"] == variables["constants"]
    for name in ("base", "out"):
        parts = trained["params"][name], variables["params"][name]
        jax.tree.map(np.testing.assert_array_equal, *parts)
    found = hetjax.linen_metrics(module, variables, metrics, wrt=is_lora)(moved, DATA)["loss"]
    np.testing.assert_allclose(found, loss(lambda x: module.apply(trained, x), DATA), rtol=1e-5)
    with pytest.raises(ValueError, match=r"linen_variables: params do not fit.*base\.bias is miss"):
        hetjax.linen_variables(variables, moved)
    with pytest.raises(ValueError, match=r"chooses none of the parameters base\.bias, base\.kern"):
        hetjax.linen_loss(module, variables, loss, wrt=lambda path, _: "head" in path)


# --- First mistakes ---


def test_a_module_that_is_none_is_refused():
    model, module = Adapted(nnx.Rngs(0)), Linen()
    variables = module.init(jax.random.key(0), X[:1])
    for function, message in (
        (lambda: hetjax.nnx_loss(loss, model), "nnx_loss: got the function loss"),
        (lambda: hetjax.nnx_metrics(module, metrics), "nnx_metrics: got a Linen"),
        (lambda: hetjax.linen_loss(model, {}, loss), "linen_loss: got an Adapted"),
        (lambda: hetjax.linen_loss(Linen, variables, loss), "linen_loss: got the class Linen"),
    ):
        with pytest.raises(ValueError, match=message):
            function()


def test_parameters_of_another_model_are_refused():
    model, module = Adapted(nnx.Rngs(0)), Linen()
    loss_fn, _ = hetjax.nnx_loss(model, loss)
    _, others = hetjax.nnx_loss(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), loss)
    with pytest.raises(ValueError, match=r"nnx_loss: params do not fit.*hidden.* is missing"):
        hetjax.fit(loss_fn, others, optax.sgd(0.1), DATA, **QUICK)
    variables = module.init(jax.random.key(0), X[:1])
    loss_fn, params = hetjax.linen_loss(module, variables, loss)
    params = {**params, "out": {"kernel": np.zeros((9, 1)), "bias": params["out"]["bias"]}}
    with pytest.raises(ValueError, match=r"out\.kernel is \(9, 1\), must be \(8, 1\)"):
        jax.eval_shape(loss_fn, params, DATA, jax.random.key(0))


def test_a_mean_is_refused_with_a_key_for_each_example():
    loss_fn, params = hetjax.nnx_loss(Adapted(nnx.Rngs(0)), lambda *given: loss(*given).mean())
    with pytest.raises(ValueError, match=r"the loss returned float32\[\] for 1 example"):
        hetjax.fit(loss_fn, params, optax.sgd(0.1), DATA, per_example_rng=True, **QUICK)


def test_what_is_called_like_a_linen_module_will_do():
    class Wrapped:
        def __init__(self, module):
            self.apply = module.apply

    module = Linen()
    variables = module.init(jax.random.key(0), X[:1])
    (one, params), (other, _) = (
        hetjax.linen_loss(m, variables, loss) for m in (module, Wrapped(module))
    )
    key = jax.random.key(0)
    np.testing.assert_array_equal(one(params, DATA, key), other(params, DATA, key))
