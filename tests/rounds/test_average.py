"""An average of the parameters and of the model's state over the rounds: `ema`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems
from tests.rounds.stateful_problem import (
    FIELDS,
    SUM,
    begun,
    distance,
    examples,
    fit,
    loss_with_mask,
    of_means,
    run,
    weights,
)

EMA = 0.9
GOSSIP = {"name": "d_psgd", "graph": "ring"}


def recursion(average, now):
    """In NumPy; whole numbers are as they are now."""

    def one(old, new):
        return EMA * old + (1 - EMA) * new if new.dtype.kind == "f" else new

    return jax.tree.map(one, average, now)


def metrics_fn(params, state, batch):
    del state
    return {"loss": jnp.abs(batch["x"] @ params).sum(-1)}


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def gossiping(**fields):
    """By `fit`, of a state without the counter."""
    fields = {"model_state": begun("mean", "var"), "state_reduce": None, **fields}
    return fit(of_means(loss_with_mask), reducer=GOSSIP, **fields)


def test_a_callback_is_shown_the_optimizers_state(float64):
    shown = []
    optimizer = optax.chain(optax.add_noise(1e-3, 0.5, key=0), optax.sgd(0.01, momentum=0.9))
    loss_fn = hetjax.StatefulLoss(of_means(loss_with_mask), begun("mean", "var"))
    fields = {**FIELDS, "reducer": GOSSIP, "epochs": 1, "progress": False}
    fields["callbacks"] = [lambda report: shown.append(report.state.opt_state())]
    result = hetjax.fit(loss_fn, weights(), optimizer, examples(), **fields)
    noise, (trace, _) = shown[-1]
    assert noise.count == len(shown) == 3
    last = result.state.opt_state[1][0].trace
    np.testing.assert_allclose(trace.trace, np.asarray(last).mean(0), atol=1e-15)
    assert np.abs(trace.trace).max() > 0.1


class Shown:
    """A callback that keeps what it is shown of each round."""

    def __init__(self):
        self.models, self.averages, self.counts = [], [], []

    def __call__(self, report):
        self.models.append(as_numpy((report.params(), report.state.model_state())))
        self.averages.append(as_numpy((report.state.ema_params(), report.state.ema_model_state())))
        self.counts.append([int(leaf) for leaf in jax.tree.leaves(report.state.opt_state())])


def test_the_average_is_the_recursion_over_the_rounds(float64, tmp_path):
    shown = Shown()
    fields = {"eval_source": examples(), "metrics_fn": metrics_fn, "workdir": tmp_path}
    result = fit(ema=EMA, callbacks=[shown], **fields)
    average = weights(), begun()
    for now, found in zip(shown.models, shown.averages, strict=True):
        average = recursion(average, now)
        assert distance(average, found) < 1e-12
    assert distance(average, shown.models[-1]) > 1e-3
    last = result.ema_params, result.ema_model_state
    assert distance(average, last) < 1e-12
    assert result.ema_model_state["calls"] == result.model_state["calls"] == 51
    loaded = hetjax.load(tmp_path)
    assert distance((loaded.ema_params, loaded.ema_model_state), last) == 0
    assert distance((loaded.params, loaded.model_state), shown.models[-1]) == 0
    expected = hetjax.evaluate(*average[:1], examples(), metrics_fn, model_state=average[1])
    assert result.summary["test_ema_loss"] == pytest.approx(expected["loss"], rel=1e-8)
    assert result.summary["test_ema_loss"] != result.summary["test_loss"]
    assert "test_ema_loss" in (tmp_path / "report.html").read_text()


def test_the_best_parameters_are_those_that_the_metric_is_of(float64):
    shown = Shown()
    fields = {"eval_source": examples(), "metrics_fn": metrics_fn, "best_mode": "max"}
    result = fit(ema=EMA, best_by="ema_loss", callbacks=[shown], **fields)
    evaluated = [line["round"] for line in result.history if "eval" in line]
    found = result.best_params, result.best_model_state
    assert min(distance(shown.averages[at], found) for at in evaluated) == 0


def test_gossip_averages_what_the_result_is(float64):
    """The mean of the workers' averages, which is the average of their mean."""
    average = weights(), begun("mean", "var")
    fields = {"model_state": average[1], "reducer": GOSSIP, "ema": EMA, "epochs": 2}
    with run(of_means(loss_with_mask), **fields) as made:
        state = made.init()
        while not made.done(state):
            state, _ = made.round(state)
            now = as_numpy((made.params(state)[0], made.model_state(state)))
            average = recursion(average, now)
            assert distance(average, made.average(state)) < 1e-12
        replicas = state.train.average.params
        assert distance(replicas[0], replicas[2]) > 1e-6


def test_a_run_that_was_cut_goes_on_to_the_bit(tmp_path, float64):
    whole = gossiping(ema=EMA)
    gossiping(ema=EMA, workdir=tmp_path, max_rounds=4)
    gone_on, loaded = gossiping(ema=EMA, workdir=tmp_path), hetjax.load(tmp_path)
    assert len(gone_on.summary["resumed"]) == 1
    for each in (gone_on, loaded):
        for name in ("params", "model_state", "ema_params", "ema_model_state"):
            assert distance(getattr(whole, name), getattr(each, name)) == 0


def test_a_checkpoint_without_an_average_is_gone_on_from(tmp_path, float64):
    """As of an older version; and one with an average where none is asked for."""
    fields = {"model_state": begun(), **SUM}
    fit(workdir=tmp_path / "without", max_rounds=4)
    with run(ema=EMA, **fields) as made:
        state, average = made.restore(tmp_path / "without"), made.average
        before = as_numpy((made.params(state)[0], made.model_state(state)))
        assert distance(before, average(state)) == 0
        state, _ = made.round(state)
        now = as_numpy((made.params(state)[0], made.model_state(state)))
        assert distance(recursion(before, now), average(state)) < 1e-12
    fit(workdir=tmp_path / "with", max_rounds=4, ema=EMA)
    with run(**fields) as made:
        assert made.restore(tmp_path / "with").train.average == ()


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"ema": EMA}, "ema=0.9 begins at the parameters in the checkpoint of round 4"),
        ({"ema": EMA}, {}, "is left out: this run has no ema"),
        ({"ema": 0.5}, {"ema": EMA}, "ema=0.9 from here on; the average in the checkpoint of"),
        ({}, {"ema": EMA, "best_by": "ema_loss"}, "the best begins anew: in the checkpoint of"),
    ],
)
def test_a_workdir_is_gone_on_in_with_an_average_or_without(
    before, now, said, tmp_path, capfd, float64
):
    judged = {"eval_source": examples(), "metrics_fn": metrics_fn, "workdir": tmp_path}
    fit(max_rounds=4, **judged, **before)
    result = fit(**judged, **now)
    assert said in capfd.readouterr().err
    assert result.summary["resumed"][0]["round"] == 4
    assert distance(result.params, fit().params) == 0
    assert (result.ema_params is None) == (not now)


def test_another_run_goes_on_from_an_average_or_begins_one(float64):
    first, plain = fit(ema=EMA, epochs=1), fit(epochs=1)
    assert plain.ema_params is None
    for before, average in ((first, first.ema_params), (plain, plain.params)):
        after = fit(ema=EMA, epochs=1, max_rounds=1, init_state=before.state)
        expected = recursion(as_numpy(average), as_numpy(after.params))
        assert distance(expected, after.ema_params) < 1e-12


def test_a_narrow_parameter_has_an_average_in_float32():
    """In bfloat16 an average of decay 0.999 would never move."""

    def loss_fn(params, batch, rng):
        return (params - batch["y"].astype(params.dtype)) ** 2

    data = {"y": np.full(64, 2.0, np.float32)}
    fields = {"epochs": 300, "microbatch_size": 8, "cluster": {"num_workers": 1}, "ema": 0.999}
    fields |= {"loss_fn": loss_fn, "optimizer": optax.sgd(0.5)}
    result = problems.fit(data, jnp.ones((), jnp.bfloat16), **fields)
    assert result.state.average.params.dtype == np.float32
    assert float(result.state.average.params[0]) == pytest.approx(2 - 0.999**300, abs=1e-4)
    assert result.ema_params.dtype == jnp.bfloat16


def test_what_cannot_be_averaged_is_refused_and_it_is_said_how_to_get_one():
    with pytest.raises(ValueError, match=r"ema: got 1\.0"):
        fit(ema=1.0)
    with pytest.raises(ValueError, match="keeps no average; give ema="):
        fit(max_rounds=2, callbacks=[lambda report: report.state.ema_params()])
    with pytest.raises(ValueError, match=r"Run: ema=0\.9 with optimizer=None"):
        hetjax.Run(lambda *_: None, weights(), None, examples(), ema=EMA)
