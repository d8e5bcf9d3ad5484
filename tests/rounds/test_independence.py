"""Examples that see each other: warned of with every order, refused where asked for."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.losses import independence
from tests.rounds import problems


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """However busy the machine is, the check is not slow."""
    monkeypatch.setattr(independence, "_SLOW_SECS", float("inf"))


def contrastive(weights, batch, rng):
    """Each example against the others of its microbatch."""
    logits = batch["x"] @ weights
    scores = logits @ logits.T
    return -jnp.diag(jax.nn.log_softmax(scores))


def mixed(weights, batch, rng):
    """Mixup, with numbers that are drawn for all examples."""
    share = jax.random.uniform(rng, (len(batch["y"]), 1))
    x = share * batch["x"] + (1 - share) * batch["x"][::-1]
    return problems.softmax_loss(weights, batch | {"x": x}, rng)


def centred(weights, batch, rng):
    return jnp.sum((batch["x"] - batch["x"].mean(axis=0, keepdims=True)) @ weights, axis=1)


def with_dropout(weights, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape).astype(batch["x"].dtype)
    return problems.softmax_loss(weights, batch | {"x": batch["x"] * kept}, rng)


def by_position(weights, batch, rng):
    """Each example by itself, taken by its place."""
    log_probabilities = jax.nn.log_softmax(batch["x"] @ weights)
    return -log_probabilities[jnp.arange(len(batch["y"])), batch["y"]]


def fit(capsys, loss_fn, **fields):
    problems.fit(
        problems.classification(32, np.float32),
        problems.initial_weights(np.float32),
        loss_fn=loss_fn,
        epochs=1,
        local="virtual",
        **fields,
    )
    return capsys.readouterr().err


@pytest.mark.parametrize("loss_fn", [contrastive, mixed])
def test_a_warning_has_the_numbers_and_says_what_they_mean(loss_fn, capsys):
    said = fit(capsys, loss_fn)
    numbers = re.search(r"loss (\S+) beside others and (\S+) beside copies", said)
    one, other = map(float, numbers.groups())
    assert abs(one - other) > 1e-3
    assert "loss_over='microbatch'" in said


def test_the_numbers_are_those_of_the_loss():
    data = problems.classification(4, np.float32)
    weights = problems.initial_weights(np.float32)
    seen = independence.find(centred, weights, data, jax.random.key(0))
    moved = np.asarray(independence.moved(weights))
    x = data["x"]
    beside_others = ((x - x.mean(axis=0)) @ moved).sum(axis=1)
    np.testing.assert_allclose([seen.loss, seen.beside_copies], [beside_others[0], 0], rtol=1e-4)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "other", ["next", "before", "opposite", "half a batch away", "of its pair", "last"]
)
def test_who_looks_at_a_single_other_example_is_found(size, other):
    place = np.arange(size)
    others = {
        "next": (place + 1) % size,
        "before": place - 1,
        "opposite": place[::-1],
        "half a batch away": (place + size // 2) % size,
        "of its pair": place ^ 1,
        "last": np.full(size, size - 1),
    }

    def looks(weights, batch, rng):
        own = batch["x"] @ weights
        return own + own[others[other]]

    data = {"x": np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)}
    assert independence.find(looks, np.ones(3, np.float32), data, jax.random.key(0)) is not None


@pytest.mark.parametrize(
    "loss_fn",
    [problems.weighted_softmax_loss, by_position, with_dropout],
)
def test_losses_of_single_examples_pass_without_a_word(loss_fn, capsys):
    assert fit(capsys, loss_fn) == ""
    assert fit(capsys, loss_fn, loss_over="example") == ""


def test_a_loss_over_examples_is_held_to_it_and_one_over_microbatches_is_not_looked_at(capsys):
    with pytest.raises(ValueError, match=r"loss_over='example'.*see each other.*loss -?\d"):
        fit(capsys, contrastive, loss_over="example")
    assert fit(capsys, contrastive, loss_over="microbatch") == ""


def test_orders_that_balance_refuse_whatever_is_asked_for(capsys):
    with pytest.raises(ValueError, match=r"ordering\.method: .* see each other"):
        fit(capsys, contrastive, ordering="d_grab", loss_over="microbatch")


def test_a_second_run_with_the_same_loss_compiles_no_check():
    data, weights = problems.classification(4, np.float32), problems.initial_weights(np.float32)
    traces = []

    def loss_fn(weights, batch, rng):
        traces.append(1)
        return by_position(weights, batch, rng)

    independence.find(loss_fn, weights, data, jax.random.key(0))
    independence.find(loss_fn, weights, data, jax.random.key(1))
    assert traces == [1]  # the jit has its program


def test_the_seconds_are_told_where_it_is_slow(monkeypatch, capsys):
    monkeypatch.setattr(independence, "_SLOW_SECS", -1.0)
    assert re.search(r"the check of the loss took \d+\.\d s", fit(capsys, problems.softmax_loss))


def test_a_loss_may_be_any_callable():
    @dataclasses.dataclass
    class Loss:  # cannot be hashed
        scale: float

        def __call__(self, weights, batch, rng):
            return self.scale * by_position(weights, batch, rng)

    data, weights = problems.classification(4, np.float32), problems.initial_weights(np.float32)
    for loss_fn in (Loss(2.0), functools.partial(by_position)):
        assert independence.find(loss_fn, weights, data, jax.random.key(0)) is None
