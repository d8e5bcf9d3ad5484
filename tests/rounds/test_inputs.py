"""First mistakes with `fit`: what is refused, in which words, before anything is computed."""

import dataclasses
import types
from typing import Any

import flax.linen
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from hetjax.config import experiment
from hetjax.inputs import arguments

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = {"x": X, "y": X.sum(-1)}
PARAMS = np.zeros(3, np.float32)
MODEL = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
MODULE = flax.linen.Dense(1)
VARIABLES = MODULE.init(jax.random.key(0), X[:1])


def loss_fn(params, batch, rng):
    return (batch["x"] @ params - batch["y"]) ** 2


def loss_of_model(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def fit(loss=loss_fn, params=PARAMS, optimizer=None, data=DATA, **fields):
    fields = {"epochs": 1, "budget": 2, "microbatch_size": 4, "workers": 1, **fields}
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return hetjax.fit(loss, params, optimizer, data, progress=False, **fields)


class Tensor:
    """Of PyTorch: NumPy cannot read one that wants gradients."""

    dtype, requires_grad = "torch.float32", True

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return Tensor(self.values[index])

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def equinox_module():
    """A module that has a function among its leaves, as an MLP of Equinox has."""
    base = type("Module", (), {"__module__": "equinox._module"})

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class MLP(base):
        weight: Any
        activation: Any

    return MLP(PARAMS, jax.nn.relu)


def train_state():
    return nnx.Optimizer(MODEL, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # The loss.
        (
            {"loss": loss_of_model},
            ("loss_of_model(model, batch)", "hetjax.nnx_loss(model, loss)", "hetjax.linen_loss("),
        ),
        ({"loss": lambda params, batch, *, rng: 0}, ("does not take three arguments",)),
        ({"loss": MODEL}, ("loss_fn is a Linear", "hetjax.nnx_loss(model, loss)")),
        ({"loss": 3}, ("loss_fn is 3; it must be loss_fn(params, examples, rng)",)),
        # The parameters.
        ({"params": MODEL}, ("params is a Linear", "hetjax.nnx_loss(model, loss)")),
        ({"params": Tensor([0.0])}, ("params is a Tensor;", "tensor.detach().numpy()")),
        (
            {"params": {"net": equinox_module()}},
            ("params['net'].activation is a ", "params, static = eqx.partition(model"),
        ),
        # The optimiser.
        ({"optimizer": optax.lbfgs()}, ("needs grad and value_fn", "L-BFGS")),
        ({"optimizer": optax.chain(optax.clip(1.0), optax.lbfgs())}, ("needs grad and value_fn",)),
        ({"optimizer": train_state()}, ("optimizer is an Optimizer; it must", "give its tx")),
        ({"optimizer": 0.1}, ("optimizer is 0.1;", "optax.sgd(0.1)")),
        ({"optimizer": "adam"}, ("optimizer is 'adam';", "optax.adam(1e-3)")),
        ({"optimizer": "lbfgs"}, ("optimizer is 'lbfgs';", "L-BFGS and line searches try")),
        ({"optimizer": optax.adam}, ("optimizer is the function adam;", "call it")),
        # Fields.
        ({"learning_rate": 0.3}, ("there is no field", "optax.adam(0.3)")),
        ({"lr": 0.3}, ("there is no field 'lr'", "optax.adam(0.3)")),
        ({"batch_size": 128}, ("microbatch_size * budget", "microbatch_size=8, budget=16")),
        ({"batch_size": 100}, ("For 100 examples give microbatch_size=5, budget=20",)),
        ({"batch_size": 7}, ("For 7 examples give microbatch_size=7, budget=1",)),
    ],
)
def test_a_first_mistake_says_what_to_write_instead(given, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        fit(**given)
    message = str(refused.value)
    for word in words:
        assert word in message
    assert len(message) < 700
    error = refused.value
    assert error.__cause__ is None  # no chain of traces
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize("make", [hetjax.linen_loss, hetjax.linen_metrics])
def test_bare_parameters_are_no_variables(make):
    with pytest.raises(ValueError, match="variables has no 'params'"):
        make(MODULE, VARIABLES["params"], loss_of_model)


def test_all_variables_are_no_parameters():
    loss, params = hetjax.linen_loss(MODULE, VARIABLES, loss_of_model)
    with pytest.raises(ValueError, match="linen_loss: params do not fit the model"):
        fit(loss, VARIABLES)
    assert set(fit(loss, params).params) == {"bias", "kernel"}
    whole = fit(lambda variables, batch, rng: loss(variables["params"], batch, rng), VARIABLES)
    assert set(whole.params) == {"params"}  # a loss of one's own may want them all


def test_a_round_as_one_function_wants_the_same_loss():
    mesh = hetjax.make_worker_mesh(1)
    with pytest.raises(ValueError, match="make_train_step: loss_fn is loss_of_model") as raised:
        hetjax.make_train_step(loss_of_model, optax.sgd(0.1), mesh, nominal_examples=8)
    assert "hetjax.nnx_loss(model, loss)" in str(raised.value)


def on_devices(num_workers, platform, monkeypatch, *, is_asked_for=False, **fields):
    """The local form where JAX has one device of this platform, and eight CPU devices are made."""
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    config = experiment.validate({"cluster": {"num_workers": num_workers}, **fields})
    config = arguments.on_devices(config, is_asked_for=is_asked_for)
    assert experiment.validate(experiment.to_dict(config)) == config  # as it is read again
    return config.local


def test_more_workers_than_devices_are_played_and_a_line_says_so(monkeypatch, capsys):
    assert on_devices(4, "gpu", monkeypatch) == "virtual"
    said = capsys.readouterr().err
    assert "4 workers on 1 gpu device(s): local='virtual'" in said
    assert "JAX_PLATFORMS=cpu" in said
    assert on_devices(4, "gpu", monkeypatch, dispatch_depth=2) == "virtual"
    capsys.readouterr()
    assert on_devices(4, "gpu", monkeypatch, local="fused") == "fused"  # is refused later
    assert on_devices(1, "cpu", monkeypatch) == "stepped"
    assert on_devices(4, "gpu", monkeypatch, is_asked_for=True) == "stepped"  # the same
    assert not capsys.readouterr().err


def test_cpu_devices_that_an_accelerator_leaves_out_are_told(monkeypatch, capsys):
    assert on_devices(1, "gpu", monkeypatch) == "stepped"
    said = capsys.readouterr().err
    assert "JAX computes on gpu, so there are 1 worker(s), and the 8 CPU devices are left" in said
    assert "cluster={'num_workers': 8}" in said


IDLE, ALONE = (
    "worker(s) on 8 CPU devices: the others are idle",
    "'hetjax.topology.methods:d_psgd' has no neighbour",
)


@pytest.mark.parametrize(
    ("fields", "idle", "alone"),
    [
        ({"local": "stepped"}, 1, 1),
        ({"local": "virtual"}, 0, 1),
        ({"workers": 8, "budget": 8}, 0, 0),
    ],
)
def test_what_is_idle_and_who_gossips_alone_are_told(fields, idle, alone, capsys):
    fit(reducer="d_psgd", **fields)
    said = capsys.readouterr().err
    assert (said.count(IDLE), said.count(ALONE)) == (idle, alone)


def test_a_round_as_one_function_says_too_that_it_gossips_alone(capsys):
    for num_workers, times in ((1, 1), (2, 0)):
        mesh = hetjax.make_worker_mesh(num_workers)
        made = {"nominal_examples": 8, "reducer": "d_psgd"}
        hetjax.make_train_step(lambda p, b, rng: b["x"] @ p["w"], optax.sgd(0.1), mesh, **made)
        assert capsys.readouterr().err.count(ALONE) == times
