"""The user's own estimator and data set: as they stand in `tests/own_parts`."""

import numpy as np
import optax

import hetjax
from hetjax import bilevel
from tests.bilevel import problems as bilevel_problems
from tests.bilevel.rounds import problems as rounds_problems
from tests.own_parts import estimator, source

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
    problem, x, y, sources = rounds_problems.ridge()
    given = (problem, x, y, estimator.one_product(20, RATE), optax.sgd(0.5))
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
