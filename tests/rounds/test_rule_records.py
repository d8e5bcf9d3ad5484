"""What a run writes down of its local rule, and which runs go on with which rule."""

import functools
import json
from typing import Annotated

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import parts
from hetjax.inputs import arguments
from hetjax.local import gradients
from hetjax.local import rules as rules_lib
from hetjax.zoo import config
from tests.own_parts import hessian_product, local_sgd
from tests.rounds import problems

DATA, WEIGHTS = problems.given(61)
STATIC = {"epochs": 2, "checkpoint": {"every_rounds": 1}, "quota": "equal"}
STATIC |= {"cluster": {"num_workers": 2}}
GIVEN = "given: tests.own_parts.local_sgd:local_sgd.<locals>.begin"
fit = functools.partial(problems.fit, DATA, WEIGHTS, **STATIC)
run = functools.partial(problems.run, DATA, **STATIC)


@parts.factory
def one_local_sgd(
    *, rate: Annotated[float, parts.number(above=0.0, says="of a step")] = 0.1
) -> hetjax.LocalRule:
    """Local SGD of one loss, which can be written down."""
    return local_sgd.local_sgd(problems.softmax_loss, optax.sgd(rate, momentum=0.9))


def without(rule):
    """The same, which adds up no loss."""
    return rule._replace(reads=rules_lib.Reads())


def closure():
    return local_sgd.local_sgd(problems.softmax_loss, optax.sgd(0.1, momentum=0.9))


def written(workdir):
    return json.loads((workdir / "config.json").read_text())["rule"]


stop = problems.press_ctrl_c(lambda line: line.round == 2)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_rule_alone(tmp_path):
    fit(workdir=tmp_path, callbacks=[stop], rule=one_local_sgd())
    name = "tests\\.rounds\\.test_rule_records:one_local_sgd"
    changes = (
        rf"\(rule\.arguments\.rate: 0\.1 there, None here; rule\.name: '{name}' there, 'gradient"
    )
    with pytest.raises(ValueError, match=rf"belongs to another configuration {changes}_sums' here"):
        fit(workdir=tmp_path)
    with pytest.raises(ValueError, match=r"rule\.arguments\.rate: 0\.1 there, 0\.2 here"):
        fit(workdir=tmp_path, rule=one_local_sgd(rate=0.2))
    result = fit(workdir=tmp_path, rule=one_local_sgd())
    assert result.summary["examples_processed"] == 2 * 61
    np.testing.assert_array_equal(result.params, fit(rule=one_local_sgd()).params)


def test_a_run_that_adds_up_gradients_goes_on_with_no_other_rule(tmp_path):
    """Also where it was recorded before rules were."""
    fit(workdir=tmp_path, callbacks=[problems.press_ctrl_c(lambda line: line.round == 1)])
    assert written(tmp_path) == {"name": "gradient_sums", "arguments": {}}
    path = tmp_path / "config.json"
    recorded = json.loads(path.read_text())
    for is_recorded in (True, False):
        if not is_recorded:
            del recorded["rule"]
            path.write_text(json.dumps(recorded))
            config.from_json(path)
        with pytest.raises(ValueError, match=rf"rule\.name: 'gradient_sums' there, '{GIVEN[:20]}"):
            fit(workdir=tmp_path, rule=closure())
    rule = gradients.gradient_sums(problems.softmax_loss)  # the default, given by hand
    result = fit(workdir=tmp_path, rule=rule)
    assert len(result.history) == len(fit().history)


@pytest.mark.slow
def test_a_recorded_configuration_runs_its_rule_again(tmp_path):
    first = fit(workdir=tmp_path / "written", rule=one_local_sgd(rate=0.05))
    again = config.from_json(tmp_path / "written" / "config.json")
    run = functools.partial(hetjax.fit, problems.softmax_loss, WEIGHTS, problems.SGD, DATA)
    result = run(config=again, progress=False)
    np.testing.assert_array_equal(result.params, first.params)
    with pytest.raises(ValueError, match=r"configuration names 'tests.*of {'rate': 0\.05} and"):
        run(config=again, rule=closure())
    fit(workdir=tmp_path / "given", rule=closure(), callbacks=[stop])
    again = config.from_json(tmp_path / "given" / "config.json")
    with pytest.raises(ValueError, match=r"rule\.name: got 'given.*Give the object again, as rule"):
        run(config=again)
    assert run(config=again, rule=closure(), progress=False).summary["examples_processed"] == 2 * 61


def test_a_run_that_steps_goes_on_with_its_own_rule_alone(tmp_path):
    fit(workdir=tmp_path, callbacks=[stop], rule=closure())
    with run(rule=closure()) as own:
        assert own.restore(tmp_path).rounds_done == 3
    for directory in (tmp_path, tmp_path / "checkpoints"):
        with run() as other, pytest.raises(ValueError, match="local rule"):
            other.restore(directory)
    message = rf"the local rule '{GIVEN[7:]}' of this workdir could not be written down"
    with pytest.raises(ValueError, match=message):
        fit(workdir=tmp_path)


def test_further_rules_are_recorded_by_name():
    more = {
        "product": hessian_product.hessian_product(problems.softmax_loss),
        "steps": one_local_sgd(),
    }
    given = arguments.configuration(None, {}, workers=1, more=more)
    assert given.recorded["rule"]["name"] == "gradient_sums"
    product, steps = given.recorded["rules"]["product"], given.recorded["rules"]["steps"]
    assert product["name"].startswith("given: tests.own_parts.hessian_product:hessian_product")
    assert steps == {
        "name": "tests.rounds.test_rule_records:one_local_sgd",
        "arguments": {"rate": 0.1},
    }
    changed = without(one_local_sgd())  # is not what the factory makes
    assert arguments.described_rule(changed)["name"] == GIVEN


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"name": "local_sgd"},
            r"rule\.name: got 'local_sgd', must be one of gradient_sums, .*, or 'module:function'",
        ),
        (
            {"arguments": {"rate": 1}},
            r"rule\.arguments: got {'rate': 1}, but 'gradient_sums' takes",
        ),
        ({"name": "no.such:rule"}, r"rule\.name: 'no\.such:rule' cannot be imported"),
        (
            {"name": "tests.rounds.test_rule_records:one_local_sgd", "arguments": {"rate": -1}},
            r"rule\.rate: got -1, must be a finite number above 0",
        ),
        ({"name": "hetjax.quota:equal"}, r"rule: got a QuotaPolicy"),
    ],
)
def test_a_wrong_rule_of_a_configuration_gets_a_message(rule, message):
    common = (problems.softmax_loss, WEIGHTS, optax.sgd(0.5), DATA)
    with pytest.raises(ValueError, match=message):
        hetjax.fit(*common, config=config.validate({"rule": rule}))


# --- A rule that adds up no loss ---


IDS = np.arange(24).reshape(2, 3, 4)


def without_loss(rate=0.1):
    return without(one_local_sgd(rate=rate))


def test_a_rule_without_a_loss_has_none_and_not_zero(tmp_path):
    lines = []
    made = {"eval_source": DATA, "optimizer": optax.sgd(1.0)}
    fit(workdir=tmp_path, rule=without_loss(), callbacks=[stop], **made)
    result = fit(workdir=tmp_path, rule=without_loss(), callbacks=[lines.append], **made)
    assert len(lines) < len(result.history)  # it went on
    assert all(np.isnan(line.loss) for line in lines)
    assert {line["loss"] for line in result.history} == {None}
    assert result.summary["train_loss"] is None
    assert "loss, last epoch  none\n" in str(result)
    page = (tmp_path / "report.html").read_text()
    assert "No round has a training loss" in page
    assert "rounds have no finite training loss" not in page
    assert "training, each round" not in page.split("<h2>Loss</h2>")[1].split("</section>")[0]
    saved = hetjax.load(tmp_path)
    assert saved.summary["train_loss"] is None
    assert {line["loss"] for line in saved.history} == {None}
    # What is evaluated is loss_fn, which there is; so there is a best, too.
    assert result.summary["test_loss"] == pytest.approx(
        hetjax.evaluate(result.params, DATA, metrics)["loss"], rel=1e-6
    )
    assert result.summary["best_test_loss"] <= result.summary["test_loss"]
    assert result.summary["judged_by"] == "test_loss"


def metrics(params, batch):
    return {"loss": problems.softmax_loss(params, batch, None)}


def test_kinds_of_rounds_have_a_loss_or_none_each_for_itself():
    product = hessian_product.hessian_product(problems.softmax_loss)
    for main, more in ((None, without_loss()), (without_loss(), None)):
        rules = {
            "product": product,
            "more": (more or closure())._replace(traits=rules_lib.Traits()),
        }
        with run(rule=main, rules=rules) as made:
            state, first = made.round(made.init())
            state, second = made.round(state, kind="product", given=WEIGHTS)
            state, third = made.round(state, kind="more")
        has_none = [np.isnan(report.read().loss) for report in (first, second, third)]
        assert has_none == [main is not None, True, more is not None]


def test_an_optimizer_that_goes_by_the_loss_needs_one_of_the_rule():
    message = r"rule: this optimizer needs the mean loss \(value\)"
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    for optimizer in (optax.polyak_sgd(), plateau):
        with pytest.raises(ValueError, match=message):
            fit(rule=without_loss(), optimizer=optimizer)
        assert np.isfinite(fit(rule=closure(), optimizer=optimizer).summary["train_loss"])


def test_a_step_of_ones_own_says_that_there_is_no_loss():
    given = np.array([3, 1], np.int32), jax.random.key(0)
    for rule, has_loss in ((closure(), True), (without_loss(), False)):
        step, *state = problems.own_step(IDS, DATA, WEIGHTS, optax.sgd(1.0), rule=rule)
        _, metrics, _ = jax.jit(step)(*state, *given)
        assert np.isfinite(metrics.loss_sum) == has_loss
        assert metrics.weight_sum == 16
    step, *_ = problems.own_step(IDS, DATA, WEIGHTS, optax.polyak_sgd(), rule=rule)
    with pytest.raises(ValueError, match="rule: this optimizer needs the mean loss"):
        jax.eval_shape(step, *state, *given)


# --- A rule of another loss than the run's ---


def other_loss(weights, batch, rng):
    return problems.softmax_loss(weights, batch, rng) * np.float32(2)


def test_a_rule_of_another_loss_than_the_runs_is_refused_at_the_start(tmp_path):
    message = r"^rule: its losses are not those of loss_fn"
    rules = [gradients.gradient_sums(other_loss), gradients.gradient_sums(other_loss)._replace()]
    rules[1] = rules[1]._replace(begin=lambda *given, own=rules[1].begin: own(*given))  # a closure
    for rule in rules:
        for call in (functools.partial(fit, workdir=tmp_path), run):
            with pytest.raises(ValueError, match=message):
                call(rule=rule)
    assert not (tmp_path / "config.json").exists()
    keys = gradients.gradient_sums(problems.softmax_loss, per_example_rng=True)
    with pytest.raises(ValueError, match=r"not those of loss_fn with per_example_rng=False"):
        run(rule=keys)
    step, *state = problems.own_step(IDS, DATA, WEIGHTS, optax.sgd(0.1), rule=rules[0])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, *state, np.array([3, 1], np.int32), jax.random.key(0))


def test_the_same_loss_written_otherwise_is_the_runs():
    def again(weights, batch, rng):
        return problems.softmax_loss(weights, batch, rng)

    result = fit(rule=gradients.gradient_sums(again))
    np.testing.assert_array_equal(result.params, fit().params)
    measured = {"loss_fn": problems.measured_softmax_loss}
    rule = gradients.gradient_sums(
        lambda *given: problems.measured_softmax_loss(*given), metrics=("each", "accuracy", "again")
    )
    result, plain = fit(rule=rule, **measured), fit(**measured)
    np.testing.assert_array_equal(result.params, plain.params)
    assert result.summary["train_accuracy"] == plain.summary["train_accuracy"]


@pytest.mark.slow
def test_a_rule_that_has_no_loss_of_the_runs_is_known_by_its_programs(tmp_path, capsys):
    def sgd(loss_fn=problems.softmax_loss, rate=0.1):
        return local_sgd.local_sgd(loss_fn, optax.sgd(rate, momentum=0.9))

    fit(workdir=tmp_path, callbacks=[stop], rule=sgd())
    for other in (sgd(other_loss), sgd(rate=0.2)):
        with pytest.raises(ValueError, match=r"local rule computes something else, or with other"):
            fit(workdir=tmp_path, rule=other)
    capsys.readouterr()
    fit(workdir=tmp_path, rule=sgd(other_loss), resume="force", callbacks=[stop])
    assert "going on all the same" in capsys.readouterr().err
    # The run keeps what it began with: the same rule, made anew.
    whole = fit(workdir=tmp_path / "whole", rule=sgd())
    fit(workdir=tmp_path / "cut", rule=sgd(), callbacks=[stop])
    np.testing.assert_array_equal(fit(workdir=tmp_path / "cut", rule=sgd()).params, whole.params)
