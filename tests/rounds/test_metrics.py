"""Metrics of the loss function: weighted means over rounds and epochs, exact in every form."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import ordering, types
from hetjax.local import gradients
from hetjax.ordering import matrix_free, orders, pairs
from tests import oracles
from tests.own_parts import local_sgd, signed_order
from tests.rounds import problems

FORMS = ("stepped", "fused", "virtual")
LOSS = problems.measured_softmax_loss
STEP = 0.2
SPEEDS = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}


def numpy_means(weights, data, ids):
    """The loss and the metrics of `LOSS` over some examples, and the gradient."""
    total = np.zeros(3)  # of weight * (loss, is right), and of is right
    weight_sum, gradient = 0.0, np.zeros_like(weights)
    for i in ids:
        logits = data["x"][i] @ weights
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        weight = max(data["x"][i, 0], 0.0) ** 2
        is_right = float(logits.argmax() == data["y"][i])
        total += weight * -np.log(chances[data["y"][i]]), weight * is_right, is_right
        weight_sum += weight
        chances[data["y"][i]] -= 1
        gradient += weight * np.outer(data["x"][i], chances)
    loss, accuracy = total[:2] / weight_sum
    means = {"accuracy": accuracy, "again": loss, "each": total[2] / len(ids)}
    return means, gradient / weight_sum, weight_sum


def trace(path, rounds):
    path.write_text(
        "\n".join(json.dumps({"quotas": q, "microbatches_done": q}) for q in rounds) + "\n"
    )
    return str(path)


@pytest.mark.parametrize("local", FORMS)
def test_metrics_of_rounds_and_epochs_are_those_of_plain_numpy(local, tmp_path, float64):
    """With padding, and quotas 0 and nearly all; the parameters are those before the round."""
    data, expected = problems.given(203)
    rounds = [[7, 1, 0, 12], [0, 12, 7, 1], [5, 0, 6, 0]] * 2  # 51 microbatches, twice
    lines, of_epoch = [], []
    fields = {"replay": trace(tmp_path / "trace.jsonl", rounds), "callbacks": [lines.append]}
    fields |= {"loss_fn": LOSS, "optimizer": optax.sgd(STEP), "epochs": 2, "budget": 20}
    result = problems.train(203, local=local, **fields)
    sizes = [80, 80, 43] * 2
    for line, ids in zip(lines, oracles.shuffled_rounds(203, sizes, 0), strict=True):
        means, gradient, weight = numpy_means(expected, data, ids)
        for name, value in means.items():
            np.testing.assert_allclose(line.metrics[name], value, rtol=1e-12, err_msg=name)
        expected = expected - STEP * gradient
        of_epoch.append((means, weight, len(ids)))
    np.testing.assert_allclose(result.params, expected, rtol=1e-11)
    last = of_epoch[3:]
    for name, key in (("accuracy", 1), ("again", 1), ("each", 2)):
        amounts = [each[key] for each in last]
        mean = np.average([each[0][name] for each in last], weights=amounts)
        assert result.summary[f"train_{name}"] == pytest.approx(mean, rel=1e-8)
    assert result.summary["train_again"] == result.summary["train_loss"]


# A local form knows an order by whether the workers' signs are coordinated, as of `d_grab`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "local"),
    [
        *[("d_grab", "stepped"), ("d_grab", "virtual"), ("d_grab_exact", "fused")],
        *[("pair_balance", "fused"), ("pair_balance_exact", "stepped"), ("grab", "virtual")],
    ],
)
def test_every_order_carries_the_metrics(method, local, float64):
    """With parameters that stay, an epoch's mean is that of all the data, in any order."""
    data, weights = problems.given(203)
    gossips = method in ("pair_balance", "grab")
    fields = {"ordering": method, "reducer": "d_psgd" if gossips else "all_reduce"}
    fields |= {"loss_fn": LOSS, "optimizer": optax.sgd(0.0), "epochs": 2, "cluster": SPEEDS}
    result = problems.fit(data, weights, local=local, **fields)
    for name, value in numpy_means(weights, data, range(203))[0].items():
        assert result.summary[f"train_{name}"] == pytest.approx(value, rel=1e-8)


# A gate decides who does how much, whatever is made of that then: each pair is there.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "sharing", "gate"),
    [
        ("all_reduce", "private", "first"),
        ("ring", "private", "quorum"),
        ("d_psgd", "shared", "first"),
        ("matcha", "shared", "quorum"),
    ],
)
def test_a_metric_that_is_the_loss_is_the_loss_of_every_round(reducer, sharing, gate, float64):
    lines, gate = [], {"trigger": gate, **({"quorum": 5} if gate == "quorum" else {})}
    fields = {"reducer": reducer, "data": {"sharing": sharing}, "gate": gate, "cluster": SPEEDS}
    fields |= {"loss_fn": LOSS, "epochs": 2, "local": "virtual", "callbacks": [lines.append]}
    problems.train(61, **fields)
    assert len(lines) > 3
    for line in lines:
        np.testing.assert_allclose(line.metrics["again"], line.loss, rtol=1e-13)


def test_metrics_change_no_update(float64):
    fields = {"epochs": 2, "cluster": SPEEDS, "ordering": "d_grab"}
    losses = problems.weighted_softmax_loss, LOSS
    plain, measured = (problems.train(61, loss_fn=each, **fields) for each in losses)
    np.testing.assert_allclose(plain.params, measured.params, rtol=1e-13)
    assert "metrics" not in plain.history[0]


def test_metrics_stand_in_all_records(tmp_path, capsys):
    (data, weights), seen = problems.given(61), []
    fields = {"loss_fn": LOSS, "epochs": 2, "eval_source": data, "workdir": tmp_path}
    fields |= {"progress": True, "callbacks": [lambda line: seen.append(line.metrics)]}
    result = problems.fit(data, weights, **fields)
    names = ["accuracy", "again", "each"]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(line["metrics"]) for line in written] == [names] * len(seen)
    for line, metrics in zip(written, seen, strict=True):
        assert line["metrics"] == pytest.approx(metrics, rel=1e-8)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {f"train_{name}" for name in names} <= summary.keys()
    assert {f"test_{name}" for name in names} <= summary.keys()  # of the loss by default
    expected = numpy_means(np.float64(result.params), data, range(61))[0]
    assert summary["test_accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)
    assert "accuracy 0." in capsys.readouterr().err
    report = (tmp_path / "report.html").read_text()
    assert "<h2>Metrics" in report
    assert ">again<" in report


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_metrics_of_the_whole_epoch(tmp_path, float64):
    fields = {"loss_fn": LOSS, "epochs": 1, "cluster": SPEEDS, "quota": "equal"}
    whole = problems.train(203, **fields)
    fields |= {"workdir": tmp_path, "checkpoint": {"every_rounds": 1}}
    problems.train(203, callbacks=[lambda line: line.round == 2], **fields)
    result = problems.train(203, **fields)
    for name in ("accuracy", "again", "each", "loss"):
        assert result.summary[f"train_{name}"] == whole.summary[f"train_{name}"]


def test_a_step_of_ones_own_returns_the_sums(float64):
    data, weights = problems.given()
    counts = np.array([3, 0, 2, 1], np.int32)
    ids = np.random.default_rng(3).permutation(64)[:48].reshape(4, 3, 4)
    given = problems.own_step(ids, data, weights, optax.sgd(0.0), loss_fn=LOSS)
    _, metrics, _ = jax.jit(given[0])(*given[1:], counts, jax.random.key(0))
    done = np.concatenate([ids[w, : counts[w]].reshape(-1) for w in range(4)])
    expected, _, _ = numpy_means(weights, data, done)
    for name, (total, weight) in metrics.metric_sums.items():
        np.testing.assert_allclose(total / weight, expected[name], rtol=1e-12)


def test_a_microbatch_that_is_left_out_leaves_the_metrics():
    data, weights = problems.given()
    data["x"][17] = np.nan

    def loss_fn(params, batch, rng):
        losses = problems.softmax_loss(params, batch, rng)
        metrics = {"one": jnp.ones_like(losses), "nan": losses * jnp.nan}
        return hetjax.Losses(losses, metrics=metrics)

    result = problems.fit(data, weights, loss_fn=loss_fn, epochs=1, nonfinite="skip")
    assert result.summary["train_one"] == 1.0
    assert result.summary["train_nan"] is None  # which stops nobody
    told = {"examples_skipped": 4, "examples_processed": 64, "examples_missing": 0}
    assert result.summary | told == result.summary


def one_sum(sum_of):
    """An order of one's own whose observer sums up the weights in its own way."""

    def observe(losses, shared, nothing, microbatch, position, rng):
        def objective(params):
            values, weights = losses(params)
            return values.sum(), sum_of(weights)

        (loss, weight), grads = jax.value_and_grad(objective, has_aux=True)(shared.params)
        signs = pairs.example_signs(jnp.ones(2, jnp.int8), microbatch.example_mask)
        return (loss, weight), (grads,), jnp.zeros_like(nothing), signs

    observer = matrix_free.independent(lambda p: jnp.zeros(()), observe, new_pass=jnp.zeros_like)
    return ordering.Ordering(*orders.balanced(), make_observer=lambda sizes: observer)


def test_an_order_of_ones_own_carries_metrics_or_is_told_how():
    data, weights = problems.given()
    common = {"loss_fn": LOSS, "epochs": 1, "optimizer": optax.sgd(0.0)}
    expected = numpy_means(np.float64(weights), data, range(64))[0]["accuracy"]
    for order in (signed_order.harder_first(), one_sum(lambda weights: weights.sum())):
        result = problems.fit(data, weights, ordering=order, **common)
        assert result.summary["train_accuracy"] == pytest.approx(expected, rel=1e-5)
    for sum_of in (jnp.sum, lambda weights: weights @ weights):
        with pytest.raises(ValueError, match=r"cannot work with this loss .*weights\.sum"):
            problems.fit(data, weights, ordering=one_sum(sum_of), **common)


def test_a_rule_that_would_drop_metrics_is_refused():
    common = {"loss_fn": LOSS, "epochs": 1}
    for rule in (local_sgd.local_sgd(LOSS, optax.sgd(0.1)), gradients.gradient_sums(LOSS)):
        with pytest.raises(ValueError, match=r"metrics accuracy, again, each"):
            problems.train(rule=rule, **common)
    rule = gradients.gradient_sums(LOSS, metrics=("again", "accuracy", "each"))
    summary = problems.train(rule=rule, **common).summary
    assert summary["train_again"] == pytest.approx(summary["train_loss"], rel=1e-6)
    without = rule._replace(reads=rule.reads._replace(metric_sums=None))
    with pytest.raises(ValueError, match="only one of metrics and metric_sums"):
        problems.train(rule=without, **common)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([1.0], "returned metrics list"),
        ({"loss": np.ones(4)}, "a metric named 'loss'"),
        ({"a": np.ones((4, 2))}, r"metric 'a' as float32\[4, 2\]"),
    ],
)
def test_metrics_that_are_none_are_refused(metrics, message):
    def loss_fn(params, batch, rng):
        found = jax.tree.map(jnp.asarray, metrics)
        return types.Losses(problems.softmax_loss(params, batch, rng), None, found)

    with pytest.raises(ValueError, match=message):
        problems.train(loss_fn=loss_fn, epochs=1)
