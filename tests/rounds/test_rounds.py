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
    result = problems.train(32, epochs=1, local=local, replay=str(tmp_path / "trace"))
    expected, _ = oracles.softmax_regression(
        data["x"], data["y"], weights, [np.arange(32)], learning_rate=0.3, momentum=0.9
    )
    np.testing.assert_allclose(result.params, expected, rtol=1e-6, atol=1e-7)


def test_the_three_local_phases_agree_after_50_rounds_of_adam(float64, tmp_path):
    totals = problems.round_totals(203, epochs=8, microbatch_size=4, budget=8)
    problems.write_trace(tmp_path / "trace", totals, num_workers=4, seed=5)
    adam = optax.chain(optax.clip_by_global_norm(0.1), promotion.promoting(optax.adam(0.01)))
    fields = {"optimizer": adam, "epochs": 8, "replay": str(tmp_path / "trace")}
    params = [problems.train(203, local=local, **fields).params for local in LOCAL]
    np.testing.assert_allclose(params[1], params[0], rtol=1e-12)
    np.testing.assert_allclose(params[2], params[0], rtol=1e-12)


@pytest.mark.parametrize("per_example", [False, True])
def test_random_keys_follow_the_examples_and_not_the_workers(per_example, float64, tmp_path):
    def noisy(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, None)
        if per_example:
            return losses * (1 + jax.vmap(jax.random.normal)(rng))
        return losses * (1 + jax.random.normal(rng, losses.shape))

    params, fields = [], {"loss_fn": noisy, "epochs": 2, "per_example_rng": per_example}
    for seed in (0, 1):  # other quotas each time
        totals = problems.round_totals(64, epochs=2, microbatch_size=4, budget=8)
        problems.write_trace(tmp_path / "trace", totals, num_workers=4, seed=seed)
        params.append(problems.train(replay=str(tmp_path / "trace"), **fields).params)
    np.testing.assert_allclose(params[0], params[1], rtol=1e-12)
    assert not np.allclose(problems.train(epochs=2).params, params[0])
