"""What bad input gets: a sentence that says what to do, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import bilevel
from hetjax.bilevel import Learned, PerExample
from tests.bilevel.rounds import problems, test_fitting


def fit(**fields):
    own = {"steps": 1, "cluster": {"num_workers": 2}, "loss_over": "auto"}
    return test_fitting.fit(**{**own, **fields})


def whole_loss(x, y, batch):
    return jnp.mean(problems.upper(x, y, batch)[0])


def with_metrics(x, y, batch):
    losses, weights = problems.upper(x, y, batch)
    return hetjax.Losses(losses, weights, metrics={"square": losses**2})


def without_y(x, y, batch):
    return batch["targets"] + jnp.sum(x["ridge"])


def residual(x, y, batch):
    return (batch["inputs"] @ y["slope"] - batch["targets"]) ** 2


def upper_is(loss):
    return {"problem": bilevel.Bilevel(loss, problems.lower)}


ROWS = {"weight": PerExample(np.ones(7)), "ridge": np.ones(1)}
NO_LEVEL = {"weight": PerExample(np.ones(42), "middle"), "ridge": np.ones(1)}
INPUTS = {"inputs": np.ones((4, 3))}
DYNAMIC = bilevel.value_gap(problems.LOWER, 2, multiplier=bilevel.dynamic(0.5))
REVERSE = problems.KINDS["reverse"]()
SIGNS = bilevel.unroll(bilevel.descent(optax.sign_sgd(0.1)), 2)
ALONE = {"upper": {"budget": 1}, "data": {"sharing": "private"}}
PROCESS_LOCAL = {"data": {"sharing": "process_local"}}
OTHERS = {  # rows of other examples than those of the evaluation
    "x": {"weight": PerExample(np.ones(problems.NUM_UPPER), "upper")},
    "problem": bilevel.Bilevel(lambda x, *given: x["weight"] * residual(x, *given), residual),
    "eval_source": problems.sources()[0],
}
UPPER, LEVELS = "upper level: ", "a level takes 'shared' or 'private'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"problem": whole_loss}, "fit_bilevel: problem is a function"),
        (upper_is(whole_loss), rf"{UPPER}loss_fn returned losses float32\[\]"),
        (upper_is(without_y), "fit_bilevel: the upper loss does not depend on y"),
        (upper_is(with_metrics), f"{UPPER}the loss returns metrics"),
        ({"upper_source": INPUTS | {"weights": np.ones(4)}}, f"{UPPER}loss_fn asks for 'targets'"),
        ({"lower_source": INPUTS | {"targets": np.ones(5)}}, "lower source: arrays of a sou"),
        ({"x": ROWS}, r"x\['weight'\] is PerExample of 'lower' with rows"),
        ({"x": NO_LEVEL}, "is PerExample of 'middle'"),
        ({"x": Learned(*problems.start())}, "x is Learned, and"),
        (OTHERS, "fit_bilevel: x has PerExample leaves of the upper level"),
        ({"estimator": problems.FORWARD()}, "fit_bilevel: mode='forward' has"),
        ({"estimator": DYNAMIC}, "x has PerExample leaves, and a dynamic"),
        ({"estimator": SIGNS}, "fit_bilevel: the lower step has the derivative 0"),
        ({"estimator": REVERSE, "reducer": "d_psgd"}, "reducer: this estimator cannot gossip"),
        ({"gate": "first"}, "fit_bilevel: gate: none closes"),
        (ALONE, f"{UPPER}budget: got 1, must be at least 2"),
        ({"upper": PROCESS_LOCAL}, f"{UPPER}data.sharing: got 'process_local'; {LEVELS}"),
        ({"lower": {"epochs": 3}}, "fit_bilevel: lower: got 'epochs'"),
        ({"epochs": 3}, "fit_bilevel: epochs: "),
        ({"nonfinite": "skip"}, "fit_bilevel: nonfinite: "),
        ({"microbatch_size": 0}, "microbatch_size: got 0"),
        ({"outer_steps": 0}, "fit_bilevel: outer_steps: got 0"),
    ],
)
def test_it_is_said_before_anything_is_computed(fields, message):
    with pytest.raises(ValueError, match=message):
        fit(**fields)


def test_a_loss_that_is_not_finite_names_request_and_examples(tmp_path):
    _, of_lower = problems.sources()
    of_lower["targets"][17] = np.inf
    message = "gradient in y on a new batch of the lower"
    with pytest.raises(hetjax.NonFiniteError, match=message) as e:
        fit(lower_source=of_lower, workdir=tmp_path)
    assert "17" in str(e.value)
    assert e.value.result.summary["outer_steps"] == 0


@pytest.mark.parametrize(("level", "sign"), [("upper", 0), ("lower", -1)])
def test_weights_that_add_up_to_nothing_end_the_run_with_their_sum(level, sign):
    data = dict(zip(("upper", "lower"), problems.sources(), strict=True))[level]
    data["weights"] = sign * data["weights"]
    with pytest.raises(hetjax.NonFiniteError, match=rf"of the {level} level: the weights"):
        fit(**{f"{level}_source": data})


def test_learned_starts_have_rows_too():
    x, y = problems.start()
    estimator = problems.KINDS["worst"]()
    result = fit(x=Learned(x, y), estimator=estimator, eval_source=problems.sources()[0])
    assert result.x.x["weight"].shape == (problems.NUM_LOWER,)
    assert np.isfinite(result.summary["test_loss"])


def test_optimisers_are_given_the_loss_and_the_steps():
    progress = []

    def told(step):
        jax.debug.callback(lambda step: progress.append(float(step)), step)
        return 0.1

    tx = optax.chain(optax.polyak_sgd(), hetjax.scale_by_progress(told))
    result = fit(tx=tx, steps=3)
    jax.effects_barrier()
    assert set(progress) == {0.0, 1.0, 2.0}
    assert np.isfinite(result.x["ridge"]).all()


def test_steps_that_cross_a_barrier_are_told(capsys):
    barrier = bilevel.barrier(1e-4, 0.002)
    estimator = bilevel.value_gap(bilevel.descent(optax.sgd(0.2)), 6, multiplier=barrier)
    result = fit(estimator=estimator, steps=2)
    crossed = sum(line["crossed"] for line in result.history)
    assert result.summary["steps_crossed"] == crossed > 0
    assert f"{crossed:.0f} steps of y crossed the barrier" in capsys.readouterr().err
