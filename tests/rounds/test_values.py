"""What losses are given between rounds: `fit(values=…)`, and updates that are left out."""

import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems

ROUNDS, SIZE, BUDGET = 20, 4, 8
GOSSIP = {"name": "d_psgd", "graph": "ring"}
FIELDS = {
    "microbatch_size": SIZE,
    "budget": BUDGET,
    "quota": {"policy": "static", "proportions": (3, 1)},
    "cluster": {"num_workers": 2},
    "progress": False,
}
DATA = problems.classification(SIZE * BUDGET)  # a round is an epoch: so a plain loop has its batch


def annealed(weights, batch, rng, *, values):
    """KL annealing, in short: a term whose weight grows."""
    return problems.softmax_loss(weights, batch, rng) + values["beta"] * jnp.sum(weights**2)


def near(weights, batch, rng, *, values):
    """Beside a target network, or a teacher."""
    away = jnp.sum((weights - values["target"]) ** 2)
    return problems.softmax_loss(weights, batch, rng) + 0.3 * away


def beta(progress):
    return {"beta": jnp.minimum(1.0, progress / 10)}


def target(every):
    def update(values, params, progress, metrics):
        count = values["count"] + 1
        return {"target": jnp.where(count % every == 0, params, values["target"]), "count": count}

    return {"target": problems.initial_weights(), "count": 0}, update


def teacher(values, params, progress, metrics):
    return {"target": 0.9 * values["target"] + 0.1 * params, "loss": metrics["loss"]}


RECIPES = {
    "KL annealing": (annealed, beta),
    "target network": (near, target(3)),
    "teacher": (near, ({"target": problems.initial_weights(), "loss": 0.0}, teacher)),
}


def fit(loss_fn, values, **fields):
    given = {"epochs": ROUNDS, **FIELDS, **fields}
    optimizer = optax.sgd(0.1, momentum=0.9)
    weights = problems.initial_weights()
    return hetjax.fit(loss_fn, weights, optimizer, DATA, values=values, **given)


def run_of(loss_fn, params, data=DATA, **fields):
    fields = {"quota": FIELDS["quota"], "cluster": FIELDS["cluster"], **fields}
    return problems.run(data, params, loss_fn=loss_fn, **fields)


def plain(loss_fn, values, rounds=ROUNDS):
    """The same by a loop on one device."""
    optimizer, weights = optax.sgd(0.1, momentum=0.9), problems.initial_weights()
    state, used = optimizer.init(weights), []
    now = values(0.0) if callable(values) else values[0]
    for done in range(1, rounds + 1):
        used.append(now)
        of = functools.partial(loss_fn, batch=DATA, rng=None, values=now)
        loss, grads = jax.value_and_grad(lambda w, of=of: of(w).mean())(weights)
        updates, state = optimizer.update(grads, state)
        weights = optax.apply_updates(weights, updates)
        metrics = {"loss": loss, "finite": True}
        now = values(float(done)) if callable(values) else values[1](now, weights, done, metrics)
    return weights, used


@pytest.mark.parametrize(
    ("recipe", "local"),
    [*((recipe, "virtual") for recipe in RECIPES), ("teacher", "stepped"), ("teacher", "fused")],
)
def test_values_go_on_as_in_a_plain_loop(recipe, local, float64):
    loss_fn, values = RECIPES[recipe]
    result = fit(loss_fn, values, local=local)
    weights, used = plain(loss_fn, values)
    np.testing.assert_allclose(result.params, weights, rtol=0, atol=1e-12)
    assert result.history[0]["quotas"] == [6, 2]
    for line, now in zip(result.history, used, strict=True):
        numbers = {name: float(leaf) for name, leaf in now.items() if not np.ndim(leaf)}
        assert line["values"] == pytest.approx(numbers, abs=1e-6)


def test_a_change_of_a_value_compiles_nothing(float64):
    with run_of(annealed, problems.initial_weights(), values=beta, epochs=9) as run:
        state, _ = run.round(run.init())
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, secs, **_: compiled.append(name) if "backend_compile" in name else None
        )
        while not run.done(state):
            state, report = run.round(state)
        assert report.read().values == pytest.approx({"beta": 0.8})
    jax.monitoring.clear_event_listeners()
    assert not compiled


class Broken(Exception):
    pass


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_goes_on_has_the_same_values(recipe, float64, tmp_path):
    loss_fn, values = RECIPES[recipe]

    def stop(report):
        if report.round == 8:
            raise Broken

    kept = {"workdir": tmp_path, "checkpoint": {"every_rounds": 3}}
    with pytest.raises(Broken):
        fit(loss_fn, values, callbacks=[stop], **kept)
    found = fit(loss_fn, values, **kept)
    whole = fit(loss_fn, values)
    for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(one, other)
    of_progress = callable(values)
    other = (lambda p: {"beta": p}) if of_progress else (values[0], lambda v, *_: v)
    with pytest.raises(ValueError, match="values= begins or goes on otherwise"):
        fit(loss_fn, other, epochs=ROUNDS + 1, workdir=tmp_path)


def test_metrics_and_rules_see_the_values(float64):
    seen = []

    def metrics_fn(params, batch, *, values):
        return {
            "loss": problems.softmax_loss(params, batch, None),
            "beta": jnp.full(len(batch["y"]), values["beta"]),
        }

    made = hetjax.local.gradients.gradient_sums(annealed)

    def add(shared, *others):
        seen.append(jax.tree.map(jnp.shape, shared.named.values))
        return made.add(shared, *others)

    fields = {"rule": made._replace(add=add), "eval_source": DATA, "metrics_fn": metrics_fn}
    result = fit(annealed, beta, epochs=5, **fields)
    found = [line["eval"]["test_beta"] for line in result.history]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], abs=1e-6)
    assert {"beta": ()} in seen
    weights, _ = plain(annealed, beta, 5)
    np.testing.assert_allclose(result.params, weights, rtol=0, atol=1e-12)


def test_a_value_of_0_is_evaluated_with(float64):
    def metrics_fn(params, batch, *, values):
        return {"value": jnp.full(len(batch["y"]), values)}

    given = {"eval_source": DATA, "metrics_fn": metrics_fn, "epochs": 3}
    result = fit(not_asking, lambda progress: 2 - progress, **given)
    assert [line["eval"]["test_value"] for line in result.history] == [1.0, 0.0, -1.0]


def test_gossip_keeps_values_of_each_replica(float64):
    result = fit(near, target(1), reducer=GOSSIP)
    np.testing.assert_array_equal(result.state.values["target"], result.state.params)


# --- Loss scales and updates that are left out ---


def half_loss(weights, batch, rng, *, values):
    """In float16; the scale is a weight, so the mean is that of the losses."""
    scores = (batch["x"].astype(jnp.float16) @ weights.astype(jnp.float16)).astype(jnp.float32)
    losses = (scores - batch["t"]) ** 2
    return losses, jnp.broadcast_to(values.loss_scale, losses.shape)


def test_the_dynamic_loss_scale_of_jmp():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(16, 5)).astype(np.float32)
    data = {"x": x, "t": (x @ np.arange(5.0) + rng.normal(size=16)).astype(np.float32)}
    begun = jmp.DynamicLossScale(jnp.float32(2**15), period=7)
    optimizer, weights = optax.sgd(0.05, momentum=0.5), np.zeros(5, np.float32)

    def adjust(scale, params, progress, metrics):
        with jax.numpy_dtype_promotion("standard"):  # jmp multiplies an integer by a truth
            return scale.adjust(metrics["finite"])

    @jax.jit
    def step(weights, state, scale, parts):
        def scaled(weights, part):
            losses, _ = half_loss(weights, part, None, values=scale)
            return scale.scale(losses.mean())

        halves = [jax.grad(scaled)(weights, of_worker) for of_worker in parts]
        grads = scale.unscale(jax.tree.map(lambda a, b: (a + b) / 2, *halves))
        finite = jmp.all_finite(grads)
        updates, after = optimizer.update(grads, state)
        new = optax.apply_updates(weights, updates), after
        scale = adjust(scale, None, None, {"finite": finite})
        return jmp.select_tree(finite, new, (weights, state)), scale, finite

    fields = {"microbatch_size": 8, "budget": 2, "quota": "equal", "optimizer": optimizer}
    state, scale, skipped = optimizer.init(weights), begun, 0
    given = {"values": (begun, adjust), "nonfinite": "skip_update", "epochs": 200}
    with run_of(half_loss, weights, data, **given, **fields) as run:
        now = run.init()
        for _ in range(200):
            now, report = run.round(now)
            line, ids = report.read(), report.done.example_ids
            assert line.values["0"] == float(scale.loss_scale)
            parts = [{name: leaf[each] for name, leaf in data.items()} for each in ids]
            (weights, state), scale, finite = step(weights, state, scale, parts)
            assert line.counts.skipped_examples == (0 if finite else 16)
            skipped += not finite
        np.testing.assert_allclose(run.params(now)[0], weights, rtol=1e-5)
    assert 10 < skipped < 100


@pytest.mark.parametrize(
    ("local", "reducer"),
    [("fused", "all_reduce"), ("virtual", "all_reduce"), ("stepped", GOSSIP), ("virtual", GOSSIP)],
)
def test_an_update_that_is_not_finite_is_left_out(local, reducer, float64):
    def loss_fn(weights, batch, rng, *, values):
        losses = problems.softmax_loss(weights, batch, rng)
        return losses * jnp.where(values["count"] % 3 == 1, 1e308 * 1e10, 1.0)

    def count(values, params, progress, metrics):
        odd = values["odd"] + jnp.where(metrics["finite"], 0, 1)
        return {"count": values["count"] + 1, "odd": odd}

    values = {"count": 0, "odd": 0}, count
    fields = {"local": local, "reducer": reducer, "epochs": 6}
    result = fit(loss_fn, values, nonfinite="skip_update", **fields)
    plain_loss = lambda *given, batch, values, **_: not_asking(*given, batch, None)  # noqa: E731
    weights, _ = plain(plain_loss, (values[0], lambda v, *_: v), 4)
    if reducer == "all_reduce":
        np.testing.assert_allclose(result.params, weights, rtol=0, atol=1e-12)
    assert np.isfinite(result.params).all()
    assert int(result.state.values["odd"][0]) == 2
    assert [line["skipped_examples"] for line in result.history] == [0, 32, 0, 0, 32, 0]


# --- What is refused ---


def not_asking(weights, batch, rng):
    return problems.softmax_loss(weights, batch, rng)


@pytest.mark.parametrize(
    ("loss_fn", "given", "message"),
    [
        (annealed, {}, "asks for values; give values="),
        (not_asking, {"values": beta}, "values is given, and loss_fn does not name it"),
        (not_asking, {"frozen": np.ones(3)}, "frozen is given, and loss_fn does not name it"),
        (annealed, {"values": 3}, "values is 3; it must be a function"),
        (annealed, {"values": ({}, beta)}, "must be a function"),
        (
            annealed,
            {"values": ({"beta": 0.0}, lambda *_: {"beta": np.ones(2)})},
            r"another form: beta was float32\[\] and is float32\[2\]",
        ),
        (
            annealed,
            {"values": ({"beta": 0.0}, lambda *_: {})},
            r"beta was float32\[\] and is nothing",
        ),
    ],
)
def test_what_cannot_be_given_is_refused(loss_fn, given, message):
    with pytest.raises(ValueError, match=message):
        fit(loss_fn, **{"values": None, "epochs": 1, **given})


def test_a_result_hands_its_quotas_on():
    speeds = {"num_workers": 2, "secs_per_microbatch": (0.001, 0.003), "clock": "virtual"}
    fields = {**FIELDS, "quota": "adaptive", "cluster": speeds, "epochs": 5}
    weights, optimizer, result = problems.initial_weights(np.float32), optax.sgd(0.1), None
    quotas = []
    for _ in range(3):
        result = hetjax.fit(not_asking, weights, optimizer, DATA, init_state=result, **fields)
        quotas.append([line["quotas"] for line in result.history])
    assert quotas[0][0] == [4, 4]
    assert [each[0] for each in quotas[1:]] == [each[-1] for each in quotas[:-1]] == [[6, 2]] * 2


def test_an_augmentation_is_given_the_values_of_its_epoch(float64):
    seen = []

    def scaled(example, rng, *, values):
        seen.append(float(values["beta"]))
        return {**example, "x": example["x"] * values["beta"]}

    source = hetjax.augmented(DATA, scaled)
    with pytest.raises(TypeError, match="values"):
        source[0]
    fields = {**FIELDS, "epochs": 3}
    weights = problems.initial_weights()
    result = hetjax.fit(not_asking, weights, optax.sgd(0.1), source, values=beta, **fields)
    assert sorted(set(seen)) == pytest.approx([0.0, 0.1, 0.2], abs=1e-6)
    for epoch in range(3):
        batch = {**DATA, "x": DATA["x"] * 0.1 * epoch}
        grad = jax.grad(lambda w, b=batch: not_asking(w, b, None).mean())
        weights = weights - 0.1 * grad(weights)
    np.testing.assert_allclose(result.params, weights, rtol=0, atol=1e-12)
