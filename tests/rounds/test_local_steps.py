"""Steps of one's own: what they are equal to, where unequal numbers of them lead, what is said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import quota
from hetjax.config import experiment
from tests.own_parts import local_sgd
from tests.rounds import problems

FORMS = ("stepped", "fused", "virtual")
LOSSES = {"plain": problems.softmax_loss, "weighted": problems.weighted_softmax_loss}
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


def steps(rate=1.0, **options):
    return hetjax.local_steps({"name": "sgd", "learning_rate": rate}, **options)


def one_each(rule, optimizer, **fields):
    """A run in which each worker takes one step a round."""
    fields = {"budget": 4, "quota": "equal", "epochs": 2, **fields}
    return problems.train(61, rule=rule, optimizer=optimizer, **fields)


# --- What they are equal to ---


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_one_step_each_is_all_reduce(form, loss, float64):
    """By examples' weights, too; the last round of an epoch is not full."""
    fields = {"loss_fn": LOSSES[loss], "local": form}
    found = one_each(steps(), optax.sgd(0.3), **fields)
    plain = one_each(None, optax.sgd(0.3), **fields)
    close(found.params, plain.params)
    close([line["loss"] for line in found.history], [line["loss"] for line in plain.history])


@pytest.mark.parametrize("form", FORMS)
def test_frozen_arrays_and_values_reach_the_steps(form, float64):
    square = np.random.default_rng(1).normal(size=(problems.FEATURES, problems.FEATURES))

    def loss(params, batch, rng, *, frozen, values):
        batch = {**batch, "x": batch["x"] @ frozen["w"]}
        return problems.softmax_loss(params, batch, rng) + values["beta"] * jnp.sum(params**2)

    fields = {"loss_fn": loss, "local": form, "frozen": {"w": square}}
    fields["values"] = lambda progress: {"beta": 0.1 / (1.0 + progress)}
    found = one_each(steps(), optax.sgd(0.3), **fields)
    close(found.params, one_each(None, optax.sgd(0.3), **fields).params)


def called_back(params, batch, rng):
    """Its callback says nothing of an axis, so it must not be called over one."""
    losses = problems.softmax_loss(params, batch, rng)
    shape = jax.ShapeDtypeStruct(losses.shape, losses.dtype)
    same = jax.pure_callback(np.asarray, shape, jax.lax.stop_gradient(losses))
    return losses + same - jax.lax.stop_gradient(losses)


@pytest.mark.parametrize("rule", ["gradients", "steps", "own"])
@pytest.mark.parametrize("form", ["stepped", "fused"])
def test_the_loss_of_a_worker_is_called_over_no_axis(form, rule, float64):
    made = {"steps": steps(0.1), "own": local_sgd.local_sgd(called_back, optax.sgd(0.1))}
    found = [
        problems.train(16, loss_fn=loss, rule=each, local=form, epochs=1, quota="equal").params
        for loss, each in (
            (called_back, made.get(rule)),
            (problems.softmax_loss, steps(0.1) if rule in made else None),
        )
    ]
    close(found[0], found[1])


def test_the_outer_optimizer_may_look_ahead(float64):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    found = one_each(steps(0.2), outer)
    close(found.params, one_each(None, optax.sgd(0.14, momentum=0.9, nesterov=True)).params)


def test_one_worker_is_lookahead(float64):
    data, weights = problems.given(64)
    one = {"cluster": {"num_workers": 1}, "budget": 8}
    found = problems.train(64, rule=steps(0.2), optimizer=optax.sgd(0.4), epochs=1, **one)
    with problems.run(64, **one) as plain:
        order = plain.init().stream.passes[0].remaining.copy()
    lookahead = optax.lookahead(optax.sgd(0.2), sync_period=8, slow_step_size=0.4)
    params = optax.LookaheadParams.init_synced(jnp.asarray(weights))
    state = lookahead.init(params)
    for ids in order.reshape(-1, 4):
        batch = {name: leaf[ids] for name, leaf in data.items()}
        grads = jax.grad(lambda w, b=batch: problems.softmax_loss(w, b, None).mean())(params.fast)
        updates, state = lookahead.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    close(found.params, params.slow)


@pytest.mark.parametrize("reducer", ["d_psgd", "matcha", "ring"])
def test_weights_that_are_equal_give_equal_runs(reducer, float64):
    """Where no weights, shards or quotas differ; all rounds are full."""
    fields = {"reducer": reducer, "quota": "equal", "budget": 8, "epochs": 2}
    runs = [
        problems.train(64, rule=steps(0.2, weights=each), optimizer=optax.sgd(1.0), **fields)
        for each in ("loss", "uniform", "fednova", lambda steps, examples, weight: 3 * steps)
    ]
    for other in runs[1:]:
        close(other.params, runs[0].params)


# --- What is told, and what is refused ---


def test_the_loss_of_the_report_is_over_examples_whatever_the_weights(float64):
    fields = {"loss_fn": problems.weighted_softmax_loss, "optimizer": optax.sgd(1e-30)}
    fields |= {"quota": problems.scripted([5, 2, 1, 0]), "epochs": 1}
    losses = [
        [line["loss"] for line in problems.train(64, rule=rule, **fields).history]
        for rule in (None, steps(1e-30, weights="uniform"), steps(1e-30, weights="fednova"))
    ]
    close(losses[1], losses[0])
    close(losses[2], losses[0])


def test_a_rounds_mean_steps_reach_the_optimizer(float64):
    told = []

    def update(updates, state, params=None, *, mean_steps, mean_examples, **more):
        jax.debug.callback(lambda *x: told.append([float(y) for y in x]), mean_steps, mean_examples)
        return updates, state

    noting = optax.GradientTransformationExtraArgs(lambda params: (), update)
    fields = {"quota": problems.scripted([5, 2, 1, 0]), "epochs": 1, "local": "virtual"}
    problems.train(64, rule=steps(0.1), optimizer=optax.chain(noting, optax.sgd(1.0)), **fields)
    told = {each for each in map(tuple, told) if each[1]}  # warming up has no examples
    assert told == {(8 / 3, 32 / 3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((optax.lbfgs(),), "inner needs more than a gradient"),
        (("adam",), r"inner: got .*missing 1 required positional argument: 'learning_rate'"),
        (({"name": "adamm", "learning_rate": 1},), "optax has no optimiser 'adamm'"),
        ((3,), r"inner: got 3, must be an optax optimiser, or {'name'"),
        ((optax.sgd(0.1), "equal"), r"weights: got 'equal', must be one of loss, uniform, fednova"),
        ((optax.adam(0.1), "fednova"), "needs an inner optimiser that goes twice as far"),
    ],
)
def test_what_is_wrong_gets_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        hetjax.local_steps(*arguments)


KEPT = {  # what a round leaves of them changes how far the next one goes
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "slow schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 10_000)),
    "late schedule": optax.sgd(optax.piecewise_constant_schedule(0.1, {1000: 0.1})),
    "trace": optax.chain(optax.trace(0.5), optax.scale(-0.1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_fednova_keeps_no_state(name):
    with pytest.raises(ValueError, match=r"by how far a fresh inner optimiser goes.* keep=False"):
        hetjax.local_steps(KEPT[name], "fednova")
    hetjax.local_steps(KEPT[name], "fednova", keep=False)
    hetjax.local_steps(optax.sgd(0.1), "fednova")


def test_an_order_that_needs_signs_is_refused():
    with pytest.raises(ValueError, match="the order balances gradients, and the rule has none"):
        problems.train(64, rule=steps(0.1), ordering="d_grab", epochs=1)


def test_a_microbatch_that_is_not_finite_leaves_the_workers_steps_as_they_were(float64):
    data, weights = problems.given(64)
    data["x"][::16] = np.nan
    fields = {"rule": steps(0.1), "optimizer": optax.sgd(1.0), "epochs": 1, "nonfinite": "skip"}
    result = problems.fit(data, weights, **fields)
    assert np.isfinite(result.params).all()
    assert sum(line["skipped_examples"] for line in result.history) in (4, 8, 12, 16)


# --- In each form, behind gates, and with other workers ---


def test_forms_take_the_same_steps(float64):
    """In the array form workers whose quota is done leave the call. The last microbatch is half
    full."""
    counts = [7, 4, 2, 1]
    fields = {"quota": problems.scripted(counts), "budget": sum(counts), "epochs": 2}
    found = {
        form: problems.train(
            110, rule=steps(0.1, weights="uniform"), optimizer=optax.sgd(1.0), local=form, **fields
        )
        for form in FORMS
    }
    for form in FORMS[1:]:
        close(found[form].params, found["stepped"].params)


def test_workers_whose_quota_is_done_leave_the_call_and_few_programs_do(float64, monkeypatch):
    """Whatever the quotas are, a call has one of five numbers of workers."""
    workers, rounds = 16, 12
    rng, rows = np.random.default_rng(0), []
    policy = quota.QuotaPolicy(
        lambda workers, budget: 0,
        lambda state, total, caps: (1 + rng.multinomial(total - workers, shares), state),
        lambda state, times: state,
    )
    shares = np.arange(workers) ** 3 / sum(np.arange(workers) ** 3)
    fields = {"rule": steps(0.1), "optimizer": optax.sgd(1.0), "quota": policy, "budget": 64}
    fields |= {"cluster": {"num_workers": workers}, "local": "virtual"}
    with problems.run(4 * 64 * rounds, **fields) as run:
        state = run.init()
        local, load = run.setup.programs.main.local, run.setup.feed.load

        def loaded(worker, ids, *more):
            rows.append(len(ids))
            return load(worker, ids, *more)

        monkeypatch.setattr(run.setup.feed, "load", loaded)
        for _ in range(rounds):
            before = len(rows)
            state, report = run.round(state)
            done = np.array(report.read().workers.microbatches_done)
            active = [int((done > k).sum()) for k in range(done.max())]
            assert rows[before:] == [min(n for n in (2, 4, 8, 12, 16) if n >= a) for a in active]
        programs = [each.__wrapped__._cache_size() for each in (local._add, local._add_some)]
    assert len({*rows}) >= 4
    assert sum(programs) <= 8


def test_a_closed_rounds_mean_steps_are_those_that_were_done(float64):
    told = []

    def update(updates, state, params=None, *, mean_steps, **more):
        jax.debug.callback(lambda x: told.append(float(x)), mean_steps)
        return updates, state

    noting = optax.GradientTransformationExtraArgs(lambda params: (), update)
    result = problems.train(
        64,
        rule=steps(0.1, weights="fednova"),
        optimizer=optax.chain(noting, optax.sgd(1.0)),
        cluster={"num_workers": 4, "secs_per_microbatch": (1, 2, 4, 4), "clock": "virtual"},
        gate={"trigger": "quorum", "quorum": 6},
        quota={"policy": "equal"},
        epochs=1,
        local="virtual",
    )
    done = [line["microbatches_done"] for line in result.history]
    assert any(sum(each) < 8 for each in done)
    means = [np.mean([count for count in each if count]) for each in done]
    assert set(np.round(means, 12)) <= set(np.round(told, 12))  # warming up does one each


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_goes_on_to_the_bit(keep, tmp_path):
    fields = {"quota": "equal", "local": "virtual", "optimizer": optax.sgd(1.0)}
    rule = hetjax.local_steps(optax.sgd(0.1, momentum=0.9), keep=keep)
    whole = problems.train(64, rule=rule, epochs=4, **fields)
    problems.train(64, rule=rule, epochs=4, max_rounds=3, workdir=tmp_path, **fields)
    again = problems.train(64, rule=rule, epochs=4, workdir=tmp_path, **fields)
    assert again.summary["resumed"]
    np.testing.assert_array_equal(again.params, whole.params)


def test_other_workers_begin_with_the_mean_of_what_all_have_kept(tmp_path, capfd):
    """4 workers, then 3, then 6."""
    fields = {"quota": "equal", "local": "virtual", "optimizer": optax.sgd(1.0), "budget": 12}
    fields["rule"] = hetjax.local_steps(optax.sgd(0.1, momentum=0.9))
    kept = problems.train(96, epochs=1, workdir=tmp_path, **fields).state.worker
    told = "what the rule keeps for each worker begins at the mean of all workers'"
    for epochs, workers in ((2, 3), (3, 6)):
        mean = jax.tree.map(lambda leaf: np.asarray(leaf).mean(axis=0), kept)
        of_workers = {"cluster": {"num_workers": workers}, **fields}
        with problems.run(96, **of_workers) as run:
            found = run.restore(tmp_path).train.worker
        for rows, of_all in zip(jax.tree.leaves(found), jax.tree.leaves(mean), strict=True):
            assert len(rows) == workers
            for row in np.asarray(rows):
                np.testing.assert_allclose(row, of_all, rtol=1e-6)
        capfd.readouterr()
        kept = problems.train(96, epochs=epochs, workdir=tmp_path, **of_workers).state.worker
        assert told in capfd.readouterr().err


def test_the_models_state_follows_the_steps(float64):
    """With one worker and steps of no length it is that of all-reduce, microbatch by microbatch."""
    loss = problems.stateful_softmax_loss
    fields = {"loss_fn": loss, "cluster": {"num_workers": 1}, "epochs": 1}
    found = problems.train(64, rule=steps(1e-30), optimizer=optax.sgd(1.0), budget=4, **fields)
    plain = problems.train(64, optimizer=optax.sgd(1e-30), budget=1, **fields)
    assert len(found.history) == len(plain.history) // 4
    close(found.model_state["mean"], plain.model_state["mean"])


@pytest.mark.parametrize("form", FORMS)
def test_the_models_state_is_averaged_by_examples(form, float64):
    """A running mean of what is always 1: after k steps it is 1 - 0.9^k."""

    def loss(params, state, batch, rng):
        mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean()
        return (batch["x"] * params) ** 2, {"mean": mean}

    counts = [5, 2, 1, 0]
    fields = {
        "model_state": {"mean": np.zeros(())},
        "quota": problems.scripted(counts),
        "local": form,
    }
    fields |= {"rule": steps(0.1, weights="uniform"), "loss_over": "microbatch"}
    data = {"x": np.ones(4 * sum(counts))}
    result = problems.fit(
        data, np.zeros(()), loss_fn=loss, optimizer=optax.sgd(1.0), epochs=1, **fields
    )
    expected = np.dot(counts, 1 - 0.9 ** np.array(counts)) / sum(counts)
    close(result.model_state["mean"], expected)


def test_a_schedule_goes_by_the_examples_of_the_run(float64):
    """Not by a worker's own steps: with it unequal workers have the same rate."""
    schedule = hetjax.scale_by_progress(lambda progress: 0.125 / (1 + progress))
    found = one_each(hetjax.local_steps(schedule), optax.sgd(1.0))
    close(found.params, one_each(None, schedule).params)
    fields = {"quota": problems.scripted([5, 2, 1, 0]), "optimizer": optax.sgd(1.0), "epochs": 1}
    with problems.run(64, rule=hetjax.local_steps(schedule), **fields) as run:
        changing = run.round(run.init())[0].train.params  # the first, where progress is 0
    with problems.run(64, rule=steps(0.125), **fields) as run:
        close(changing, run.round(run.init())[0].train.params)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            lambda steps, examples, weight: -steps,
            r"weights: got .*\(of \(2.0, 8.0, 8.0\) it gave -2.0\), must be one of loss",
        ),
        (lambda steps, examples, weight: 0 * steps, "it gave 0.0"),
        (lambda steps, examples: steps, r"of \(2.0, 8.0, 8.0\) it raised TypeError"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        hetjax.local_steps(optax.sgd(0.1), weights)


def test_a_configuration_names_it():
    """As `--config.rule.name=local_steps --config.rule.inner.name=…` on the command line."""
    inner = {"name": "sgd", "learning_rate": 0.1}
    written = {"name": "local_steps", "inner": inner, "weights": "uniform"}
    fields = {"epochs": 1, "microbatch_size": 4, "budget": 8, "quota": {"policy": "equal"}}
    fields["cluster"] = {"num_workers": 4}
    config = experiment.validate({"rule": written, **fields})
    data, params = problems.given(64)
    named = hetjax.fit(problems.softmax_loss, params, optax.sgd(1.0), data, config=config)
    rule = steps(0.1, weights="uniform")
    given = problems.train(64, rule=rule, optimizer=optax.sgd(1.0), epochs=1, quota="equal")
    np.testing.assert_array_equal(named.params, given.params)
    assert named.config["rule"] == given.config["rule"]
