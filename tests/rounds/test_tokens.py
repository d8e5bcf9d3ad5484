"""Losses of several numbers an example, such as one a token, with a weight for each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests import oracles
from tests.rounds import problems
from tests.rounds.test_metrics import FORMS, SPEEDS, trace

TOKENS, CLASSES, FEATURES, STEP = 7, 3, 5, 0.2


def sentences(num_examples=203, dtype=np.float64):
    """Of 0 to 7 tokens; the padding of each has features that are far off."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, TOKENS + 1, num_examples)
    mask = np.arange(TOKENS) < lengths[:, None]
    x = rng.normal(size=(num_examples, TOKENS, FEATURES)).astype(dtype)
    return {
        "x": np.where(mask[..., None], x, 100).astype(dtype),
        "y": rng.integers(CLASSES, size=(num_examples, TOKENS)).astype(np.int32),
        "mask": mask,
    }


def token_losses(weights, batch):
    log_probabilities = jax.nn.log_softmax(batch["x"] @ weights)
    return -jnp.take_along_axis(log_probabilities, batch["y"][..., None], axis=-1)[..., 0]


def is_right(weights, batch):
    return (batch["x"] @ weights).argmax(-1).astype(batch["y"].dtype) == batch["y"]


def by_token(weights, batch, rng):
    return token_losses(weights, batch), batch["mask"]


def by_example(weights, batch, rng):
    """The same, summed up by hand."""
    mask = batch["mask"].astype(weights.dtype)
    losses, count = (token_losses(weights, batch) * mask).sum(-1), mask.sum(-1)
    return losses / jnp.maximum(count, 1), count


def measured(weights, batch, rng):
    losses, mask = by_token(weights, batch, rng)
    lengths = mask.sum(-1).astype(weights.dtype)
    return hetjax.Losses(losses, mask, {"accuracy": is_right(weights, batch), "length": lengths})


def pooled(weights, data, ids):
    """Means of loss, accuracy and length over the tokens of some examples, and the gradient."""
    totals, count, gradient = np.zeros(3), 0, np.zeros_like(weights)
    for i in ids:
        for t in range(int(data["mask"][i].sum())):
            logits = data["x"][i, t] @ weights
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            right = float(logits.argmax() == data["y"][i, t])
            totals += -np.log(chances[data["y"][i, t]]), right, data["mask"][i].sum()
            chances[data["y"][i, t]] -= 1
            gradient += np.outer(data["x"][i, t], chances)
            count += 1
    return totals / count, gradient / count


@pytest.mark.parametrize("local", FORMS)
def test_every_token_of_a_round_counts_alike(local, tmp_path, float64):
    data, weights, lines = sentences(), problems.initial_weights(), []
    rounds = trace(tmp_path / "trace.jsonl", [[7, 1, 0, 12], [0, 12, 7, 1], [5, 0, 6, 0]])
    fields = {"optimizer": optax.sgd(STEP), "epochs": 1, "budget": 20, "callbacks": [lines.append]}
    result = problems.fit(data, weights, loss_fn=measured, local=local, replay=rounds, **fields)
    expected = weights
    for line, ids in zip(lines, oracles.shuffled_rounds(203, [80, 80, 43], 0), strict=True):
        means, gradient = pooled(expected, data, ids)
        found = line.loss, line.metrics["accuracy"], line.metrics["length"]
        np.testing.assert_allclose(found, means, rtol=1e-12)
        expected = expected - STEP * gradient
    np.testing.assert_allclose(result.params, expected, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["d_grab", "pair_balance_exact", "grab"])
def test_an_order_takes_an_example_for_the_sum_of_its_tokens(method, float64):
    fields = {"epochs": 3, "cluster": SPEEDS, "ordering": {"method": method}}
    data, weights = sentences(), problems.initial_weights()
    runs = [
        problems.fit(data, weights, loss_fn=loss_fn, optimizer=optax.sgd(STEP), **fields)
        for loss_fn in (by_token, by_example)
    ]
    np.testing.assert_allclose(runs[0].params, runs[1].params, rtol=1e-10)
    losses = [[line["loss"] for line in run.history] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-8)  # as JSON has them


def test_the_evaluation_by_the_loss_counts_every_token_alike(float64):
    data, weights = sentences(), problems.initial_weights()
    fields = {"loss_fn": measured, "epochs": 1, "eval_source": data, "cluster": SPEEDS}
    result = problems.fit(data, weights, **fields)
    expected = pooled(result.params, data, range(203))[0]
    for name, value in zip(("loss", "accuracy", "length"), expected, strict=True):
        assert result.summary[f"test_{name}"] == pytest.approx(value, rel=1e-8)


def column_beside_row(weights, batch, rng):
    scores = (batch["x"] @ weights)[:, 0, 0]
    return (scores[:, None] - scores[None]) ** 2


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda w, b, r: token_losses(w, b), r"float32\[4, 7\].*return \(losses, weights\)"),
        (lambda w, b, r: (token_losses(w, b), b["mask"][:, 0]), r"\[4, 7\] with weights bool\[4\]"),
        (column_beside_row, r"float32\[4, 4\].*arrays \[4, 1\] and \[4\] together"),
        (lambda w, b, r: {"loss": token_losses(w, b)[:, 0]}, r"returned losses dict"),
        (lambda w, b, r: b["y"][:, 0], r"losses int32\[4\].*floating point"),
        (lambda w, b, r: token_losses(w, b).mean(), r"losses float32\[\].*\[4\].*\.mean\(\)"),
        (lambda w, b, r: (1, 2, 3), "tuple of 3"),
    ],
)
def test_what_is_not_one_number_an_example_or_token_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        problems.fit(sentences(32, np.float32), problems.given()[1], loss_fn=loss_fn, epochs=1)
