"""Rounds whose weights add up to nothing make no update, and say so."""

import numpy as np
import pytest

from tests.rounds import problems
from tests.rounds.test_robustness import fit, regression, squared


def signed(weights, batch, rng):
    return squared(weights, batch, rng), batch["weight"]


def test_rounds_whose_weights_add_up_to_nothing_are_counted_and_told_once(tmp_path, capsys):
    data = regression(64) | {"weight": -np.ones(64, np.float32)}
    result = fit(data, loss_fn=signed, workdir=tmp_path)
    np.testing.assert_array_equal(result.params, np.zeros(3))
    assert result.summary["rounds_without_update"] == len(result.history) == 4
    assert result.summary["train_loss"] is None
    assert [line["weight_sum"] for line in result.history] == [-32.0] * 4
    said = capsys.readouterr().err
    assert said.count("made no update") == 1
    assert "round 0: the weights of its examples add up to -32, so it made no update" in said
    assert "4 rounds made no update" in repr(result)
    report = (tmp_path / "report.html").read_text()
    assert "4 of 4 rounds made no update" in report


@pytest.mark.parametrize("reducer", ["all_reduce", "d_psgd"])
def test_a_round_whose_shards_weigh_nothing_makes_no_update(reducer, tmp_path):
    """In the measure of the shards: the weights of the examples that were done add up to 3.8."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"quotas": [3, 1], "microbatches_done": [3, 1]}\n')
    fields = {"data": {"sharing": "private"}, "reducer": reducer, "replay": str(trace)}
    fields |= {"local": "virtual", "microbatch_size": 2, "budget": 4, "loss_fn": signed}
    fields["cluster"] = {"num_workers": 2, "secs_per_microbatch": (1, 2)}

    def run_on(weights):
        return problems.run(regression(64) | {"weight": weights}, np.zeros(3, np.float32), **fields)

    weights = np.ones(64, np.float32)
    with run_on(weights) as run:
        weights[run.setup.stream.shards[1]] = -1.1
    with run_on(weights) as run:
        state, report = run.round(run.init())
        np.testing.assert_array_equal(run.params(state)[0], np.zeros(3))
        nothing = -0.05 if reducer == "all_reduce" else 0  # of each worker's own
        assert report.read().update.weight_sum == pytest.approx(nothing)


def test_single_negative_weights_are_weights_like_others(capsys):
    data = regression(64) | {"weight": np.ones(64, np.float32)}
    data["weight"][::8] = -0.5
    result = fit(data, loss_fn=signed, microbatch_size=16, budget=4, epochs=1)
    gradient = 2 * (data["weight"] * -data["y"]) @ data["x"] / data["weight"].sum()
    np.testing.assert_allclose(result.params, -0.05 * gradient, rtol=1e-5)
    assert "rounds_without_update" not in result.summary
    assert "weight_sum" not in result.history[0]
    assert "update" not in capsys.readouterr().err


def test_that_all_is_skipped_is_told_once_and_at_the_end(tmp_path, capsys):
    data = regression(64)
    never = lambda weights, batch, rng: squared(weights, batch, rng) * np.nan  # noqa: E731
    result = fit(data, loss_fn=never, nonfinite="skip", workdir=tmp_path)
    np.testing.assert_array_equal(result.params, np.zeros(3))
    said, told = capsys.readouterr().err, "128 of 128 examples were skipped"
    assert said.count("round 0: none of its microbatches is finite, and nonfinite='skip'") == 1
    assert said.count("made no update") == 1
    assert f"{told}: their microbatches were not finite" in said
    assert "4 rounds made no update" in repr(result)
    assert "128 examples were skipped" in (tmp_path / "report.html").read_text()
    assert (result.summary["rounds_without_update"], result.summary["examples_skipped"]) == (4, 128)
