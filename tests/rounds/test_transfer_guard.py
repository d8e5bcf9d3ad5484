"""A script that forbids implicit transfers trains as any other: those of hetjax are meant."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from tests.bilevel.rounds import problems

X = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
DATA = {"x": X, "y": X.sum(-1)}
QUICK = {"microbatch_size": 6, "budget": 4, "workers": 2}


def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def metrics(model, batch):
    return {"loss": loss(model, batch)}


@pytest.fixture(name="made")
def _made():
    """What a script makes before it forbids transfers."""
    rngs = nnx.Rngs(0)
    layers = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
    return nnx.Sequential(*layers), problems.given("value_gap")


@pytest.fixture(name="guard")
def _guard(made):
    jax.config.update("jax_transfer_guard", "disallow")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
        jax.jit(jax.numpy.sin)(X)
    yield made
    jax.config.update("jax_transfer_guard", None)


@pytest.mark.parametrize(
    ("local", "reducer"),
    [("stepped", "all_reduce"), ("fused", "d_psgd"), ("virtual", "all_reduce")],
)
def test_a_run_is_made_saved_gone_on_with_and_evaluated(local, reducer, guard, tmp_path):
    model = guard[0]
    loss_fn, params = hetjax.nnx_loss(model, loss)
    metrics_fn = hetjax.nnx_metrics(model, metrics)
    fields = {"local": local, "reducer": reducer, "ema": 0.9, **QUICK}
    told = {"eval_source": DATA, "metrics_fn": metrics_fn, "workdir": tmp_path, "progress": False}
    for epochs in (1, 2):
        given = loss_fn, params, optax.sgd(0.05, momentum=0.9), DATA
        result = hetjax.fit(*given, epochs=epochs, **told, **fields)
    loaded = hetjax.load(tmp_path)
    trained = hetjax.nnx_model(model, loaded.params, loaded.model_state)
    assert isinstance(trained, nnx.Sequential)
    found = hetjax.evaluate(result.params, DATA, metrics_fn, model_state=result.model_state)
    assert found["loss"] == pytest.approx(result.summary["test_loss"], rel=1e-5)
    with hetjax.Run(*given, epochs=3, **fields) as run:
        state = run.restore(tmp_path) if reducer == "all_reduce" else run.init()
        state, report = run.round(state)
        assert np.isfinite(report.read().loss)
        jax.tree.map(np.isfinite, (run.params(state), run.model_state(state), run.average(state)))


def test_a_bilevel_problem_is_solved(guard):
    problem, x, y, estimator = guard[1]
    given = problem, x, y, estimator, optax.sgd(0.2)
    assert len(problems.in_rounds(*given, 2)[3]) > 1
    of_upper, of_lower = problems.sources()
    sets = {"upper_source": of_upper, "lower_source": of_lower, "loss_over": "microbatch"}
    fields = {"microbatch_size": 2, "workers": 4, "progress": False}
    result = hetjax.fit_bilevel(*given, outer_steps=2, **sets, **fields)
    assert result.summary["outer_steps"] == 2
