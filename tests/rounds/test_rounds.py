"""Training on unequal and changing quotas is training on the pooled batch, however it is run."""

import jax
import numpy as np
import optax
import pytest

from tests import oracles, promotion
from tests.rounds import problems

LOCAL = ["stepped", "fused", "virtual"]


@pytest.mark.parametrize("local", LOCAL)
def test_unequal_and_changing_quotas_match_the_pooled_batch_after_50_rounds(
    local, float64, tmp_path
):
    data, weights = problems.classification(), problems.initial_weights()
    totals = problems.round_totals(203, epochs=8, microbatch_size=4, budget=8)
    quotas = problems.write_trace(tmp_path / "trace", totals, num_workers=4)
    result = problems.fit(data, weights, epochs=8, local=local, replay=str(tmp_path / "trace"))

    rounds = oracles.shuffled_rounds(203, np.array(totals) * 4, seed=0)
    expected, losses = oracles.softmax_regression(
        data["x"], data["y"], weights, rounds, learning_rate=0.3, momentum=0.9
    )
    assert len(quotas) == 56
    assert any(0 in row for row in quotas)
    assert any(max(row) == 8 for row in quotas)
    assert [line["quotas"] for line in result.history] == quotas
    np.testing.assert_allclose(result.params, expected, rtol=1e-12)
    np.testing.assert_allclose([line["loss"] for line in result.history], losses, rtol=1e-8)
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


@pytest.mark.parametrize("local", LOCAL)
def test_one_float32_round_matches_the_pooled_batch(local, tmp_path):
    data, weights = problems.classification(32), problems.initial_weights()
    problems.write_trace(tmp_path / "trace", [8], num_workers=4, seed=3)
    result = problems.fit(
        {"x": data["x"].astype(np.float32), "y": data["y"]},
        weights.astype(np.float32),
        epochs=1,
        local=local,
        replay=str(tmp_path / "trace"),
    )
    expected, _ = oracles.softmax_regression(
        data["x"], data["y"], weights, [np.arange(32)], learning_rate=0.3, momentum=0.9
    )
    np.testing.assert_allclose(result.params, expected, rtol=1e-6, atol=1e-7)


def test_the_three_local_phases_agree_after_50_rounds_of_adam(float64, tmp_path):
    data, weights = problems.classification(), problems.initial_weights()
    totals = problems.round_totals(203, epochs=8, microbatch_size=4, budget=8)
    problems.write_trace(tmp_path / "trace", totals, num_workers=4, seed=5)
    params = [
        problems.fit(
            data,
            weights,
            optimizer=optax.chain(
                optax.clip_by_global_norm(0.1), promotion.promoting(optax.adam(0.01))
            ),
            epochs=8,
            local=local,
            replay=str(tmp_path / "trace"),
        ).params
        for local in LOCAL
    ]
    np.testing.assert_allclose(params[1], params[0], rtol=1e-12)
    np.testing.assert_allclose(params[2], params[0], rtol=1e-12)


def test_weights_are_summed_and_divided_once(float64):
    data = problems.classification(40)
    data["weight"] = np.random.default_rng(1).integers(0, 9, 40).astype(np.float64)

    def weighted_loss(weights, batch, rng):
        return problems.softmax_loss(weights, batch, rng), batch["weight"]

    weights = problems.initial_weights()
    result = problems.fit(
        data, weights, loss_fn=weighted_loss, optimizer=optax.sgd(1.0), epochs=1, budget=10
    )

    def mean_loss(weights):
        losses = problems.softmax_loss(weights, data, None)
        return (losses * data["weight"]).sum() / data["weight"].sum()

    expected = weights - jax.grad(mean_loss)(weights)
    np.testing.assert_allclose(result.params, expected, rtol=1e-12)


def test_a_round_of_weight_zero_changes_nothing():
    data = problems.classification(64, np.float32)

    def zero_weight(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, rng)
        return losses, np.zeros(losses.shape, losses.dtype)

    weights = problems.initial_weights(np.float32)
    optimizer = promotion.promoting(
        optax.adamw(0.1)
    )  # weight decay alone would move the parameters
    result = problems.fit(data, weights, loss_fn=zero_weight, optimizer=optimizer, epochs=1)
    np.testing.assert_array_equal(result.params, weights)
    assert int(result.state.opt_state[0].count[0]) == 0


@pytest.mark.parametrize("loss_fn", [problems.softmax_loss, problems.weighted_softmax_loss])
def test_private_shards_are_weighted_by_their_share_of_the_examples(loss_fn, float64, tmp_path):
    data, weights = problems.classification(80), problems.initial_weights()
    (tmp_path / "trace").write_text(
        '{"quotas": [1, 2, 0, 2], "microbatches_done": [1, 2, 0, 2]}\n' * 9
    )
    of_example = problems.example_weights(data)
    if loss_fn is problems.softmax_loss:
        of_example = np.ones(80)
    # The first round by hand: equal shards of 20, quotas 1, 2, 0, 2 of 4 examples.
    shuffled = np.random.default_rng((0, 0x5A4D)).permutation(80).reshape(4, 20)
    gradients, amounts, counts = [], [], []
    for worker, quota in enumerate([1, 2, 0, 2]):
        order = np.random.default_rng((0, worker, 0)).permutation(20)
        ids = shuffled[worker][order][: quota * 4]
        batch = {name: values[ids] for name, values in data.items()}

        def loss(w, batch=batch, of_batch=of_example[ids]):
            return (problems.softmax_loss(w, batch, None) * of_batch).sum()

        gradients.append(np.asarray(jax.grad(loss)(weights)))
        amounts.append(of_example[ids].sum())
        counts.append(len(ids))
    at_work = [(g, a, c) for g, a, c in zip(gradients, amounts, counts, strict=True) if c]
    by_shard = sum(g / c for g, _, c in at_work) / sum(a / c for _, a, c in at_work)
    by_example = sum(gradients) / sum(amounts)
    by_mean = sum(g / a for g, a, _ in at_work) / 3
    for name, expected in (("shard", by_shard), ("example", by_example), ("shard_mean", by_mean)):
        one_round = problems.fit(
            data,
            weights,
            loss_fn=loss_fn,
            optimizer=optax.chain(optax.sgd(1.0), _first_update_only()),
            epochs=1,
            budget=5,
            data={"sharing": "private", "weighting": name},
            replay=str(tmp_path / "trace"),
            callbacks=[lambda line: True],  # ends a round later; its update is not applied
        )
        np.testing.assert_allclose(one_round.params, weights - expected, rtol=1e-12)


def _first_update_only():
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: u * (state == 0).astype(u.dtype), updates), state + 1

    return optax.GradientTransformation(lambda params: np.zeros((), np.int32), update)


@pytest.mark.parametrize(
    ("local", "sharing"), [("stepped", "private"), ("fused", "shared"), ("virtual", "private")]
)
def test_resident_and_streamed_feeds_train_bit_identically(local, sharing):
    data = problems.classification(203, np.float32)
    weights = problems.initial_weights(np.float32)
    cluster = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}
    params = [
        problems.fit(
            data,
            weights,
            epochs=3,
            local=local,
            data={"feed": feed, "sharing": sharing},
            cluster=cluster,
        ).params
        for feed in ("resident", "streamed")
    ]
    np.testing.assert_array_equal(*params)


def test_a_replayed_trace_gives_the_same_parameters_to_the_bit(tmp_path):
    data = problems.classification(203, np.float32)
    weights = problems.initial_weights(np.float32)
    cluster = {"num_workers": 4, "secs_per_microbatch": (0.0004, 0.0003, 0.0002, 0.0001)}
    live = problems.fit(data, weights, epochs=3, cluster=cluster, workdir=tmp_path)
    again = problems.fit(data, weights, epochs=3, replay=str(tmp_path / "metrics.jsonl"))
    assert [r["quotas"] for r in again.history] == [r["quotas"] for r in live.history]
    np.testing.assert_array_equal(again.params, live.params)


@pytest.mark.parametrize("per_example", [False, True])
def test_random_keys_follow_the_examples_and_not_the_workers(per_example, float64, tmp_path):
    data, weights = problems.classification(64), problems.initial_weights()

    def noisy(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, None)
        noise = (
            jax.vmap(lambda key: jax.random.normal(key))(rng)
            if per_example
            else jax.random.normal(rng, losses.shape)
        )
        return losses * (1 + noise)

    params = []
    for seed in (0, 1):  # other quotas each time
        totals = problems.round_totals(64, epochs=2, microbatch_size=4, budget=8)
        problems.write_trace(tmp_path / "trace", totals, num_workers=4, seed=seed)
        result = problems.fit(
            data,
            weights,
            loss_fn=noisy,
            epochs=2,
            per_example_rng=per_example,
            replay=str(tmp_path / "trace"),
        )
        params.append(result.params)
    np.testing.assert_allclose(params[0], params[1], rtol=1e-12)
    plain = problems.fit(data, weights, epochs=2)
    assert not np.allclose(plain.params, params[0])
