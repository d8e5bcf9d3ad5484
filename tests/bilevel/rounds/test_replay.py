"""`fit_bilevel` that replays the rounds of another run."""

import json

import pytest

from tests.bilevel.rounds import problems
from tests.bilevel.rounds.test_fitting import SPEEDS, fit, json_lines

STEPPED = {"cluster": {"num_workers": 4}, "local": "stepped"}


@pytest.mark.slow
def test_a_trace_is_replayed_bit_for_bit(tmp_path):
    noisy = {**SPEEDS, "delay_cv": 0.5, "delay": "exponential"}
    budgets = {"lower": {"budget": 8}, "upper": {"budget": 8}}
    gate = {"trigger": "first"}
    first = fit(steps=4, cluster=noisy, gate=gate, workdir=tmp_path / "run", **budgets)
    again = fit(steps=4, gate=gate, replay=tmp_path / "run", **STEPPED, **budgets)
    assert [line["quotas"] for line in first.rounds] == [line["quotas"] for line in again.rounds]
    assert problems.distance(first.params, again.params) < 1e-5


def test_a_trace_that_ends_ends_the_run(tmp_path, capsys):
    fit(steps=2, workdir=tmp_path)
    again = fit(steps=4, replay=tmp_path, **STEPPED)
    assert again.summary["outer_steps"] == 2
    assert again.summary["interrupted"]  # as `fit` has it
    assert "ends after 2 outer steps; so does this run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trace_that_leaves_out_a_part_of_a_held_batch_is_refused(tmp_path):
    options = {"lower": {"budget": 6}, **STEPPED}
    fit("cg", steps=1, workdir=tmp_path, **options)
    path = tmp_path / "lower_rounds.jsonl"
    lines = json_lines(path)
    held = next(line for line in lines if not line["is_new"])
    busiest = max(range(4), key=lambda worker: held["quotas"][worker])
    for name in ("quotas", "microbatches_done"):
        held[name][busiest] -= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"replay: round .* has quotas"):
        fit("cg", steps=1, replay=tmp_path, **options)
