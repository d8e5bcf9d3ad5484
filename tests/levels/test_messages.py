"""What bad input gets: a sentence that says what to do, before anything is computed."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import bilevel
from hetjax.bilevel import Learned, PerExample
from tests.levels import problems


def fit(
    *,
    problem=None,
    x=None,
    y=None,
    estimator=None,
    tx=None,
    upper=None,
    lower=None,
    fields_upper=None,
    fields_lower=None,
    **fields,
):
    of_upper, of_lower = problems.sources()
    start_x, start_y = problems.start()
    options = {"microbatch_size": 2, "workers": 2, "local": "virtual", "progress": False, **fields}
    return hetjax.fit_bilevel(
        problem or problems.PROBLEM,
        start_x if x is None else x,
        start_y if y is None else y,
        estimator or problems.KINDS["value_gap"](),
        tx or optax.sgd(0.1),
        upper_source=of_upper if upper is None else upper,
        lower_source=of_lower if lower is None else lower,
        upper=fields_upper,
        lower=fields_lower,
        **{"outer_steps": 1, **options},
    )


def whole_loss(x, y, batch):
    return jnp.mean(problems.upper(x, y, batch)[0])


def without_y(x, y, batch):
    return batch["targets"] + jnp.sum(x["ridge"])


ROWS = {"weight": PerExample(np.ones(7)), "ridge": np.ones(1)}
OTHER_LEVEL = {"weight": PerExample(np.ones(42), "middle"), "ridge": np.ones(1)}
WRONG = {
    "not a problem": ({"problem": whole_loss}, "give hetjax.bilevel.Bilevel"),
    "not an estimator": ({"estimator": bilevel.hypergradient}, "estimator is a function"),
    "a mean": (
        {"problem": bilevel.Bilevel(whole_loss, problems.lower)},
        "upper level: .*Return the loss of each example instead of their mean",
    ),
    "a missing field": (
        {"upper": {"inputs": np.ones((4, 3)), "weights": np.ones(4)}},
        "upper level: loss_fn asks for 'targets', .*an example has",
    ),
    "unequal lengths": (
        {"lower": {"inputs": np.ones((4, 3)), "targets": np.ones(5)}},
        "lower source: the arrays of a source must have equal lengths",
    ),
    "rows of another number": ({"x": ROWS}, r"x\['weight'\] .* rows \[7\], .* 42 examples"),
    "rows of no level": ({"x": OTHER_LEVEL}, "PerExample of the level 'middle'"),
    "whole numbers": ({"y": {"slope": np.ones(3, int), "shift": np.ones(())}}, "y.*int"),
    "rows forward": ({"estimator": problems.FORWARD()}, "forward mode carries a tangent for each"),
    "upper without y": (
        {"problem": bilevel.Bilevel(without_y, problems.lower)},
        "the upper loss does not depend on y",
    ),
    "unroll gossips": (
        {"estimator": problems.KINDS["reverse"](), "reducer": "d_psgd"},
        "cannot gossip: the way back goes through",
    ),
    "implicit gossips": (
        {"estimator": problems.KINDS["cg"](), "reducer": {"name": "matcha", "graph": "ring"}},
        "cannot gossip: its linear system",
    ),
    "a barrier gossips": (
        {
            "estimator": bilevel.value_gap(problems.LOWER, 2, multiplier=bilevel.barrier(1, 1)),
            "reducer": "d_psgd",
        },
        "cannot gossip: a barrier",
    ),
    "rows with inner products": (
        {"estimator": bilevel.value_gap(problems.LOWER, 2, multiplier=bilevel.dynamic(0.5))},
        "inner products of gradients in x",
    ),
    "a gate that never closes": ({"gate": "first"}, "a gate closes no round that ends a pass"),
    "no units": ({"lower": None, "outer_steps": 1, "budget": 0}, "budget"),
    "caps below the batch": (
        {"quota": {"max_microbatches": 2}, "budget": 8},
        r"lower level: .*max_microbatches",
    ),
    "an order with signs": ({"ordering": "d_grab"}, "lower level: .*order"),
    "a reducer of one level": (
        {"fields_upper": {"reducer": "d_psgd"}},
        r"upper=\{…\} has 'reducer'; a level may have of its own budget",
    ),
    "epochs of one level": ({"fields_lower": {"epochs": 3}}, r"lower=\{…\} has 'epochs'"),
    "keys": ({"per_example_rng": True}, "per_example_rng: the losses"),
    "no size": ({"microbatch_size": 0}, "microbatch_size: got 0"),
    "a seed that is none": ({"seed": "a"}, "seed: got 'a'"),
    "no steps": ({"outer_steps": 0}, "outer_steps is 0"),
    "epochs": ({"epochs": 3}, "epochs: these fields are of `fit`"),
    "a number as optimizer": ({"tx": 0.1}, "optax.sgd"),
    "a trace that is not there": ({"replay": "nowhere"}, "there is no file"),
    "two sets": ({"eval_source": {}, "eval_sources": {}}, "fit_bilevel: give eval_source"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_said_before_anything_is_computed(name):
    fields, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        fit(**fields)


def test_a_loss_that_is_not_finite_names_request_and_examples(tmp_path):
    _, of_lower = problems.sources()
    of_lower["targets"][17] = np.inf
    with pytest.raises(
        hetjax.NonFiniteError, match=r"gradient in y on a new batch of the lower"
    ) as e:
        fit(lower=of_lower, workdir=tmp_path)
    assert "17" in str(e.value)
    assert e.value.result.summary["outer_steps"] == 0


def test_learned_starts_have_rows_too():
    x, y = problems.start()
    result = fit(x=Learned(x, y), estimator=problems.KINDS["worst"]())
    assert result.x.x["weight"].shape == (problems.NUM_LOWER,)
