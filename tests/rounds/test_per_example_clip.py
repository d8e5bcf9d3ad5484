"""Gradients that are clipped example by example, against optax's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.inputs import arguments
from hetjax.local import gradients
from tests import promotion
from tests.rounds import problems

pytestmark = pytest.mark.usefixtures("float64")
DATA = problems.classification(203)
FIELDS = {
    "cluster": {"num_workers": 4, "secs_per_microbatch": (1.0,) * 4, "clock": "virtual"},
    "quota": {"policy": "static", "proportions": (4, 3, 1, 0)},
    "epochs": 2,
}
NORM = 0.7  # clips most of them
START = {"w": problems.initial_weights(), "b": np.full(3, 0.1)}


def plain(params, batch, rng):
    logits = batch["x"] @ params["w"] + params["b"][None]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]]


def weighed(params, batch, rng):
    return plain(params, batch, rng), problems.example_weights(batch)


def of_tokens(params, batch, rng):
    """Three losses an example, one a class, of unequal weights; some examples have none."""
    losses = -jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"][None])
    return losses, jnp.maximum(batch["x"][:, :3] - 0.5, 0)


def rounds_of(loss_fn, optimizer, *, start=START, rule=None, **fields):
    """Of a run: the ids of each worker, the parameters and the report after each round."""
    rule = rule or hetjax.per_example_clip(NORM)
    fields |= {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
    with problems.run(DATA, start, **FIELDS | fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
            ids = [report.done.microbatches(w).reshape(-1) for w in range(4)]
            yield [each[each >= 0] for each in ids], run.params(state)[0], report.read()


def clipped(loss_fn, params, ids):
    """Of each example the gradient of its mean loss, the same clipped by optax, and its weight."""

    def of_one(params, row):
        found = loss_fn(params, jax.tree.map(lambda leaf: leaf[None], row), jax.random.key(0))
        losses, weights = found if isinstance(found, tuple) else (found, jnp.ones_like(found))
        weight = weights.sum()
        return (losses * weights).sum() / jnp.where(weight > 0, weight, 1), weight

    def one(row):
        grad, weight = jax.grad(of_one, has_aux=True)(params, row)
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda leaf: leaf[None], grad))
        found, _ = optax.per_example_global_norm_clip(leaves, NORM)
        return grad, jax.tree.unflatten(treedef, found), weight

    return jax.vmap(one)(jax.tree.map(lambda leaf: leaf[ids], DATA))


LOCAL = [{"local": local} for local in ("stepped", "fused", "virtual")]
PRIVATE = [
    {"quota": "equal", "data": {"sharing": "private", "weighting": weighting}}
    for weighting in ("example", "shard")
]


@pytest.mark.parametrize(
    ("loss_fn", "fields"),
    [
        *itertools.product((plain,), [*LOCAL, {"local": "fused", "data": {"last": "pad"}}]),
        *itertools.product((weighed, of_tokens), [{}, *PRIVATE]),
    ],
)
def test_a_round_updates_by_the_mean_of_its_clipped_examples(loss_fn, fields):
    """Of unequal quotas, 0 among them, and with a microbatch that is not full. Without weights the
    mean is that of optax's dpsgd; noise is drawn once a round, the same for all workers."""
    aggregate = optax.contrib.differentially_private_aggregate(NORM, 0.0, key=0)
    noisy = optax.chain(promotion.promoting(optax.add_noise(1e-4, 0.0, key=3)), optax.sgd(0.5))
    params, opt_state, counts, differ = START, noisy.init(START), [], []
    for ids, after, report in rounds_of(loss_fn, noisy, **fields):
        raw, grads, weights = clipped(loss_fn, params, np.concatenate(ids))
        scales = np.ones(len(weights))
        if fields.get("data", {}).get("weighting") == "shard":  # of 51, 51, 51 and 50 examples
            scales = np.concatenate(
                [np.full(len(o), (51 - w // 3) / len(o)) for w, o in enumerate(ids)]
            )
        mean = jax.tree.map(lambda g, w=scales * weights: np.tensordot(w, g, 1) / w.sum(), grads)
        if loss_fn is plain:
            mean, _ = aggregate.update(raw, aggregate.init(params))
        updates, opt_state = noisy.update(mean, opt_state)
        params = optax.apply_updates(params, updates)
        for name, leaf in params.items():
            np.testing.assert_allclose(after[name], leaf, rtol=0, atol=1e-12)
        counts.append(report.counts.examples)
        differ += (np.asarray(raw["b"]) != np.asarray(grads["b"])).any(1).tolist()
    assert 0.2 < np.mean(differ) < 1
    if "quota" not in fields:
        assert counts == [32] * 6 + [11] + [32] * 6 + [11]


def test_it_is_one_rule_by_name_by_hand_and_as_a_step_of_ones_own():
    """Metrics and the loss are those of the unclipped loss; a large norm clips nothing."""
    named = {"name": "per_example_clip", "arguments": {"max_norm": 1e9}}
    config = arguments.configuration(None, {"rule": named}, workers=4)
    assert config.recorded["rule"] == named
    assert arguments.described_rule(hetjax.per_example_clip(1e9)) == named
    loss_fn, how = problems.measured_softmax_loss, {"start": START["w"], "epochs": 1}
    unclipped = gradients.gradient_sums(loss_fn, metrics=("accuracy", "again", "each"))
    by_name, by_hand, whole = (
        list(rounds_of(loss_fn, optax.sgd(0.1), rule=rule, **how))[-1]
        for rule in (config.rule, hetjax.per_example_clip(1e9), unclipped)
    )
    np.testing.assert_array_equal(by_name[1], by_hand[1])
    np.testing.assert_allclose(by_name[1], whole[1], rtol=0, atol=1e-12)
    assert by_name[2].loss == pytest.approx(whole[2].loss, rel=1e-12)
    assert by_name[2].metrics == pytest.approx(whole[2].metrics, rel=1e-12)

    ids, fields = np.arange(8).reshape(2, 1, 4), {"rule": hetjax.per_example_clip(NORM)}
    step, *given = problems.own_step(ids, DATA, START, optax.sgd(1.0), loss_fn=plain, **fields)
    state, *_ = jax.jit(step)(*given, np.ones(2, np.int32), jax.random.key(0))
    mean = clipped(plain, START, np.arange(8))[1]["w"].mean(0)
    np.testing.assert_allclose(START["w"] - np.asarray(state.params["w"])[0], mean, atol=1e-12)


def coupled(params, batch, rng):
    losses = plain(params, batch, rng)
    return losses - losses.mean()[None]


APART = r"rule: it takes each example by itself: .* see each other"


@pytest.mark.parametrize(
    ("loss_fn", "fields", "message"),
    [
        (problems.contrastive_loss, {}, r"batch_loss: rule: .*Leave out rule="),
        *((coupled, {"local": local}, APART) for local in ("stepped", "fused")),
        (coupled, {"loss_over": "microbatch"}, APART),
        (problems.varying_softmax_loss, {}, r"the weights of loss_fn depend on the parameters"),
        (problems.stateful_softmax_loss, {}, r"changes the model's state, .*state_change is None"),
        (plain, {"ordering": "d_grab"}, r"the order balances gradients, and the rule has none"),
    ],
)
def test_a_loss_that_is_not_of_single_examples_is_refused(loss_fn, fields, message):
    start = START if loss_fn in (plain, coupled) else START["w"]
    with pytest.raises(ValueError, match=message):
        next(rounds_of(loss_fn, optax.sgd(0.1), start=start, **fields))


def test_a_norm_that_is_none_is_refused_and_one_too_large_to_square_is_not_0():
    with pytest.raises(ValueError, match=r"max_norm: got 0, must be a finite number above 0"):
        hetjax.per_example_clip(0)
    with pytest.raises(ValueError, match=r"rule\.max_norm: missing"):
        arguments.configuration(None, {"rule": {"name": "per_example_clip"}}, workers=4)
    large = hetjax.per_example(lambda params, one, rng: 1e200 * one["x"] @ params["w"][:, 0])
    with pytest.raises(hetjax.NonFiniteError, match="round 0"):
        list(rounds_of(large, optax.sgd(0.1)))
