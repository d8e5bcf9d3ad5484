"""What smaller microbatches would save: by hand, and in the words that a person reads."""

import numpy as np
import optax
import pytest

import hetjax
from hetjax import quota
from hetjax.quota import finer
from hetjax.report import words

SPEEDS_4_2_1_1 = (1.0, 2.0, 4.0, 4.0)
DATA = {"x": np.linspace(-1.0, 1.0, 960, dtype=np.float32)}
LOG = (
    "hetjax: microbatches are too large to divide well among the workers. By their measured speeds "
    "the best quotas, 3 1 0 0, take 3.00 s a round. microbatch_size=2, budget=8 would save 33% of "
    "that for the same 16 examples, if half as many take half as long: hetjax.tune_microbatch "
    "measures it. Or budget=8 alone saves 33% of an example's time, at 32 examples an update\n"
)


def costs(secs, overhead=0.0):
    return quota.WorkerCosts(overhead, secs)


def test_four_microbatches_for_four_workers_by_hand():
    """As 3 1 0 0 they take 3; eight halves as 4 2 1 1 take 2, and quarters no less."""
    found = finer.advice(costs(SPEEDS_4_2_1_1), 4)
    assert found == ((3, 1, 0, 0), 3.0, 2, pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_a_larger_budget_also_shares_the_overhead_of_a_round():
    """By hand: (1 + 3) a round; halves 1 + 2; twice as many 1 + 4 for twice the examples."""
    found = finer.advice(costs(SPEEDS_4_2_1_1, 1.0), 4)
    assert found.saved == pytest.approx(1 / 4)
    assert found.saved_by_budget == pytest.approx(3 / 8)


def test_eight_microbatches_at_their_shares_need_nothing():
    assert finer.advice(costs(SPEEDS_4_2_1_1), 8) is None


def test_what_saves_less_than_a_tenth_is_not_said():
    """2 2 2 2 takes 2.4 and 2.04; divided at will eight take 2.09 and 2.01."""
    assert finer.advice(costs((1.0, 1.0, 1.0, 1.2)), 8) is not None
    assert finer.advice(costs((1.0, 1.0, 1.0, 1.02)), 8) is None


def test_a_size_is_halved_as_often_as_it_is_even():
    assert finer.advice(costs((2.0, 3.0)), 2, most=1) is None
    assert finer.advice(costs((2.0, 3.0)), 2, most=2) is None  # 2 2 halves take 3.0, as before
    assert finer.advice(costs((2.0, 3.0)), 2, most=4).divisor == 4  # 5 3 quarters take 2.5


def test_costs_are_medians_of_the_rounds_in_which_a_worker_computed():
    done = np.array([[2, 1], [2, 0], [4, 1]])
    secs = np.array([[2.0, 3.0], [8.0, 0.0], [4.0, 5.0]])
    host = np.array([[0.1, 0.2], [0.3, 9.0], [0.2, 0.4]])
    found = finer.measured(done, secs, host)
    np.testing.assert_allclose(found.secs_per_microbatch, [1.0, 4.0])
    np.testing.assert_allclose(found.overhead_secs, [0.2, 0.3])
    assert finer.measured(done * [1, 0], secs, host) is None  # one was never seen


def train(secs, budget, *, rounds=60, **fields):
    return hetjax.fit(
        lambda params, batch, rng: (batch["x"] * params - 1.0) ** 2,
        np.float32(0.5),
        optax.sgd(0.01),
        DATA,
        epochs=20,
        max_rounds=rounds,
        microbatch_size=4,
        budget=budget,
        local="virtual",
        cluster={"secs_per_microbatch": secs},
        progress=False,
        **fields,
    )


def test_after_fifty_rounds_a_line_says_it_once_and_the_report_too(capsys, tmp_path):
    result = train((1.0, 2.0, 4.0, 4.0), 4, workdir=tmp_path)
    assert capsys.readouterr().err == LOG
    assert result.summary["finer"]["divisor"] == 2
    told = LOG.removeprefix("hetjax: m").strip()
    assert f"M{told}." in (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    assert words.finer(result.summary) == f"m{told}"


def test_before_fifty_rounds_nothing_is_said(capsys):
    result = train((1.0, 2.0, 4.0, 4.0), 4, rounds=39)
    assert capsys.readouterr().err == ""
    assert "finer" not in result.summary


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 8},
        {"budget": 4, "quota": "equal"},
        {"budget": 4, "quota": quota.static([4, 2, 1, 1])},
        {"budget": 4, "gate": {"trigger": "first"}},
        {"budget": 4, "data": {"sharing": "private"}},
    ],
    ids=["fits", "equal", "static", "gate", "private"],
)
def test_where_smaller_microbatches_cannot_help_nothing_is_said(fields, capsys):
    result = train((1.0, 2.0, 4.0, 4.0), **fields)
    assert "too large to divide" not in capsys.readouterr().err
    assert "finer" not in result.summary
