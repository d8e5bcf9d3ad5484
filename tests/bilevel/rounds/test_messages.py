"""What bad input gets: a sentence that says what to do, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import bilevel
from hetjax.bilevel import Learned, PerExample
from tests.bilevel.rounds import problems


def fit(*, problem=None, x=None, y=None, estimator=None, tx=None, **fields):
    of_upper, of_lower = problems.sources()
    start_x, start_y = problems.start()
    options = {"microbatch_size": 2, "workers": 2, "local": "virtual", "progress": False}
    options |= {"upper_source": of_upper, "lower_source": of_lower, "outer_steps": 1}
    return hetjax.fit_bilevel(
        problem or problems.PROBLEM,
        start_x if x is None else x,
        start_y if y is None else y,
        estimator or problems.KINDS["value_gap"](),
        tx or optax.sgd(0.1),
        **{**options, **fields},
    )


def whole_loss(x, y, batch):
    return jnp.mean(problems.upper(x, y, batch)[0])


def with_metrics(x, y, batch):
    losses, weights = problems.upper(x, y, batch)
    return hetjax.Losses(losses, weights, metrics={"square": losses**2})


def without_y(x, y, batch):
    return batch["targets"] + jnp.sum(x["ridge"])


def residual(x, y, batch):
    return (batch["inputs"] @ y["slope"] - batch["targets"]) ** 2


UPPER_ROWS = {"weight": PerExample(np.ones(problems.NUM_UPPER), "upper")}
ROWS = {"weight": PerExample(np.ones(7)), "ridge": np.ones(1)}
OTHER_LEVEL = {"weight": PerExample(np.ones(42), "middle"), "ridge": np.ones(1)}
WRONG = {
    "not a problem": ({"problem": whole_loss}, "fit_bilevel: problem is a function"),
    "a mean": (
        {"problem": bilevel.Bilevel(whole_loss, problems.lower)},
        r"upper level: loss_fn returned losses float32\[\]",
    ),
    "a missing field": (
        {"upper_source": {"inputs": np.ones((4, 3)), "weights": np.ones(4)}},
        "upper level: loss_fn asks for 'targets'",
    ),
    "unequal lengths": (
        {"lower_source": {"inputs": np.ones((4, 3)), "targets": np.ones(5)}},
        "lower source: the arrays of a source must have equal lengths",
    ),
    "rows of another number": ({"x": ROWS}, r"x\['weight'\] is PerExample of 'lower' with rows"),
    "rows of no level": ({"x": OTHER_LEVEL}, "is PerExample of 'middle'"),
    "rows forward": ({"estimator": problems.FORWARD()}, "fit_bilevel: mode='forward' has"),
    "rows with inner products": (
        {"estimator": bilevel.value_gap(problems.LOWER, 2, multiplier=bilevel.dynamic(0.5))},
        "x has PerExample leaves, and a dynamic",
    ),
    "upper without y": (
        {"problem": bilevel.Bilevel(without_y, problems.lower)},
        "fit_bilevel: the upper loss does not depend on y",
    ),
    "unroll gossips": (
        {"estimator": problems.KINDS["reverse"](), "reducer": "d_psgd"},
        "fit_bilevel: reducer: this estimator cannot gossip",
    ),
    "a gate that never closes": ({"gate": "first"}, "fit_bilevel: gate: none closes"),
    "a shard without a part": (
        {"upper": {"budget": 1}, "data": {"sharing": "private"}},
        "upper level: budget: got 1, must be at least 2",
    ),
    "parts of processes": (
        {"upper": {"data": {"sharing": "process_local"}}},
        "upper level: data.sharing: got 'process_local'; a level takes 'shared' or 'private'",
    ),
    "a field of no level": ({"lower": {"epochs": 3}}, "fit_bilevel: lower: got 'epochs'"),
    "a field of fit": ({"epochs": 3}, "fit_bilevel: epochs: "),
    "skip": ({"nonfinite": "skip"}, "fit_bilevel: nonfinite: "),
    "no size": ({"microbatch_size": 0}, "microbatch_size: got 0"),
    "no steps": ({"outer_steps": 0}, "fit_bilevel: outer_steps: got 0"),
    "a start that nobody learns": ({"x": Learned(*problems.start())}, "x is Learned, and"),
    "steps by the sign alone": (
        {"estimator": bilevel.unroll(bilevel.descent(optax.sign_sgd(0.1)), 2)},
        "fit_bilevel: the lower step has the derivative 0",
    ),
    "metrics": (
        {"problem": bilevel.Bilevel(with_metrics, problems.lower)},
        "upper level: the loss returns metrics",
    ),
    "rows of other examples": (
        {
            "x": UPPER_ROWS,
            "problem": bilevel.Bilevel(
                lambda x, *given: x["weight"] * residual(x, *given), residual
            ),
            "eval_source": problems.sources()[0],
        },
        "fit_bilevel: x has PerExample leaves of the upper level",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_said_before_anything_is_computed(name):
    fields, message = WRONG[name]
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
    result = fit(
        x=Learned(x, y),
        estimator=problems.KINDS["worst"](),
        eval_source=problems.sources()[0],
    )
    assert result.x.x["weight"].shape == (problems.NUM_LOWER,)
    assert np.isfinite(result.summary["test_loss"])


def test_optimisers_are_given_the_loss_and_the_steps():
    progress = []

    def told(step):
        jax.debug.callback(lambda step: progress.append(float(step)), step)
        return 0.1

    tx = optax.chain(optax.polyak_sgd(), hetjax.scale_by_progress(told))
    result = fit(tx=tx, outer_steps=3)
    jax.effects_barrier()
    assert set(progress) == {0.0, 1.0, 2.0}
    assert np.isfinite(result.x["ridge"]).all()


def test_steps_that_cross_a_barrier_are_told(capsys):
    estimator = bilevel.value_gap(
        bilevel.descent(optax.sgd(0.2)), 6, multiplier=bilevel.barrier(1e-4, 0.002)
    )
    result = fit(estimator=estimator, outer_steps=2)
    crossed = sum(line["crossed"] for line in result.history)
    assert result.summary["steps_crossed"] == crossed > 0
    assert f"{crossed:.0f} steps of y crossed the barrier" in capsys.readouterr().err
