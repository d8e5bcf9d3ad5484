"""A run that steps: equal to `fit`, and strict about the states that it is given."""

import jax
import numpy as np
import pytest

import hetjax
from hetjax import quota
from tests.own_parts import hessian_product, local_sgd
from tests.rounds import problems

FIELDS = {
    "epochs": 2,
    "ordering": {"method": "d_grab"},
    "cluster": {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"},
}


LOCAL_SGD = local_sgd.local_sgd(problems.softmax_loss, problems.SGD)


def make(num_examples=61, **fields):
    return problems.run(num_examples, **{**FIELDS, **fields})


def step(run, state, rounds=None):
    """(state, reports) after so many rounds, or all."""
    reports = []
    while not run.done(state) and (rounds is None or len(reports) < rounds):
        state, report = run.round(state)
        reports.append(report)
    return state, reports


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_rounds_by_hand_are_those_of_fit(local):
    fitted = problems.train(61, local=local, **FIELDS)
    with make(local=local) as run:
        state, reports = step(run, run.init())
        np.testing.assert_array_equal(run.params(state)[0], fitted.params)
    lines = [report.read() for report in reports]
    losses = [line["loss"] for line in fitted.history]
    assert [line.loss for line in lines] == pytest.approx(losses, rel=1e-8)
    for name in ("quotas", "microbatches_done", "examples_processed", "epoch", "bytes_sent"):
        assert [each.to_plain()[name] for each in lines] == [line[name] for line in fitted.history]


def test_a_spent_state_is_refused_and_nothing_is_computed():
    with make() as run:
        first = run.init()
        second, _ = run.round(first)
        before = jax.device_get(second.train)
        with pytest.raises(ValueError, match=r"spent.*generation 0.*newest is 1"):
            run.round(first)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.train), before)
        run.round(second)


def test_what_is_no_state_of_the_run_is_refused():
    with make() as run, make() as other:
        with pytest.raises(ValueError, match="another run's"):
            run.round(other.init())
        with pytest.raises(ValueError, match=r"got a dict.*init, restore"):
            run.round({"params": 0})


def test_states_of_two_beginnings_do_not_disturb_each_other():
    with make() as run:
        (one, _), (alone, _) = step(run, run.init(), 3), step(run, run.init())
        one, _ = step(run, one)
        np.testing.assert_array_equal(run.params(one)[0], run.params(alone)[0])


def test_a_report_waits_when_it_is_read_and_knows_what_fit_tells():
    with make() as run:
        state, report = run.round(run.init())
        line = report.read()
        assert line.round == 0
        assert sum(line.workers.microbatches_done) == 8
        assert line.times.round_secs == max(line.workers.compute_secs)  # of the virtual clock
        assert report.read() is line
        _, following = run.round(state)
        assert following.read().counts.examples_processed == 64 - 3


def test_a_round_ends_when_the_next_begins():
    with make(cluster={"num_workers": 4}) as run:
        state, report = run.round(run.init())
        state, _ = run.round(state)
        secs = report.read().times.round_secs
        run.round(state)
        assert report.read().times.round_secs == secs > 0


def test_a_round_that_is_not_finite_is_told_by_the_next():
    data = problems.classification(64, np.float32)
    data["x"][:] = np.nan
    with make(data) as run:
        state, _ = run.round(run.init())
        with pytest.raises(hetjax.NonFiniteError, match="round 0: the loss or a gradient"):
            run.round(state)


@pytest.mark.parametrize("reducer", ["all_reduce", "matcha"])
def test_a_run_goes_on_from_the_checkpoint_that_fit_left(reducer, tmp_path):
    method = "d_grab" if reducer == "all_reduce" else "pair_balance"
    fields = {"ordering": {"method": method}, "reducer": {"name": reducer}}
    fields = {**FIELDS, "epochs": 4, **fields}
    stop = problems.press_ctrl_c(lambda line: line.round == 3)
    problems.train(61, workdir=tmp_path, callbacks=[stop], **fields)
    with make(**fields) as run:
        whole, _ = step(run, run.init())
        state = run.restore(tmp_path)
        assert state.rounds_done == 5
        state, _ = step(run, state)
        np.testing.assert_array_equal(run.params(state)[0], run.params(whole)[0])
        with pytest.raises(ValueError, match="no whole checkpoint"):
            run.restore(tmp_path / "elsewhere")


def counting():
    """A policy of equal quotas that knows how many rounds it has seen."""

    def assign(rounds, total, caps):
        return quota.largest_remainder(np.ones(len(caps)), total, caps=caps), rounds

    return quota.QuotaPolicy(lambda workers, budget: 0, assign, lambda rounds, times: rounds + 1)


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_kinds_of_rounds_have_a_rule_and_a_policy_of_their_own(local, float64):
    """A Hessian product between two updates; the policy learns each kind by itself."""
    data, weights = problems.given()
    product = hessian_product.hessian_product(problems.weighted_softmax_loss)
    fields = {"quota": counting(), "ordering": {}, "local": local, "rules": {"product": product}}
    with make(64, **fields) as run:
        state, _ = run.round(run.init())
        params, vector = run.params(state)[0], np.random.default_rng(1).normal(size=weights.shape)
        state, report = run.round(state, kind="product", given=vector)
        ids = report.done.example_ids.reshape(-1)
        batch = {name: leaf[ids] for name, leaf in data.items()}

        def mean(params):
            losses, amounts = problems.weighted_softmax_loss(params, batch, None)
            return (losses * amounts).sum() / amounts.sum()

        right = jax.jvp(jax.grad(mean), (jax.device_get(params),), (vector,))[1]
        np.testing.assert_allclose(np.asarray(report.mean)[0], right, rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(run.params(state)[0], params)
        state, _ = run.round(state)
        state, _ = run.round(state, kind="product", given=2 * vector)
        state, _ = run.round(state)
        assert state.rounds.policies == {"main": 3, "product": 2}
        assert state.stream.examples_processed == 5 * 32
        with pytest.raises(ValueError, match=r"kind is 'prod'; this run has main, product"):
            run.round(state, kind="prod")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ordering": {"method": "d_grab"}}, r"rules: product find no signs"),
        ({"rules": {"main": None}}, r"rules: 'main' is the run"),
        ({"rules": {"own": LOCAL_SGD}}, r"rules: 'own' keeps"),
    ],
)
def test_kinds_of_rounds_that_a_run_cannot_have_are_refused(fields, message):
    product = {"product": hessian_product.hessian_product(problems.softmax_loss)}
    with pytest.raises(ValueError, match=message):
        make(**{"ordering": {}, "rules": product, **fields})


def test_a_batch_is_done_again_by_other_quotas_with_the_same_sum():
    product = hessian_product.hessian_product(problems.softmax_loss)
    fields = {"ordering": "random_reshuffling", "quota": quota.adaptive()}
    with make(rules={"product": product}, **fields) as run:
        vector = problems.initial_weights(np.float32)
        state = run.init()
        for _ in range(3):  # the clocks tell who is slow
            state, _ = run.round(state)
        state, first = run.round(state, kind="product", given=vector)
        held, mean, stream = first.done, np.asarray(first.mean)[0], state.stream
        for _ in range(3):
            state, again = run.round(state, kind="product", given=vector, again=held)
        assert again.read().quotas != first.read().quotas
        assert again.read().counts.examples == first.read().counts.examples
        np.testing.assert_allclose(np.asarray(again.mean)[0], mean, rtol=1e-5, atol=1e-7)
        assert state.stream is stream  # no example of the order was taken, none was counted
        others = held._replace(example_ids=np.tile(held.example_ids, (9, 1)))
        with pytest.raises(ValueError, match=r"again: got 72 microbatches"):
            run.round(state, again=others)
