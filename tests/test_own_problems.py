"""The user's own estimator, local rule and data set: as they stand in `tests/own_parts`."""

import jax
import numpy as np
import optax

import hetjax
from hetjax import bilevel
from tests.bilevel import problems as bilevel_problems
from tests.own_parts import estimator, hessian_product, local_sgd, source
from tests.rounds import problems

RATE = 0.1


def test_own_estimator_is_the_scaled_solver(float64):
    case = bilevel_problems.quadratic()
    problem, x, y = case.problem, case.x, case.y
    batches = bilevel.Batches(lower=bilevel.Stack(np.zeros((6, y.size))))
    own = bilevel.hypergradient(problem, estimator.one_product(5, RATE), x, y, batches)
    theirs = bilevel.implicit(bilevel.descent(optax.sgd(RATE)), 5, solve=bilevel.scaled(RATE))
    expected = bilevel.hypergradient(problem, theirs, x, y, batches)
    np.testing.assert_allclose(own.grad_x, expected.grad_x, rtol=1e-12)
    np.testing.assert_allclose(own.state.y, expected.state.y, rtol=1e-12)
    assert own.info.cost == expected.info.cost


def test_own_estimator_solves_a_problem_in_rounds():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(96, 3)).astype(np.float32)
    targets = inputs @ np.ones(3, np.float32) + rng.normal(size=96).astype(np.float32)
    data = {"inputs": inputs, "targets": targets}

    def upper(x, y, batch):
        return (batch["inputs"] @ y - batch["targets"]) ** 2

    def lower(x, y, batch):
        return upper(x, y, batch) + jax.numpy.exp(x) * jax.numpy.sum(y**2)

    x, y = np.float32(1.0), np.zeros(3, np.float32)
    given = (bilevel.Bilevel(upper, lower), x, y, estimator.one_product(20, RATE), optax.sgd(0.5))
    sources = {
        f"{level}_source": {name: value[part] for name, value in data.items()}
        for level, part in (("upper", slice(32, None)), ("lower", slice(32)))
    }
    result = hetjax.fit_bilevel(*given, **sources, outer_steps=20, workers=3, progress=False)
    losses = [line["upper_loss"] for line in result.history]
    assert losses[-1] < losses[0]
    assert float(result.x) < 1.0  # less ridge than at the beginning


def test_own_data_set_reads_its_windows_and_moves_on_each_epoch(tmp_path):
    series = np.arange(100, dtype=np.float32)
    np.save(tmp_path / "series.npy", series)
    windows = source.Windows(tmp_path / "series.npy", past=4, future=2)
    assert len(windows) == 95
    np.testing.assert_array_equal(windows[3]["x"], [3, 4, 5, 6])
    np.testing.assert_array_equal(windows[94]["y"], [98, 99])
    np.testing.assert_array_equal(windows.of_epoch(1)[94]["x"], windows[0]["x"])

    def loss_fn(params, batch, rng):
        return ((batch["x"] @ params - batch["y"]) ** 2).sum(-1) * 1e-4

    given = {"epochs": 3, "microbatch_size": 8, "budget": 4, "workers": 2, "progress": False}
    result = hetjax.fit(loss_fn, np.zeros((4, 2), np.float32), optax.sgd(0.05), windows, **given)
    summary = result.summary
    assert summary["examples_processed"] == 3 * 95
    assert (summary["examples_missing"], summary["examples_duplicated"]) == (0, 0)
    assert summary["train_loss"] < result.history[0]["loss"] / 5


def test_own_local_rule_trains():
    data, weights = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    rule = local_sgd.local_sgd(problems.softmax_loss, optax.sgd(0.1))
    given = {"epochs": 4, "optimizer": optax.sgd(1.0), "rule": rule}
    result = problems.fit(data, weights, cluster={"num_workers": 2}, local="virtual", **given)
    assert result.summary["train_loss"] < result.history[0]["loss"]


def test_own_rule_of_a_round_without_update_is_the_hessian_product(float64):
    data, weights = problems.classification(64), problems.initial_weights()
    vector = np.random.default_rng(1).normal(size=weights.shape)
    rules = {"hessian": hessian_product.hessian_product(problems.softmax_loss)}
    given = {"microbatch_size": 8, "budget": 8, "local": "virtual", "cluster": {"num_workers": 2}}
    with hetjax.Run(
        problems.softmax_loss, weights, optax.sgd(0.1), data, rules=rules, **given
    ) as run:
        _, report = run.round(run.init(), kind="hessian", given=vector)

    def mean_loss(params):
        return problems.softmax_loss(params, data, jax.random.key(0)).mean()

    expected = jax.jvp(jax.grad(mean_loss), (jax.numpy.asarray(weights),), (vector,))[1]
    np.testing.assert_allclose(report.mean[0], expected, rtol=1e-9)
