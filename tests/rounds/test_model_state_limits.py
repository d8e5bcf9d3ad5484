"""Models with state: what fills a last microbatch up, and what is refused."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds.stateful_problem import (
    FIELDS,
    SIZE,
    SUM,
    begun,
    distance,
    examples,
    fit,
    loss_without_mask,
    of_round,
    run,
    weights,
)

# --- Padding ---


@pytest.mark.parametrize(("form", "feed"), [("stepped", "resident"), ("virtual", "streamed")])
def test_a_microbatch_that_is_filled_up_has_the_statistics_of_all_in_it(form, feed, float64):
    data = examples()
    fields = {"model_state": begun(), "local": form, "data": {"feed": feed}, "epochs": 1}
    with run(loss_without_mask, **fields, **SUM) as made:
        state = made.init()
        while not made.done(state):
            state, (params, model_state), found, done = of_round(made, state)
        (row,) = [row for row in done.example_ids if (row < 0).any()]
        others = -2 - row[row < -1]
        assert len(row[row >= 0]) == 4
        assert len(set(others.tolist()) | set(row[row >= 0].tolist())) == SIZE
        changes, counts, grads = [], [], []
        for ids in done.example_ids:
            rows = np.where(ids < 0, -2 - ids, ids)
            batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], data)
            counted = ids >= 0

            def total(params, batch=batch, counted=counted):
                losses, after = loss_without_mask(params, model_state, batch, None)
                return (losses * counted).sum(), after

            grad, after = jax.grad(total, has_aux=True)(params)
            grads.append(grad)
            counts.append(counted.sum())
            changes.append(after["mean"] - model_state["mean"])
        mean = model_state["mean"] + np.average(changes, axis=0, weights=counts)
        assert distance(mean, found[1]["mean"]) < 1e-12
        assert distance(params - 0.01 * sum(grads) / sum(counts), found[0]) < 1e-12


def test_the_ledger_tells_what_was_dropped_from_what_is_missing(float64):
    result = fit(loss_without_mask, data={"last": "drop"})
    summary = result.summary
    assert summary["examples_processed"] == 3 * 96
    assert summary["examples_dropped"] == 3 * 4
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["epochs"] == 3


# --- What is refused ---


def returns_none(params, state, batch, rng):
    return loss_without_mask(params, state, batch, rng)[0]


def other_shape(params, state, batch, rng):
    losses, after = loss_without_mask(params, state, batch, rng)
    return losses, {**after, "mean": after["mean"][None]}


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (returns_none, r"returned .*with model_state: .*\(losses, new_state\)"),
        (other_shape, r"mean was float64\[4\] and is float64\[1, 4\]"),
        (lambda params, batch, rng: 0, r"with model_state loss_fn is .*params, state"),
    ],
)
def test_a_loss_that_does_not_keep_the_state_is_refused(loss_fn, message, float64):
    with pytest.raises(ValueError, match=message):
        fit(loss_fn)


def test_a_loss_with_a_state_and_none_given_is_refused():
    def loss_fn(params, batch, rng):
        return loss_without_mask(params, begun(), batch, rng)

    with pytest.raises(ValueError, match=r"model_state="):
        hetjax.fit(loss_fn, weights(), optax.sgd(0.01), examples(), progress=False, **FIELDS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {**SUM, "model_state": begun() | {"calls": np.array(True)}},
            r"calls has dtype bool, of .* sum",
        ),
        ({"model_state": begun() | {"mean": jax.random.key(0)}}, r"mean has .*jax.random.key_data"),
        ({"state_reduce": {"cals": "sum"}}, r"state_reduce: 'cals' .*Did you mean 'calls'\?"),
        ({**SUM, "reducer": "d_psgd"}, r"state_reduce: got 'sum'"),
        ({**SUM, "data": {"last": "pad"}}, r"data.last: got 'pad'"),
        ({**SUM, "ordering": "d_grab"}, r"'d_grab' needs each example's gradient"),
        (
            {**SUM, "eval_source": examples(), "metrics_fn": lambda params, batch: {}},
            r"metrics_fn is .*\(params, state, examples\)",
        ),
    ],
)
def test_what_cannot_be_done_with_a_state_is_refused(given, message, float64):
    with pytest.raises(ValueError, match=message):
        fit(loss_without_mask, **{"state_reduce": None, **given})
