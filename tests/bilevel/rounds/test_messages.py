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


def with_metrics(x, y, batch):
    losses, weights = problems.upper(x, y, batch)
    return hetjax.Losses(losses, weights, metrics={"square": losses**2})


def plainly(x, y, batch):
    return (batch["inputs"] @ y["slope"] + y["shift"] - batch["targets"]) ** 2 + jnp.sum(
        x["ridge"] ** 2
    ) * jnp.sum(y["slope"] ** 2)


def weighted(x, y, batch):
    return x["weight"] * plainly(x, y, batch)


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
    "a shard without a part": (
        {"fields_upper": {"budget": 1}, "data": {"sharing": "private"}},
        "upper level: budget: got 1 microbatches a round with data.sharing='private', but 2",
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
    "skip": ({"nonfinite": "skip"}, "would each be without other microbatches"),
    "debugging": ({"debug": True}, "Debug one level alone"),
    "a number of a level": ({"fields_upper": 5}, "upper is 5; give a dict of the fields"),
    "a random key": (
        {"tx": optax.noisy_sgd(0.1, key=jax.random.key(0))},
        "the state of this optimizer has a random key",
    ),
    "a tuple as source": (
        {"upper": (np.ones((4, 3)), np.ones(4))},
        r"upper level: the loss failed with TypeError: .*examples of \(.*float64\[1, 3\]",
    ),
    "another width": (
        {"upper": {"inputs": np.ones((4, 2)), "targets": np.ones(4), "weights": np.ones(4)}},
        r"upper level: the loss failed with TypeError: .*'inputs': 'float64\[1, 2\]'",
    ),
    "text as y": ({"y": "abc"}, "fit_bilevel: y is of type str"),
    "rows of y": ({"y": {"slope": PerExample(np.ones(3))}}, "y has PerExample leaves"),
    "rows that are a list": (
        {"x": {"weight": PerExample([0.0] * 42), "ridge": np.ones(1)}},
        r"x\['weight'\] is PerExample of a list; give an array",
    ),
    "a start that nobody learns": (
        {"x": Learned(*problems.start())},
        "this estimator learns no start; take unroll",
    ),
    "steps by the sign alone": (
        {"estimator": bilevel.unroll(bilevel.descent(optax.sign_sgd(0.1)), 2)},
        "fit_bilevel: the lower step cannot be differentiated",
    ),
    "metrics": (
        {"problem": bilevel.Bilevel(with_metrics, problems.lower)},
        "upper level: the loss returns hetjax.Losses with metrics.*give metrics_fn=",
    ),
    "rows of other examples": (
        {
            "x": {"weight": PerExample(np.ones(problems.NUM_UPPER), "upper"), "ridge": np.ones(1)},
            "problem": bilevel.Bilevel(weighted, plainly),
            "eval_source": problems.sources()[0],
        },
        "an eval_source is evaluated by the upper loss.*Give metrics_fn",
    ),
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


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_weights_that_add_up_to_nothing_end_the_run_with_their_sum(level):
    of_level = dict(zip(("upper", "lower"), problems.sources(), strict=True))
    of_level[level]["weights"] = -of_level[level]["weights"]
    with pytest.raises(hetjax.NonFiniteError, match=rf"of the {level} level: .* add up to -\d"):
        fit(**of_level)


def test_learned_starts_have_rows_too():
    x, y = problems.start()
    result = fit(
        x=Learned(x, y),
        estimator=problems.KINDS["worst"](),
        eval_source=problems.sources()[0],
    )
    assert result.x.x["weight"].shape == (problems.NUM_LOWER,)
    assert np.isfinite(result.summary["test_loss"])


def test_a_batch_without_weight_has_no_mean():
    of_upper, _ = problems.sources()
    nothing = {**of_upper, "weights": np.zeros(problems.NUM_UPPER)}
    with pytest.raises(hetjax.NonFiniteError, match="of the upper level: the weights of all"):
        fit(upper=nothing)


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


def test_the_workdir_of_a_run_that_is_not_bilevel_is_another_ones(tmp_path):
    _, of_lower = problems.sources()

    def loss(params, examples, rng):
        return (examples["inputs"] @ params - examples["targets"]) ** 2

    hetjax.fit(
        loss,
        np.zeros(3),
        optax.sgd(0.01),
        of_lower,
        max_rounds=1,
        workers=1,
        workdir=tmp_path,
        progress=False,
    )
    with pytest.raises(ValueError, match="belongs to another"):
        fit(workdir=tmp_path)
