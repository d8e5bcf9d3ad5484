"""Which sets a run is evaluated on, when, and which evaluation is the best."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.records import evaluations as evaluations_lib
from tests.rounds import problems

DATA = problems.classification(64, np.float32)
OTHER = problems.classification(24, np.float32)


def metrics(weights, batch):
    losses = problems.softmax_loss(weights, batch, None)
    right = (batch["x"] @ weights).argmax(-1) == batch["y"]
    return {"loss": losses, "accuracy": right.astype(jnp.float32)}


def accuracy_alone(weights, batch):
    return {"accuracy": metrics(weights, batch)["accuracy"]}


def fit(**fields):
    given = {"eval_source": DATA, "metrics_fn": metrics, "epochs": 3, **fields}
    return problems.fit(DATA, problems.initial_weights(np.float32), **given)


def evaluations(result):
    return [line["eval"] for line in result.history if "eval" in line]


@pytest.mark.parametrize(("mode", "best"), [("max", max), ("min", min)])
def test_the_best_parameters_are_those_of_the_metric_that_is_named(mode, best):
    result = fit(best_by="accuracy", best_mode=mode, eval_every_rounds=1)
    expected = best(values["test_accuracy"] for values in evaluations(result))
    assert result.summary["best_test_accuracy"] == pytest.approx(expected)
    found = np.asarray(metrics(result.best_params, DATA)["accuracy"]).mean()
    assert found == pytest.approx(expected, abs=1e-6)


def test_without_a_loss_it_is_said_that_the_last_parameters_are_taken(capsys):
    result = fit(metrics_fn=accuracy_alone)
    assert "have no loss, so best_params will be the last ones" in capsys.readouterr().err
    np.testing.assert_array_equal(result.best_params, result.params)
    fit(metrics_fn=accuracy_alone, best_by="accuracy", best_mode="max")
    assert "best_params" not in capsys.readouterr().err


NONE = {"eval_source": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_by": "f1"}, r"best_by: got 'f1'.*test_accuracy, test_loss"),
        ({**NONE, "best_by": "loss", "metrics_fn": None}, "got 'loss', and nothing is evaluated"),
        ({"eval_sources": {"val": OTHER}}, "give eval_source= or eval_sources=, not both"),
        ({**NONE, "eval_sources": [OTHER]}, "eval_sources must be a dict"),
        (NONE, "metrics_fn is given, and no eval_source="),
    ],
)
def test_sets_that_are_none_and_a_metric_that_is_not_there_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        fit(**fields)


def test_every_so_many_rounds_and_after_each_epoch():
    result = fit(eval_every_rounds=3)
    rounds = [line["round"] for line in result.history if "eval" in line]
    last = len(result.history) // 3 - 1  # of each epoch
    epochs = [last + epoch * (last + 1) for epoch in range(3)]
    assert rounds == sorted({*epochs, *range(2, len(result.history), 3)})


def test_several_sets_have_a_name_each():
    sets = {"eval_source": None, "eval_sources": {"val": OTHER, "train": DATA}}
    result = fit(**sets)
    last = evaluations(result)[-1]
    assert set(last) == {"val_loss", "val_accuracy", "train_loss", "train_accuracy"}
    for name, data in (("val", OTHER), ("train", DATA)):
        expected = np.asarray(metrics(result.params, data)["loss"]).mean()
        assert last[f"{name}_loss"] == pytest.approx(expected, rel=1e-5)
    best = min(values["val_loss"] for values in evaluations(result))
    assert result.summary["best_val_loss"] == pytest.approx(best)
    by_name = fit(**sets, best_by="train_accuracy", best_mode="max")
    best = max(values["train_accuracy"] for values in evaluations(by_name))
    assert by_name.summary["best_train_accuracy"] == pytest.approx(best)


def test_a_run_that_ends_between_two_epochs_is_evaluated_there():
    result = fit(max_rounds=1)
    expected = np.asarray(metrics(result.params, DATA)["loss"]).mean()
    assert result.summary["test_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("answer", ["yes", 0])
def test_an_answer_that_means_nothing_is_passed_over_and_said_once(answer, capsys):
    def write(line):
        return answer

    result = fit(callbacks=[write])
    assert len(result.history) == len(fit().history)
    said = capsys.readouterr().err
    assert said.count("callback write returned") == 1
    assert "only True or hetjax.STOP ends the run" in said


def test_a_comparison_ends_the_run():
    def enough(line):
        return jnp.array(True) if line.round == 1 else line.loss < np.float32(-1)

    result = fit(callbacks=[enough])
    assert result.summary["stopped_by"] == "callback enough"
    assert len(result.history) == 3


def roots(weights, batch):
    """Not finite once the weights have moved."""
    moved = jnp.abs(weights - problems.initial_weights(np.float32)).max()
    losses = problems.softmax_loss(weights, batch, None)
    return {"loss": losses, "root": jnp.sqrt(0.02 - moved) + 0 * losses}


@pytest.mark.parametrize("sets", [{}, {"eval_source": None, "eval_sources": {"val": OTHER}}])
def test_an_evaluation_that_becomes_nan_is_told_and_never_the_best(sets, tmp_path, capsys):
    name = "val_root" if sets else "test_root"
    fields = {"metrics_fn": roots, "best_by": "root", "best_mode": "max", "eval_every_rounds": 1}
    result = fit(optimizer=optax.sgd(0.02), workdir=tmp_path, **fields, **sets)
    values = [line[name] for line in evaluations(result)]
    known = [value for value in values if value is not None]
    assert known
    assert values[-1] is None
    assert result.summary["best_" + name] == pytest.approx(max(known))
    assert result.summary[name] is None
    shown, title = " ".join(repr(result).split()), name.replace("_", " ")
    assert f"{title} not finite ({max(known):.4f} at the best)" in shown
    said = capsys.readouterr().err
    assert said.count("is null in summary.json") == 1
    assert f"hetjax: evaluated after {len(known) + 1} rounds: {name} nan" in said
    assert json.loads((tmp_path / "summary.json").read_text())[name] is None
    bad = f"{len(values) - len(known)} of {len(values)} evaluations"
    assert f"{title} was not finite at {bad}" in (tmp_path / "report.html").read_text()


def test_a_replica_whose_loss_is_nan_is_the_worst():
    found = [{"test_loss": loss} for loss in (1.0, np.nan, 2.0)]
    assert np.isnan(evaluations_lib.worst({"test": ["loss"]}, found)["worst_test_loss"])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, ""),
        ({"eval_source": {"x": np.full(8, 2.0, np.float32)}}, "the set 'test'"),
        ({"eval_source": {"x": np.ones(4, np.float32)}}, "the set 'test', metrics of 'test', by J"),
        ({"metrics_fn": lambda p, b: {"loss": 3 + 0 * p * b["x"]}}, "metrics of 'test', by JAX"),
        ({"metrics_fn": lambda p, b: {"loss": hetjax.OfMeans(np.exp, b["x"])}}, "metrics of 'test"),
        ({"best_mode": "max"}, "best_by"),
    ],
)
def test_the_best_begins_anew_where_it_is_judged_by_something_else(other, told, tmp_path, capfd):
    data, start = {"x": np.ones(8, np.float32)}, np.zeros((), np.float32)
    fields = {"workers": 2, "local": "virtual", "microbatch_size": 2, "budget": 4, "epochs": 4}
    fields |= {"workdir": tmp_path, "progress": False, "eval_source": data}
    fields["metrics_fn"] = lambda params, batch: {"loss": batch["x"] + params}  # grows

    def loss_fn(params, batch, rng):
        return (params - batch["x"]) ** 2

    first = hetjax.fit(loss_fn, start, optax.sgd(0.1), data, max_rounds=2, **fields)
    assert first.summary["best_test_loss"] == pytest.approx(1.2)
    result = hetjax.fit(loss_fn, start, optax.sgd(0.1), data, **{**fields, **other})
    said = capfd.readouterr().err
    assert ("the best begins anew" in said) == bool(told)
    assert f"({told}" in said or not told
    after = [line["eval"]["test_loss"] for line in result.history[2 if told else 0 :]]
    best = (max if other.get("best_mode") else min)(after)
    assert result.summary["best_test_loss"] == pytest.approx(best)
