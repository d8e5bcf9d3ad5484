"""Gradients that are clipped example by example, against optax's and against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.inputs import arguments
from tests import promotion
from tests.rounds import problems

pytestmark = pytest.mark.usefixtures("float64")
FIELDS = {
    "cluster": {"num_workers": 4, "secs_per_microbatch": (1.0,) * 4, "clock": "virtual"},
    "quota": {"policy": "static", "proportions": (4, 3, 1, 0)},
    "microbatch_size": 4,
    "budget": 8,
    "epochs": 2,
}
NORM = 0.7  # clips most of them


def rounds_of(loss_fn, optimizer, *, params=None, **fields):
    """Of a run: the ids of each worker and the parameters after each round."""
    data = problems.classification(203)
    params = problems.initial_weights() if params is None else params
    rule = fields.pop("rule", hetjax.per_example_clip(NORM))
    with hetjax.Run(loss_fn, params, optimizer, data, rule=rule, **FIELDS | fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
            ids = [report.done.microbatches(w).reshape(-1) for w in range(4)]
            yield [each[each >= 0] for each in ids], run.params(state)[0], report.read()


def gradients_of(loss_fn, params, ids):
    """Of each example's mean loss, f[k, ...], and its weight."""
    rows = jax.tree.map(lambda leaf: leaf[ids][:, None], problems.classification(203))

    def of_one(params, row):
        found = loss_fn(params, row, jax.random.key(0))
        losses, weights = found if isinstance(found, tuple) else (found, jnp.ones_like(found))
        weight = weights.sum()
        return (losses * weights).sum() / jnp.where(weight > 0, weight, 1), weight

    return jax.vmap(jax.grad(of_one, has_aux=True), (None, 0))(params, rows)


@pytest.mark.parametrize("last", ["pad", "fill"])
@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_it_is_what_optax_makes_of_all_examples_of_the_round(local, last):
    """In each round, of unequal quotas, a padded microbatch and a worker without one."""
    start = {"w": problems.initial_weights(), "b": np.full(3, 0.1)}

    def loss_fn(params, batch, rng):
        shift = jax.nn.one_hot(batch["y"], 3, dtype=jnp.float64) @ params["b"]
        return problems.softmax_loss(params["w"], batch, rng) + shift**2

    aggregate = optax.contrib.differentially_private_aggregate(NORM, 0.0, key=0)
    oracle = optax.chain(aggregate, optax.scale_by_learning_rate(0.5))
    plain = optax.chain(optax.identity(), optax.scale_by_learning_rate(0.5))
    params, opt_state, given = start, oracle.init(start), {"local": local, "data": {"last": last}}
    for ids, after, report in rounds_of(loss_fn, plain, params=start, **given):
        grads, _ = gradients_of(loss_fn, params, np.concatenate(ids))
        norms = np.sqrt(sum((g**2).sum(tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)))
        assert 0.2 < np.mean(norms > NORM) < 1
        updates, opt_state = oracle.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        for path in params:
            np.testing.assert_allclose(after[path], params[path], rtol=0, atol=1e-12)
        assert report.examples == len(grads["w"])
    assert report.round == 13
    assert report.examples == 11


def of_tokens(params, batch, rng):
    """Three losses an example, one a class, of unequal weights; some examples have none."""
    losses = -jax.nn.log_softmax(batch["x"] @ params)
    return losses, jnp.maximum(batch["x"][:, :3] - 0.5, 0)


@pytest.mark.parametrize("weighting", ["shared", "example", "shard"])
@pytest.mark.parametrize("loss_fn", [problems.weighted_softmax_loss, of_tokens])
def test_an_example_of_several_losses_or_of_a_weight_counts_by_its_weight(loss_fn, weighting):
    private = {"sharing": "private", "weighting": weighting}
    data, params = {} if weighting == "shared" else private, problems.initial_weights()
    shares = np.array([2, 2, 2, 2]) / 8 if weighting == "shard" else None
    for ids, after, _ in rounds_of(loss_fn, optax.sgd(0.5), data=data, quota="equal"):
        total = weight_sum = 0
        for worker, own in enumerate(ids):
            grads, weights = gradients_of(loss_fn, params, own)
            norms = np.sqrt((np.asarray(grads) ** 2).sum((1, 2)))
            scale = 1 if shares is None else 203 * _share(worker) / len(own)
            factors = scale * np.asarray(weights) * np.minimum(1, NORM / np.maximum(norms, 1e-99))
            total += np.tensordot(factors, np.asarray(grads), 1)
            weight_sum += scale * np.asarray(weights).sum()
        params = params - 0.5 * total / weight_sum
        np.testing.assert_allclose(after, params, rtol=0, atol=1e-12)


def _share(worker):
    return (51, 51, 51, 50)[worker] / 203


def test_it_is_one_rule_by_name_by_hand_and_as_a_step_of_ones_own():
    """Metrics and the loss are those of the unclipped loss; a large norm clips nothing."""
    named = {"name": "per_example_clip", "arguments": {"max_norm": 1e9}}
    config = arguments.configuration(None, {"rule": named}, workers=4)
    assert config.recorded["rule"] == named
    assert arguments.described_rule(hetjax.per_example_clip(1e9)) == named
    loss_fn, optimizer = problems.measured_softmax_loss, optax.sgd(0.1)
    runs = [
        list(rounds_of(loss_fn, optimizer, rule=rule, epochs=1))
        for rule in (config.rule, hetjax.per_example_clip(1e9), None)
    ]
    for by_name, by_hand, whole in zip(*runs, strict=True):
        np.testing.assert_array_equal(by_name[1], by_hand[1])
        np.testing.assert_allclose(by_name[1], whole[1], rtol=0, atol=1e-12)
        assert by_name[2].loss == pytest.approx(whole[2].loss, rel=1e-12)
        assert by_name[2].metrics == pytest.approx(whole[2].metrics, rel=1e-12)
    mesh, params = hetjax.make_worker_mesh(2), problems.initial_weights()
    data = problems.classification(203)
    shaped = {name: leaf[:8].reshape(2, 1, 4, *leaf.shape[1:]) for name, leaf in data.items()}
    ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    given = hetjax.Microbatch(ids, np.ones(ids.shape, np.float32), shaped), np.ones(2, np.int32)
    found = []
    for norm in (NORM, 1e9):
        rule = hetjax.per_example_clip(norm)
        step = hetjax.make_train_step(
            problems.softmax_loss, optax.sgd(1.0), mesh, nominal_examples=8, rule=rule
        )
        state = hetjax.make_train_state(params, optax.sgd(1.0), num_workers=2, mesh=mesh)
        state, *_ = jax.jit(step)(state, *given, jax.random.key(0))
        found.append(params - np.asarray(state.params)[0])
    grads, _ = gradients_of(problems.softmax_loss, params, np.arange(8))
    np.testing.assert_allclose(found[1], np.mean(grads, 0), atol=1e-12)
    clipped, _ = optax.per_example_global_norm_clip([grads], NORM)
    np.testing.assert_allclose(found[0], clipped[0] / 8, atol=1e-12)


def test_noise_of_the_optimiser_is_drawn_once_a_round_and_is_the_same_for_all_workers():
    noisy = optax.chain(promotion.promoting(optax.add_noise(1e-4, 0.0, key=3)), optax.sgd(0.5))
    params, opt_state, last = problems.initial_weights(), noisy.init(problems.initial_weights()), 0
    for ids, after, _ in rounds_of(problems.softmax_loss, noisy, epochs=1):
        grads, _ = gradients_of(problems.softmax_loss, params, np.concatenate(ids))
        clipped, _ = optax.per_example_global_norm_clip([grads], NORM)
        updates, opt_state = noisy.update(clipped[0] / len(grads), opt_state)
        params, last = optax.apply_updates(params, updates), last + 1
        np.testing.assert_allclose(after, params, rtol=0, atol=1e-12)
    assert last == 7


def coupled(params, batch, rng):
    losses = problems.softmax_loss(params, batch, rng)
    return losses - losses.mean()[None]


def one(weights, example, rng):
    return -jax.nn.log_softmax(example["x"] @ weights)[example["y"]]


@pytest.mark.parametrize(
    ("loss_fn", "fields", "message"),
    [
        (problems.contrastive_loss, {}, r"batch_loss: rule: .*Leave out rule="),
        (coupled, {}, r"rule: it takes each example by itself: .* see each other"),
        (coupled, {"local": "fused"}, r"rule: it takes each example by itself: .* see each other"),
        (coupled, {"local": "virtual"}, r"rule: it takes each example by itself:"),
        (coupled, {"loss_over": "microbatch"}, r"rule: it takes each example by itself"),
        (problems.varying_softmax_loss, {}, r"the weights of loss_fn depend on the parameters"),
        (problems.stateful_softmax_loss, {}, r"changes the model's state, .*state_change is None"),
        (hetjax.per_example(one), {"ordering": "d_grab"}, r"the order balances gradients, and"),
    ],
)
def test_a_loss_that_is_not_of_single_examples_is_refused(loss_fn, fields, message):
    with pytest.raises(ValueError, match=message):
        next(rounds_of(loss_fn, optax.sgd(0.1), **fields))


def test_a_norm_that_is_none_is_refused_and_one_too_large_to_square_is_not_0():
    with pytest.raises(ValueError, match=r"max_norm: got 0, must be a finite number above 0"):
        hetjax.per_example_clip(0)
    with pytest.raises(ValueError, match=r"rule\.arguments\.max_norm: missing"):
        arguments.configuration(None, {"rule": {"name": "per_example_clip"}}, workers=4)
    large = hetjax.per_example(lambda params, one, rng: 1e200 * one["x"] @ params[:, 0])
    with pytest.raises(hetjax.NonFiniteError, match="round 0"):
        list(rounds_of(large, optax.sgd(0.1), epochs=1))
