"""`fit_bilevel`: what it counts, writes, keeps and goes on from."""

import json
import signal

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import bilevel
from hetjax.report import __main__ as report_command
from tests.bilevel.rounds import problems

SPEEDS = {"num_workers": 4, "secs_per_microbatch": (1.0, 2.0, 4.0, 8.0), "clock": "virtual"}


TX = optax.sgd(0.2, momentum=0.5)
QUIET = {"progress": False, "loss_over": "microbatch", "raise_on_interrupt": False}


def fit(name="value_gap", steps=4, *, problem=None, estimator=None, tx=TX, **fields):
    made, x, y, made_estimator = problems.given(name)
    options = dict(zip(("upper_source", "lower_source"), problems.sources(), strict=True))
    options |= {"outer_steps": steps, "microbatch_size": 2, "local": "virtual", "cluster": SPEEDS}
    options |= QUIET | fields
    return hetjax.fit_bilevel(
        problem or made, options.pop("x", x), y, estimator or made_estimator, tx, **options
    )


def same(a, b):
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(np.array_equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("gate", ["none", {"trigger": "quorum", "quorum": 4}])
def test_each_example_once_a_pass_and_as_often_as_its_batch_is_held(float64, gate):
    result = fit("cg", steps=5, gate=gate, lower={"budget": 6}, upper={"budget": 4})
    for level in ("upper", "lower"):
        counted = result.summary["levels"][level]
        assert counted["examples_missing"] == counted["examples_duplicated"] == 0
    lines = [line for line in result.rounds if line["level"] == "lower"]
    by_step = [[line for line in lines if line["step"] == step] for step in range(5)]
    for of_step in by_step:
        held = [line for line in of_step if not line["is_new"]]
        assert len(held) == 4  # two products more, and the cross product, of the system's batch
        assert {line["examples"] for line in held} == {of_step[-len(held) - 1]["examples"]}
    revisits = sum(line["examples"] for line in lines if not line["is_new"])
    assert result.summary["levels"]["lower"]["examples_revisited"] == revisits
    visits = np.asarray(result.state.lower.revisits)
    assert visits.sum() == revisits
    new = sum(line["examples"] for line in lines if line["is_new"])
    assert result.summary["levels"]["lower"]["examples_processed"] == new
    for line in result.rounds:  # a request that asks for no loss has none, and not 0
        assert (line["loss"] is None) == line["request"].startswith("product")


@pytest.mark.slow
def test_without_a_budget_every_private_shard_has_a_part():
    fields = {"data": {"sharing": "private"}, "microbatch_size": 16}
    result = fit(steps=2, **fields)  # 42 and 30 examples are 3 and 2 microbatches, of 4 workers
    for level in ("upper", "lower"):
        assert result.config[level]["budget"] >= 4
        assert all(all(line["quotas"]) for line in result.rounds if line["level"] == level)


@pytest.mark.slow
def test_no_gate_closes_a_round_of_a_held_batch():
    noisy = {**SPEEDS, "delay_cv": 1.0, "delay": "exponential"}
    budgets = {"lower": {"budget": 8}, "upper": {"budget": 8}}
    result = fit("cg", steps=3, gate={"trigger": "first"}, cluster=noisy, **budgets)
    held = [line for line in result.rounds if not line["is_new"]]
    assert held
    assert all(line["microbatches_done"] == line["quotas"] for line in held)
    new = [line for line in result.rounds if line["is_new"]]
    assert any(line["microbatches_done"] != line["quotas"] for line in new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "name"),
    [({"reducer": "d_psgd"}, "value_gap"), ({"data": {"sharing": "private"}}, "worst")],
    ids=["gossip", "private"],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, name, fields):
    """Stopped by a callback, then asked for one step more, interrupted, and gone on with."""
    options = {"lower": {"budget": 5}, "upper": {"budget": 4}, **fields}
    whole = fit(name, steps=5, **options)

    def stop(report):
        return report.step == 1

    begun = fit(name, steps=4, workdir=tmp_path, callbacks=[stop], **options)
    assert begun.summary["outer_steps"] == 2
    assert begun.summary["stopped_by"] == "callback stop"
    seen = []
    cut = fit(name, steps=5, workdir=tmp_path, callbacks=[seen.append, interrupt], **options)
    assert cut.summary["stopped_by"] == "SIGINT"
    assert cut.summary["outer_steps"] == 3
    again = fit(name, steps=5, workdir=tmp_path, callbacks=[seen.append], **options)
    assert again.summary["outer_steps"] == 5
    assert [report.step for report in seen] == [2, 3, 4]  # what was done is not done again
    assert [each["round"] for each in again.summary["resumed"]] == [2, 3]
    assert same(whole, again)
    losses = [[line["upper_loss"] for line in run.history] for run in (whole, again)]
    assert losses[0] == losses[1]
    assert again.summary["levels"] == whole.summary["levels"]
    lines = [line["quotas"] for line in whole.rounds if line["level"] == "lower"]
    assert [line["quotas"] for line in json_lines(tmp_path / "lower_rounds.jsonl")] == lines


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt(report):
    if report.step == 2:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_the_files_of_a_workdir(tmp_path):
    of_upper, _ = problems.sources()

    def metrics(y, batch):
        return {"error": (batch["inputs"] @ y["slope"] - batch["targets"]) ** 2}

    def callback(report):
        seen.append((report.step, np.shape(report.y()["slope"])))

    seen, judged = [], {"eval_source": of_upper, "metrics_fn": metrics, "eval_every": 2}
    result = fit(steps=4, workdir=tmp_path, callbacks=[callback], **judged)
    assert seen == [(step, (3,)) for step in range(4)]
    kept = (
        "config.json metrics.jsonl upper_rounds.jsonl lower_rounds.jsonl summary.json report.html"
    )
    assert {path.name for path in tmp_path.iterdir()} >= {*kept.split(), "checkpoints"}
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["eval" in line for line in lines] == [False, True, False, True]
    assert sum(line["rounds"] for line in lines) == len(result.rounds)
    losses = [line["upper_loss"] for line in lines]
    assert losses[-1] < losses[0]
    loaded = hetjax.load(tmp_path)
    np.testing.assert_array_equal(loaded.params["x"]["weight"], result.x["weight"])
    np.testing.assert_array_equal(loaded.best_params["y"]["slope"], result.best_y["slope"])
    assert "outer steps" in repr(loaded)
    assert "outer steps" in repr(result)
    page = (tmp_path / "report.html").read_text()
    for text in ("Where the time goes", "Quotas: lower level, gradient in y", "Test error"):
        assert text in page or text.lower() in page
    report_command.main([str(tmp_path), f"--out={tmp_path / 'again.html'}"])
    assert (tmp_path / "again.html").read_text() == page
    assert "Who computes" not in result._repr_html_()  # a card, not the report
    assert "the upper loss" in result._repr_html_()


@pytest.mark.slow
def test_other_workers_go_on(tmp_path):
    first = fit(steps=2, workdir=tmp_path)
    assert first.summary["num_workers"] == 4
    others = {"num_workers": 2, "secs_per_microbatch": (1.0, 3.0), "clock": "virtual"}
    second = fit(steps=4, workdir=tmp_path, cluster=others)
    assert second.summary["num_workers"] == 2
    assert second.summary["outer_steps"] == 4
    assert problems.distance(fit(steps=4).params, second.params) < 1e-5
    for level in ("upper", "lower"):
        counted = [line["round"] for line in second.rounds if line["level"] == level]
        assert counted == list(range(len(counted)))


@pytest.mark.slow
def test_another_quota_policy_begins_anew_in_one_level(tmp_path, capfd):
    def fields(policy):
        return {"quota": "equal", "lower": {"quota": policy}}

    static = {"policy": "static", "proportions": (4, 3, 2, 1)}
    fit(steps=4, workdir=tmp_path, callbacks=[interrupt], **fields(static))
    result = fit(steps=4, workdir=tmp_path, **fields("adaptive"))
    assert capfd.readouterr().err.count("quota.policy='adaptive' begins anew") == 1
    levels = result.summary["levels"]
    assert [levels[name]["examples_missing"] for name in ("upper", "lower")] == [0, 0]


@pytest.mark.slow
def test_something_else_is_not_gone_on_with(tmp_path):
    """The first hypergradient of the cold start is the same as that of the run."""
    fit("reverse", steps=4, workdir=tmp_path, callbacks=[interrupt])
    of_upper, _ = problems.sources(seed=1)
    for other, message in (
        ({"estimator": bilevel.unroll(problems.LOWER, 3, start="cold")}, "the estimator does some"),
        ({"upper_source": of_upper}, "the upper data hold other values"),
        ({"tx": optax.sgd(0.3, momentum=0.5)}, "the optimizer updates otherwise"),
    ):
        with pytest.raises(ValueError, match=message):
            fit("reverse", steps=4, workdir=tmp_path, **other)


def test_bytes_are_those_of_the_sums():
    result = fit("value_gap", steps=1, reducer="all_reduce")
    of_lower = [line for line in result.rounds if line["level"] == "lower"]
    sizes = {line["request"]: line["bytes_sent"] for line in of_lower}
    copies = 2 * (4 - 1)  # a sum round a ring: 2 (n - 1) / n of a vector, by each of n
    assert sizes["gradient in y"] == copies * 4 * (4 + 1)  # y has 4 numbers, and there is a loss
    assert sizes["gradient in x"] == copies * 4 * (1 + 1)  # of x the ridge alone
    rows = copies * 4 * problems.NUM_LOWER  # the rows meet once an outer step
    total = sum(line["bytes_sent"] for line in result.rounds) + rows
    assert result.history[0]["bytes_sent"] == total


def test_a_batch_that_is_held_must_fit_those_who_are_there():
    gone = {**SPEEDS, "changes": [{"round": 3, "worker": w, "present": False} for w in (1, 2, 3)]}
    with pytest.raises(ValueError, match=r"lower level: budget: got 12.* 1 workers .* hold 3"):
        fit("cg", cluster=gone, quota={"max_microbatches": 3}, lower={"budget": 12}, budget=12)


@pytest.mark.parametrize("name", ["bvfim", "reptile"])
def test_every_kind_of_estimator_has_its_lines(name, capsys):
    result = fit(name, steps=2, progress=True)
    assert len(result.history) == 2
    asks_upper = name != "reptile"  # which differentiates nothing, and never looks at F
    assert (result.history[0]["upper_loss"] is not None) == asks_upper
    assert (result.summary.get("best_step") is not None) == asks_upper
    assert ("F " in (bar := capsys.readouterr().err), "nan" in bar) == (asks_upper, False)


def test_fields_of_no_effect_may_differ_when_a_run_goes_on(tmp_path):
    fit(steps=4, workdir=tmp_path, callbacks=[interrupt])
    result = fit(steps=4, workdir=tmp_path, data={"feed": "resident"}, loss_over="auto")
    assert result.summary["outer_steps"] == 4
    with pytest.raises(ValueError, match=r"upper.ordering.method: .* there"):
        fit(steps=6, workdir=tmp_path, upper={"ordering": "shuffle_once"})


DOWNHILL = bilevel.Bilevel(problems.upper, lambda x, y, batch: -problems.lower(x, y, batch)[0])


@pytest.mark.slow
def test_a_hypergradient_that_is_none_is_refused():
    with pytest.raises(ValueError, match="outer step 0: implicit: the lower loss has"):
        fit("cg", steps=2, problem=DOWNHILL)
    # Every sum is finite; their difference times the multiplier is not.
    estimator = bilevel.value_gap(problems.LOWER, 2, upper_steps=0, multiplier=3e38)
    x = {**problems.start()[0], "ridge": np.full(1, 3.0)}
    with pytest.raises(hetjax.NonFiniteError, match=r"outer step .*: the hypergradient is not"):
        fit(steps=2, estimator=estimator, x=x, tx=optax.sgd(0.1))


def test_x_is_judged_where_its_optimiser_says(float64, tmp_path, capfd):
    free = optax.contrib.schedule_free_sgd(0.2)
    result = fit(tx=free, workdir=tmp_path)
    assert "evaluated and returned: schedule_free_eval_params of" in capfd.readouterr().err
    opt, x = jax.tree.map(lambda leaf: np.asarray(leaf)[0], (result.state.opt, result.state.x))
    point = optax.contrib.schedule_free_eval_params(opt, x)
    for found in (result, hetjax.load(tmp_path)):
        for a, b in zip(*map(jax.tree.leaves, (found.params["x"], point)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    assert not np.allclose(jax.tree.leaves(point)[0], jax.tree.leaves(x)[0])
