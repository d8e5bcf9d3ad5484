"""Examples that see each other: warned of with every order, refused where gradients are single."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.rounds import independence
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
    problems.train(32, loss_fn=loss_fn, epochs=1, local="virtual", **fields)
    return capsys.readouterr().err


def test_a_warning_has_the_numbers_and_says_what_they_mean(capsys):
    said = fit(capsys, contrastive)
    numbers = re.search(r"loss (\S+) beside others and (\S+) beside copies", said)
    one, other = map(float, numbers.groups())
    assert abs(one - other) > 1e-3
    assert "loss_over='microbatch'" in said


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "other", ["next", "before", "opposite", "half a batch away", "of its pair", "last"]
)
def test_who_looks_at_a_single_other_example_is_found(size, other, capsys):
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
        own = problems.softmax_loss(weights, batch, rng)
        return own + own[others[other]]

    assert "see each other" in fit(capsys, looks, microbatch_size=size)


@dataclasses.dataclass
class Scaled:
    """A loss may be any callable; this one cannot be hashed."""

    scale: float

    def __call__(self, weights, batch, rng):
        return self.scale * by_position(weights, batch, rng)


@pytest.mark.parametrize(
    "loss_fn",
    [problems.weighted_softmax_loss, with_dropout, Scaled(2.0), functools.partial(by_position)],
)
def test_losses_of_single_examples_pass_without_a_word(loss_fn, capsys):
    assert fit(capsys, loss_fn) == ""
    assert fit(capsys, loss_fn, loss_over="example") == ""


def test_a_loss_over_examples_is_held_to_it_and_one_over_microbatches_is_not_looked_at(capsys):
    with pytest.raises(ValueError, match=r"loss_over='example'.*see each other.*loss -?\d"):
        fit(capsys, contrastive, loss_over="example")
    assert fit(capsys, contrastive, loss_over="microbatch") == ""


def test_the_look_sees_what_a_function_reads_from_outside_now(capsys):
    scale = 0.0

    def loss_fn(weights, batch, rng):
        return problems.softmax_loss(weights, batch, rng) + scale * centred(weights, batch, rng)

    assert fit(capsys, loss_fn) == ""
    scale = 1.0
    assert "see each other" in fit(capsys, loss_fn)


EXPERTS, SIZE = 4, 16
PARAMS = {
    "w": np.random.default_rng(1).normal(size=(6, EXPERTS)).astype(np.float32),
    "v": np.random.default_rng(2).normal(size=6).astype(np.float32),
    "gate": np.float32(0),
}


def squares(p, batch):
    return (batch["x"] @ p["v"] - batch["y"]) ** 2


def experts_with_capacity(p, batch, rng):
    gates = jax.nn.softmax(batch["x"] @ p["w"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS)
    room = jnp.cumsum(chosen, 0) <= np.ceil(len(chosen) / EXPERTS)
    kept = jnp.where(room, chosen, 0).sum(1)
    return ((batch["x"] @ p["v"]) * gates.max(1) * kept - batch["y"]) ** 2


def support_and_query(p, batch, rng):
    half = len(batch["y"]) // 2
    query = {"x": batch["x"][half:] - batch["x"][:half].mean(0)[None], "y": batch["y"][half:]}
    return jnp.concatenate([jnp.zeros(half), squares(p, query)])


def in_the_gradient_alone(p, batch, rng):
    load = EXPERTS * (jax.nn.softmax(batch["x"] @ p["w"]).mean(0) ** 2).sum()
    return squares(p, batch) + load - jax.lax.stop_gradient(load)


def among_the_labelled(p, batch, rng):
    own, is_labelled = batch["x"] @ p["v"], batch["label"] > 0
    both = is_labelled[:, None] & is_labelled[None]
    return squares(p, batch) + jnp.where(both, (own[:, None] - 2 * own[None]) ** 2, 0).sum(1)


def mixed_by_key(p, batch, rng):
    ours, theirs = jax.random.split(rng)
    share = jax.random.beta(ours, 0.2, 0.2)
    order = jax.random.permutation(theirs, len(batch["y"]))
    both = {name: share * batch[name] + (1 - share) * batch[name][order] for name in "xy"}
    return squares(p, both)


def hardest(p, batch, rng):
    losses = squares(p, batch)
    return jnp.where(losses >= jax.lax.top_k(losses, -(-len(losses) // 4))[0][-1], losses, 0)


def nan_elsewhere(p, batch, rng):
    is_near = jnp.abs(p["v"] - PARAMS["v"]).max() < 0.2
    return jnp.where(is_near, jnp.square(centred(p["v"][:, None], batch, rng)), jnp.nan)


def gated(p, batch, rng):
    return squares(p, batch) + p["gate"] * centred(p["v"][:, None], batch, rng) ** 2


def large(p, batch, rng):
    return 1e5 + squares(p, batch) + centred(p["v"][:, None], batch, rng) ** 2


def over_tokens(p, batch, rng):
    errors = (batch["t"] * (batch["x"] @ p["v"])[:, None] - batch["y"][:, None]) ** 2
    return (errors * batch["mask"]).sum(1) * len(errors) / batch["mask"].sum()


def over_weights(p, batch, rng):
    return squares(p, batch), batch["mask"].sum(1) / batch["mask"].sum()


KINDS = [
    *(experts_with_capacity, support_and_query, in_the_gradient_alone, among_the_labelled),
    *(mixed_by_key, hardest, nan_elsewhere, gated, large, over_tokens, over_weights),
]


def ragged():
    """The first third is all alike: rows are full, and none has a label."""
    rng, num = np.random.default_rng(0), 96
    lengths = np.where(np.arange(num) < num // 3, 8, rng.integers(2, 9, num))
    return {
        "x": rng.normal(size=(num, 6)).astype(np.float32),
        "y": rng.normal(size=num).astype(np.float32),
        "label": ((np.arange(num) >= num // 3) & (rng.random(num) < 0.1)).astype(np.int32),
        "mask": (np.arange(8)[None] < lengths[:, None]).astype(np.float32),
        "t": rng.normal(size=(num, 8)).astype(np.float32),
    }


def fit_ragged(loss_fn, params=PARAMS, **fields):
    common = {"workers": 1, "local": "virtual", "budget": 2, "microbatch_size": SIZE, "epochs": 1}
    common |= {"progress": False, "compilation_cache": "off", **fields}
    return hetjax.fit(loss_fn, params, optax.sgd(1e-3), ragged(), **common)


@pytest.mark.parametrize("loss_fn", KINDS)
def test_each_kind_is_warned_of_and_stops_orders_of_single_gradients(loss_fn, capsys):
    fit_ragged(loss_fn, max_rounds=1)
    assert "see each other" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"grab.* add up .* see each other"):
        fit_ragged(loss_fn, ordering="grab", loss_over="microbatch")


@pytest.mark.parametrize(
    ("order", "local"),
    [("d_grab_exact", "fused"), ("grab_random_sign", "stepped"), ("pair_balance_exact", "stepped")],
)
def test_every_such_order_stops_in_every_local_form(order, local):
    with pytest.raises(ValueError, match=f"{order}.* add up .* see each other"):
        fit_ragged(in_the_gradient_alone, ordering=order, local=local, workers=2)


def test_orders_of_losses_alone_train_the_objective_of_the_microbatch(capsys):
    """D-GraB's update is the microbatch's own gradient."""
    fields = {"budget": 1, "epochs": 2, "max_rounds": 1}
    runs = [fit_ragged(large, ordering=each, **fields) for each in ("d_grab", "shuffle_once")]
    assert capsys.readouterr().err.count("see each other") == 2
    np.testing.assert_allclose(*[run.params["v"] for run in runs], rtol=1e-5)


def with_dropout_of_rows(p, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape).astype(np.float32)
    return squares(p, batch | {"x": batch["x"] * kept})


@pytest.mark.parametrize(
    ("loss_fn", "dtype"),
    [
        (with_dropout_of_rows, np.float32),
        (lambda p, batch, rng: (1e5 + squares(p, batch), batch["mask"].sum(1)), np.float32),
        (lambda p, batch, rng: squares(p, batch).astype(np.float32), jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("order", ["grab", "random_reshuffling"])
def test_losses_that_are_apart_are_not_told_however_they_round(loss_fn, dtype, order, capsys):
    """Dropout, large losses with weights, a partial microbatch, parameters of few bits."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        fit_ragged(loss_fn, params, ordering=order, microbatch_size=20, epochs=3)
    assert "see each other" not in capsys.readouterr().err


def test_the_seconds_are_told_where_it_is_slow(monkeypatch, capsys):
    monkeypatch.setattr(independence, "_SLOW_SECS", -1.0)
    assert re.search(r"the check of the loss took \d+\.\d s", fit(capsys, problems.softmax_loss))


def compared(weights, batch, rng):
    """Each example against the others of its microbatch, where copies are as near as can be."""
    rows = batch["x"] @ weights
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    return -jnp.diag(jax.nn.log_softmax(5 * rows @ rows.T))


@pytest.mark.parametrize(
    ("sharing", "loss_over"),
    [("shared", "microbatch"), ("private", "microbatch"), ("shared", "auto")],
)
def test_what_fills_a_microbatch_up_is_no_copy_whoever_looks(sharing, loss_over):
    (data, weights), lasts = problems.given(33), {}
    common = {"local": "virtual", "microbatch_size": 8, "budget": 1, "epochs": 1}
    common |= {"loss_over": loss_over, "eval_source": data, "cluster": {"num_workers": 1}}
    common |= {"loss_fn": compared, "optimizer": optax.sgd(0.0)}
    for last in ("auto", "fill", "pad"):
        run = problems.fit(data, weights, data={"last": last, "sharing": sharing}, **common)
        lasts[last] = run.history[-1]["loss"]
    assert lasts["auto"] == lasts["fill"] < lasts["pad"] == pytest.approx(np.log(8), rel=1e-5)
    size = 8 if loss_over == "microbatch" else 33  # of an evaluation
    starts = range(0, 33, size)
    order = np.r_[:33, : -33 % size]
    rows = [{"x": data["x"][order[at : at + size]]} for at in starts]
    found = [np.asarray(compared(weights, each, None)) for each in rows]
    by_hand = np.concatenate(found)[:33].mean()
    assert run.summary["test_loss"] == pytest.approx(by_hand, rel=1e-5)
