"""Losses over all examples of a round: as one device takes them of the whole batch, by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.local import gradients
from tests.rounds import problems

SIZE, RATE = 4, 0.3
VIRTUAL = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
STATIC = {"policy": "static", "proportions": [4, 2, 1, 1]}
CASES = {  # each pair of form, gate and reducer that sums, and each policy
    "stepped, closed": {"gate": {"trigger": "quorum", "quorum": 5}, "quota": "equal"},
    "stepped, closed as it runs": {
        "gate": "first",
        "cluster": {"num_workers": 4, "secs_per_microbatch": [0.002, 0.002, 0.002, 0.01]},
    },
    "fused": {"local": "fused", "reducer": "ring", "quota": STATIC, "per_example_rng": True},
    "virtual, filled": {
        "local": "virtual",
        "gate": {"trigger": "quorum", "quorum": 5},
        "reducer": "ring",
        "data": {"last": "fill", "feed": "streamed"},
    },
}


def data():
    return problems.classification(70)  # 17 whole microbatches, and 2


def run(*, updates=True, **fields):
    fields = {"epochs": 1, "cluster": VIRTUAL, **fields}
    fields |= {"optimizer": optax.sgd(RATE) if updates else None}
    return problems.run(70, loss_fn=problems.contrastive_loss, **fields)


@functools.partial(jax.jit, static_argnames="per_example")
def by_hand(weights, rows, ids, key, *, per_example):
    """`(loss, gradient)` over the examples of a round at once, each embedded as it was."""

    def total(weights):
        embedded = []
        for examples, of_microbatch in zip(rows, ids, strict=True):
            keys = jax.random.fold_in(key, of_microbatch[0])
            if per_example:
                keys = jax.vmap(jax.random.fold_in, (None, 0))(key, of_microbatch)
            embedded.append(problems.embed(weights, examples, keys))
        whole = jax.tree.map(lambda *each: jnp.concatenate(each), *embedded)
        mask = jnp.concatenate([each >= 0 for each in ids]).astype(jnp.float64)
        return problems.contrast(weights, whole, mask)

    return jax.value_and_grad(total)(weights)


def of_round(weights, done, epoch, *, per_example=False):
    """As `by_hand`, of the microbatches that a round did."""
    ids = [np.where(row >= 0, row, -1) for row in done.example_ids]
    read = [
        np.where(row >= 0, row, np.where(row < -1, -2 - row, row[0])) for row in done.example_ids
    ]
    rows = [jax.tree.map(lambda leaf, at=at: leaf[at], data()) for at in read]
    key = jax.random.fold_in(jax.random.key(0), epoch)
    return by_hand(weights, rows, ids, key, per_example=per_example)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_round_is_that_of_one_device_with_the_whole_batch(name, float64):
    fields, quotas, sizes, closed = CASES[name], set(), set(), 0
    per_example = fields.get("per_example_rng", False)
    with run(**{"quota": "adaptive", **fields}) as training:
        state, examples, rounds = training.init(), 0, 0
        while not training.done(state):
            before = jax.device_get(training.params(state)[0])
            epoch = training.setup.stream.epoch(state.stream)
            state, report = training.round(state)
            loss, grads = of_round(before, report.done, epoch, per_example=per_example)
            found = jax.device_get(training.params(state)[0])
            np.testing.assert_allclose(found, before - RATE * grads, rtol=0, atol=1e-12)
            assert report.read().loss == pytest.approx(float(loss), abs=1e-12)
            assert np.abs(found - before).max() > 1e-6
            examples, rounds = examples + report.read().counts.examples, rounds + 1
            quotas.add(tuple(report.done.quotas))
            sizes.update((row >= 0).sum() for row in report.done.example_ids)
            closed += sum(report.read().workers.microbatches_done) < sum(report.read().quotas)
    assert (examples, rounds) == (70, state.rounds_done)
    assert sizes == {SIZE, 70 % SIZE}
    assert len(quotas) > 1
    assert 0 in set().union(*quotas) or "stepped" in name
    assert bool(closed) == ("closed" in name or "filled" in name) or "as it runs" in name


def test_the_times_of_a_round_are_those_of_both_passes(float64):
    with run(quota=STATIC, local="virtual") as training:
        _, report = training.round(training.init())
        each = np.multiply(report.read().quotas, VIRTUAL["secs_per_microbatch"])
        assert report.read().workers.compute_secs == (2 * each).tolist()
        assert report.read().times.local_secs == 2 * each.max()
        assert report.read().times.optimal_round_secs == 2 * 4  # of 4, 2, 1 and 1 microbatches


def test_the_loss_is_the_same_to_the_bit_whatever_the_quotas_are(float64):
    losses, params = [], []
    for proportions in ([1, 1, 1, 1], [8, 0, 0, 0], [5, 0, 2, 1]):
        quota = {"policy": "static", "proportions": proportions}
        with run(local="virtual", quota=quota) as training:
            state, report = training.round(training.init())
            losses.append(report.read().loss)
            params.append(jax.device_get(training.params(state)[0]))
        assert np.argmax(report.read().quotas) == 0
        assert report.read().quotas.count(0) == proportions.count(0)
    assert len(set(losses)) == 1
    np.testing.assert_allclose(params[1:], [params[0]] * 2, rtol=0, atol=1e-14)


def test_rounds_without_update_and_those_done_again_find_the_gradient(float64):
    with run(updates=False, local="fused") as training:
        state, report = training.round(training.init())
        _, grads = of_round(problems.initial_weights(), report.done, 0)
        before = state.stream.examples_processed
        state, again = training.round(state, again=report.done)
        for each in (report, again):
            np.testing.assert_allclose(np.asarray(each.mean)[0], grads, rtol=0, atol=1e-12)
        assert state.stream.examples_processed == before


def test_two_towers_in_half_reach_the_loss_as_they_are():
    seen = []

    def embed(params, batch, rng):
        x = batch["x"].astype(jnp.bfloat16)
        return {"one": x @ params["one"], "other": (x**2) @ params["other"]}

    def loss(params, e, mask):
        seen.append({name: (each.dtype, each.shape) for name, each in e.items()})
        scores = (e["one"] @ e["other"].T).astype(jnp.float32) * params["scale"]
        scores = jnp.where(mask[None] > 0, scores, -1e9)
        return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores)) * mask) / jnp.sum(mask)

    drawn = np.random.default_rng(0).normal(size=(2, problems.FEATURES, 2))
    one, other = jnp.asarray(drawn, jnp.bfloat16)
    params = {"one": one, "other": other, "scale": np.float32(1), "unused": np.ones(3, np.float32)}
    fields = {"cluster": VIRTUAL, "local": "virtual", "epochs": 5, "optimizer": optax.sgd(0.05)}
    fields["loss_fn"] = hetjax.batch_loss(embed, loss)
    result = problems.fit(problems.given()[0], params, **fields)
    assert {"one": (jnp.bfloat16, (32, 2)), "other": (jnp.bfloat16, (32, 2))} in seen
    losses = [line["loss"] for line in result.history]
    assert losses[-1] < losses[0] - 0.1
    assert result.params["scale"] != 1
    np.testing.assert_array_equal(result.params["unused"], 1)
    assert result.summary["rounds"] == 10
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


@pytest.mark.slow
def test_a_run_that_is_cut_goes_on_to_the_bit(tmp_path):
    fields = {"loss_fn": problems.contrastive_loss, "checkpoint": {"every_rounds": 1}}
    fields |= {"epochs": 2, "cluster": VIRTUAL, "local": "virtual"}
    fit = functools.partial(problems.train, 70, **fields)
    whole = fit(workdir=tmp_path / "whole")
    stop = problems.press_ctrl_c(lambda line: line.round == 3)
    begun = fit(workdir=tmp_path / "cut", callbacks=[stop])
    assert begun.summary["rounds"] < whole.summary["rounds"]
    found = fit(workdir=tmp_path / "cut")
    np.testing.assert_array_equal(found.params, whole.params)
    losses = [[line["loss"] for line in result.history] for result in (found, whole)]
    assert losses[0] == losses[1]


# --- What is refused ---


def embed(params, batch, rng):
    return batch["x"] @ params


def loss(params, e, mask):
    return jnp.sum(e**2 * mask[:, None]) / jnp.sum(mask)


def fit(embed=embed, loss=loss, examples=None, **fields):
    data, weights = problems.given(32)
    given = {"loss_fn": hetjax.batch_loss(embed, loss), "local": "virtual", **fields}
    return problems.fit(data if examples is None else examples, weights, **given)


REFUSED = {
    "gossip": ({"reducer": "d_psgd"}, "'d_psgd'"),
    "shards": ({"data": {"sharing": "private"}}, "sharing"),
    "order": ({"ordering": "d_grab"}, "'d_grab'"),
    "skip": ({"nonfinite": "skip"}, "nonfinite"),
    "state": ({"model_state": np.zeros(2)}, "takes no model_state"),
    "evaluation": ({"eval_source": problems.classification(8, np.float32)}, "give metrics_fn"),
    "embed": ({"embed": lambda params, batch: 1}, r"embed is called as embed\(params, batch, rng"),
    "labels": (
        {"embed": lambda params, batch, rng: (embed(params, batch, rng), batch["y"])},
        r"embed returned \[1\] .*int32",
    ),
    "losses": ({"loss": lambda params, e, mask: e[:, 0] * mask}, "must be one floating point"),
    "padding": ({"loss": lambda params, e, mask: jnp.mean(e**2)}, "mask is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_go_with_is_refused_with_the_reason(name):
    fields, says = REFUSED[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        fit(**fields)
    assert re.search(says, str(raised.value), re.IGNORECASE), str(raised.value)


def test_a_rule_a_step_of_ones_own_and_values_of_a_round_are_refused():
    loss_fn = hetjax.batch_loss(embed, loss)
    rule = gradients.gradient_sums(loss_fn)
    with pytest.raises(ValueError, match="rule"):
        fit(rule=rule)
    mesh = hetjax.make_worker_mesh(2)
    with pytest.raises(ValueError, match=r"hetjax\.Run"):
        hetjax.make_train_step(loss_fn, optax.sgd(0.1), mesh, nominal_examples=8)
    with run(local="virtual") as training, pytest.raises(ValueError, match="given: "):
        training.init(given=np.ones(2))


def test_a_microbatch_that_is_not_finite_is_named():
    examples = problems.classification(32, np.float32)
    examples["x"][13] = np.nan
    with pytest.raises(hetjax.NonFiniteError, match=r"\(examples \[.*\b13\b.*\]\)") as raised:
        fit(examples=examples, quota="equal")
    assert len(re.search(r"\[.*\]", str(raised.value))[0].split(",")) == 4
    assert "skip" not in str(raised.value)
