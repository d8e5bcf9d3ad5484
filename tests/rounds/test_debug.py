"""`debug=True`, and `jax.disable_jit()`: functions see numbers, and results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hetjax
from tests.rounds import problems

FEW = {"epochs": 1, "budget": 4, "max_rounds": 2, "cluster": {"num_workers": 2}, "quota": "equal"}


class Seen:
    """A function that looks at the numbers that it is given, and counts its calls."""

    def __init__(self, function):
        self.function, self.calls, self.on = function, 0, False

    def __call__(self, params, *rest):
        found = self.function(params, *rest)
        if self.on:
            self.calls += 1
            for leaf in jax.tree.leaves(rest):
                assert not isinstance(leaf, jax.core.Tracer)
            for leaf in jax.tree.leaves((params, found)):  # of a gradient, or a number
                assert bool(jnp.isfinite(leaf).all())
        return found


def both(loss_fn, num_examples=30, *, metrics_fn=None, **fields):
    """Results of a run as always, and of one in debugging, in which the functions look."""
    results, fields = [], {**FEW, "metrics_fn": metrics_fn, **fields}
    for debug in (False, True):
        loss_fn.on = debug
        if metrics_fn is not None:
            metrics_fn.on = debug
        given = {"loss_fn": lambda *given: loss_fn(*given), "debug": debug, **fields}
        results.append(problems.train(num_examples, **given))
    return results


def check_equal(*results):
    plain, debugged = results
    assert plain.summary["examples_processed"] == debugged.summary["examples_processed"]
    for one, other in zip(*(jax.tree.leaves(r.params) for r in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    for name, value in plain.summary.items():
        if name.startswith(("train_", "test_")) and name.endswith(("loss", "accuracy")):
            np.testing.assert_allclose(debugged.summary[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_the_loss_sees_numbers_and_the_run_is_the_same(local, float64, capsys):
    loss_fn = Seen(problems.varying_softmax_loss)
    check_equal(*both(loss_fn, local=local))
    assert loss_fn.calls == 2 + 8  # looked at, and for its weights; the microbatches: no others
    assert capsys.readouterr().err.count("hetjax: debug: ") == 1


def test_evaluations_see_numbers(float64):
    def metrics(weights, batch):
        return {"loss": problems.softmax_loss(weights, batch, None)}

    metrics_fn, data = Seen(metrics), problems.classification(30)
    loss_fn = Seen(problems.measured_softmax_loss)
    of_eval = {"eval_source": data, "metrics_fn": metrics_fn, "local": "virtual"}
    check_equal(*both(loss_fn, **of_eval))
    assert metrics_fn.calls > 2


@pytest.mark.slow
@pytest.mark.parametrize("order", ["d_grab", "grab"])
def test_orders_find_the_same_signs_with_numbers(order, float64):
    loss_fn = Seen(problems.softmax_loss)
    fields = {"ordering": order, "epochs": 3, "max_rounds": 3, "budget": 2, "local": "virtual"}
    check_equal(*both(loss_fn, 8, **fields))
    assert loss_fn.calls >= 10


def test_a_loss_with_state_and_a_mask_sees_numbers(float64):
    def of_mask(weights, state, batch, rng, mask):
        mask = mask.astype(batch["x"].dtype)
        mean = (batch["x"] * mask[:, None]).sum(0) / mask.sum()
        losses = problems.softmax_loss(weights, {**batch, "x": batch["x"] - mean[None]}, rng)
        return losses, {"mean": 0.9 * state["mean"] + 0.1 * mean, "calls": state["calls"] + 1}

    loss_fn, results = Seen(of_mask), []
    fields = {**FEW, "state_reduce": {"calls": "sum"}, "local": "virtual"}
    fields["model_state"] = {"mean": np.ones(problems.FEATURES), "calls": np.zeros((), int)}
    for loss_fn.on in (False, True):
        given = lambda w, s, batch, rng, mask: loss_fn(w, s, batch, rng, mask)  # noqa: E731
        results.append(problems.train(30, loss_fn=given, debug=loss_fn.on, **fields))
    check_equal(*results)
    one, other = (result.model_state for result in results)
    np.testing.assert_allclose(other["mean"], one["mean"], rtol=0, atol=1e-12)
    assert int(other["calls"]) == int(one["calls"]) == 8


def test_disable_jit_is_debugging(float64, capsys):
    loss_fn = Seen(problems.softmax_loss)
    fields = {**FEW, "loss_fn": lambda *given: loss_fn(*given), "reducer": "d_psgd"}
    results = [problems.train(30, **fields)]
    loss_fn.on = True
    with jax.disable_jit():
        results.append(problems.train(30, **fields))
    check_equal(*results)
    assert loss_fn.calls == 1 + 8
    assert "hetjax: debug: " in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_give_each_example_numbers(float64):
    def one(weights, example, rng):
        assert bool(example["x"].sum() > -jnp.inf)
        of_one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], example)
        return problems.softmax_loss(weights, of_one, rng)[0] * jax.random.uniform(rng)

    def of_model(model, batch):
        found = model(batch["x"])
        assert bool(jnp.isfinite(found).all())
        return found.sum(-1) ** 2

    data, weights = problems.given(12)
    fields = {**FEW, "per_example_rng": True, "local": "virtual", "max_rounds": 1, "budget": 1}
    fields["debug"] = True
    result = problems.fit(data, weights, loss_fn=hetjax.per_example(one), **fields)
    assert np.isfinite(result.params).all()
    model = nnx.Sequential(nnx.Linear(5, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    loss_fn, params = hetjax.nnx_loss(model, of_model)
    problems.fit({"x": data["x"].astype(np.float32)}, params, loss_fn=loss_fn, **fields)
