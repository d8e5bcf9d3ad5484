"""Local rules: what all of them keep to, and two of one's own in all local forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import ordering, quota, trees, types
from hetjax.local import gradients, rules
from tests.own_parts import hessian_product as hessian_product_lib
from tests.own_parts import local_sgd as local_sgd_lib
from tests.rounds import problems

FORMS = ("stepped", "fused", "virtual")
LOSS = problems.weighted_softmax_loss
MOMENTUM = optax.sgd(0.1, momentum=0.9)
local_sgd = functools.partial(local_sgd_lib.local_sgd, inner=MOMENTUM)
RULES = {
    "gradient_sums": gradients.gradient_sums,
    "local_sgd": local_sgd,
    "hessian_product": hessian_product_lib.hessian_product,
}


def vector(dtype=np.float64):
    return np.random.default_rng(4).normal(size=(5, 3)).astype(dtype)


def microbatch(start=0, spoilt=False):
    ids = np.arange(start, start + 4, dtype=np.int32)
    examples = {k: v[ids].copy() for k, v in problems.classification().items()}
    if spoilt:
        examples["x"][1] = np.nan
    return types.Microbatch(ids, np.ones(4, np.float32), examples)


def begun(name):
    """`(steps, shared, carried)` of a rule, after one microbatch."""
    rule = RULES[name](LOSS)
    steps = rules.with_observer(rule)
    shared = types.Shared(problems.initial_weights(), vector())
    kept = rule.init(shared.params) if rule.traits.keeps_worker else ()
    carried = steps.begin(shared, kept, ())
    return steps, shared, jax.jit(steps.add)(shared, carried, microbatch(), jax.random.key(0))[0]


@pytest.mark.parametrize("name", RULES)
def test_no_shape_or_type_depends_on_what_was_done(name, float64):
    steps, shared, carried = begun(name)
    empty = steps.begin(shared, carried.worker, ())
    after, _ = steps.add(shared, carried, microbatch(4), jax.random.key(0))
    for other in (carried, after):
        assert jax.tree.structure(other) == jax.tree.structure(empty)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), other, empty)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), other, empty)


@pytest.mark.parametrize("name", RULES)
def test_a_microbatch_that_is_not_finite_adds_nothing_and_is_named(name, float64):
    steps, shared, carried = begun(name)
    after, _ = jax.jit(steps.add)(shared, carried, microbatch(4, spoilt=True), jax.random.key(0))
    assert after.tally == (4, 2, 1)
    jax.tree.map(np.testing.assert_array_equal, after[:3], carried[:3])


@pytest.mark.parametrize("name", RULES)
def test_a_worker_that_is_not_active_stays_as_it_is(name, float64):
    steps, shared, carried = begun(name)
    after, _ = jax.jit(steps.add)(shared, carried, microbatch(4), jax.random.key(0), False)
    jax.tree.map(np.testing.assert_array_equal, after, carried)


@pytest.mark.parametrize("name", RULES)
def test_a_row_gives_what_a_worker_gives(name, float64):
    steps, shared, carried = begun(name)
    for step in (lambda c: steps.add(shared, c, microbatch(4), jax.random.key(0))[0], None):
        step = step or functools.partial(steps.finish, shared)
        one, row = jax.jit(step)(carried), jax.jit(step)(trees.add_row_axis(carried))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-15)
        jax.tree.map(close, trees.first_row(row), one)


@pytest.mark.parametrize("name", RULES)
def test_who_did_nothing_contributes_no_weight(name, float64):
    steps, shared, carried = begun(name)
    done = steps.finish(shared, steps.begin(shared, carried.worker, ()))
    assert done.weight == done.loss_sum == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(done.sums))


@pytest.mark.parametrize("name", ["local_sgd", "hessian_product"])
def test_orders_that_need_gradients_refuse_other_rules(name):
    observer = ordering.d_grab().observer(ordering.Sizes(4, 4, 8))
    rules.with_observer(gradients.gradient_sums(LOSS), observer)
    with pytest.raises(ValueError, match=r"rule: the order balances gradients"):
        rules.with_observer(RULES[name](LOSS), observer)


def test_what_is_no_rule_is_refused_with_what_one_is():
    rule = gradients.gradient_sums(LOSS)
    for wrong, message in (
        (LOSS, "got a function"),
        (rule._replace(add=None), "its add is None"),
        (rule._replace(traits=None), "its traits is None"),
    ):
        with pytest.raises(ValueError, match=f"rule: .*{message}.*begin.*gradient_sums"):
            rules.with_observer(wrong)


def local_sgd_slowly(data, weights, rounds, order):
    """The mean of the workers, by their examples' weights, after each round; one by one."""
    params, velocity = weights, np.zeros((4, *weights.shape))

    def mean(params, batch):
        losses, amounts = LOSS(params, batch, None)
        return jnp.sum(losses * amounts) / jnp.maximum(jnp.sum(amounts), 1e-300)

    gradient = jax.jit(jax.grad(mean))
    start = 0
    for quotas in rounds:
        ends, amounts = [], []
        for worker, count in enumerate(quotas):
            own, amount = params, 0.0
            for _ in range(count):
                batch = {k: v[order[start : start + 4]] for k, v in data.items()}
                start += 4
                velocity[worker] = 0.9 * velocity[worker] + gradient(own, batch)
                own = own - 0.1 * velocity[worker]
                amount += problems.example_weights(batch).sum()
            ends.append(own)
            amounts.append(amount)
        params = np.average(ends, axis=0, weights=amounts)
    return params, velocity


@pytest.mark.parametrize("form", FORMS)
def test_local_sgd_takes_as_many_steps_as_its_quota(form, float64, tmp_path):
    """Unequal quotas, 0 among them; the inner momentum goes from round to round."""
    data, weights = problems.given(96)
    rounds = problems.write_trace(tmp_path / "trace.jsonl", [8, 8, 8], 4)
    with problems.run(96) as plain:
        order = plain.init().stream.passes[0].remaining.copy()
    fields = {"loss_fn": LOSS, "rule": local_sgd(LOSS), "replay": str(tmp_path / "trace.jsonl")}
    found = problems.train(96, optimizer=optax.sgd(1.0), local=form, epochs=1, **fields)
    params, velocity = local_sgd_slowly(data, weights, rounds, order)
    np.testing.assert_allclose(found.params, params, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.state.worker[0].trace, velocity, rtol=0, atol=1e-12)


def test_what_a_rule_keeps_is_in_the_checkpoint(tmp_path, float64):
    fields = {"optimizer": optax.sgd(1.0), "rule": local_sgd(problems.softmax_loss), "epochs": 3}
    fields["quota"] = {"policy": "static", "proportions": (3.0, 2.0, 2.0, 1.0)}
    run = functools.partial(problems.train, 96, **fields)
    whole = run(workdir=tmp_path / "whole")
    stop = problems.press_ctrl_c(lambda line: line.round == 3)
    run(workdir=tmp_path / "cut", callbacks=[stop])
    found = run(workdir=tmp_path / "cut")
    assert found.history[0]["round"] == 0
    jax.tree.map(np.testing.assert_array_equal, found.state, whole.state)


def pooled_product(data, weights, ids, given):
    def mean(params):
        losses, amounts = LOSS(params, {k: v[ids] for k, v in data.items()}, None)
        return jnp.sum(losses * amounts) / jnp.sum(amounts)

    return jax.jvp(jax.grad(mean), (weights,), (given,))[1]


def scripted(rounds):
    """A policy that gives the quotas of a script."""

    def assign(index, total, caps):
        return np.array(rounds[index]), index + 1

    return quota.QuotaPolicy(lambda workers, budget: 0, assign, lambda index, times: index)


@pytest.mark.parametrize(
    ("form", "quotas", "name"),
    [
        *((form, (4, 0, 3, 1), "all_reduce") for form in FORMS),
        ("fused", (0, 0, 8, 0), "ring"),
        ("virtual", (0, 0, 8, 0), "d_psgd"),
        ("stepped", (4, 0, 3, 1), "matcha"),
    ],
)
def test_a_hessian_product_is_that_of_the_pooled_batch(form, quotas, name, float64):
    """Under any quotas. Gossip mixes the workers' own products: their mean is the pooled one."""
    (data, weights), gossips = problems.given(), name in ("d_psgd", "matcha")
    fields = {"rule": hessian_product_lib.hessian_product(LOSS), "local": form, "reducer": name}
    fields |= {"quota": scripted([quotas, quotas[::-1]])}
    fields |= {"data": {"weighting": "example" if gossips else "shard"}}
    with problems.run(loss_fn=LOSS, optimizer=None, **fields) as run:
        state = run.init(given=np.zeros_like(weights))
        for seed in range(2):  # a vector of each round's own
            given = np.random.default_rng(seed).normal(size=weights.shape)
            state, report = run.round(state, given=given)
            right = pooled_product(data, weights, report.done.example_ids.reshape(-1), given)
            found = np.asarray(report.mean)
            if gossips:
                found = np.stack([found.mean(axis=0)] * 4)
            np.testing.assert_allclose(found, np.stack([right] * 4), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(run.params(state)[0], weights)


LOOKED_AT = {
    "tree": lambda given: jax.tree.map(jnp.zeros_like, given),
    "array": lambda given: jnp.zeros(given.shape, given.dtype),
    "entry": lambda given: given["vector"],
    "truth": lambda given: jnp.ones(3) if given else jnp.ones(2),
    "none": lambda given: jnp.ones(3) if given == () else jnp.ones(2),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_depends_on_a_rounds_given_has_no_shape_before(name):
    rule, weights = hessian_product_lib.hessian_product(LOSS), problems.initial_weights()
    made = rule._replace(
        begin=lambda shared, worker: (worker, (jnp.zeros(5), LOOKED_AT[name](shared.given))),
        finish=lambda shared, worker, sums: (worker, sums, jnp.float32(1)),
    )
    assert rules.contribution_shapes(made, weights) is None
    plain = rules.contribution_shapes(gradients.gradient_sums(LOSS), weights)
    assert plain.shape == weights.shape


@pytest.mark.parametrize("name", ["all_reduce", "ring"])
def test_a_step_of_ones_own_without_update(name, float64):
    (data, weights), ids = problems.given(), np.arange(48).reshape(4, 3, 4)
    fields = {"loss_fn": LOSS, "rule": hessian_product_lib.hessian_product(LOSS), "reducer": name}
    step, state, microbatches = problems.own_step(ids, data, weights, None, **fields)
    step = jax.jit(step)
    for counts in ([3, 0, 2, 1], [0, 0, 0, 1]):
        given = vector()
        key = jax.random.key(0)
        *_, mean = step(state, microbatches, np.array(counts), key, given=given)
        done = np.concatenate([ids[w, :n].reshape(-1) for w, n in enumerate(counts)])
        right = pooled_product(data, weights, done, given)
        np.testing.assert_allclose(mean, np.stack([right] * 4), rtol=1e-12, atol=1e-14)
