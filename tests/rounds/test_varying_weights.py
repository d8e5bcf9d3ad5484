"""Weights that depend on the parameters: an update is the derivative of sum(w l) / sum(w)."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import trees, types
from hetjax.local import gradients
from hetjax.losses import loss as losses_lib
from tests.rounds import problems, varying_weights
from tests.rounds.varying_weights import DATA, POINT, loss_fn


def once_in_each_form(line):
    """Whether the line is run: each but the local form is there once with arrays, once on a mesh.

    The two forms on a mesh, which take turns, add up by the same collectives.
    """
    data = ("shared-shard", "private-shard", "private-example", "private-shard_mean")
    reducers = ("all_reduce", "ring", "d_psgd", "matcha")
    turn = data.index(f"{line.sharing}-{line.weighting}") + reducers.index(line.reducer)
    return line.local in ("virtual", ("stepped", "fused")[turn % 2])


LINES = [*filter(once_in_each_form, varying_weights.lines())]


@pytest.mark.parametrize("line", LINES, ids="-".join)
def test_an_update_is_the_derivative_of_the_quotient(line, float64):
    assert varying_weights.gap(line) < 1e-9


def test_an_update_of_plain_numbers_is_the_one_by_hand():
    """l = (p - a)², w = 1 / (1 + l) at p = 2: the quotient's derivative is 0.379."""
    a = np.array([0, 1, 3, 7], np.float32)

    def plain(p, batch, rng):
        found = (p - batch["a"]) ** 2
        return found, 1 / (1 + found)

    fields = {"epochs": 1, "microbatch_size": 2, "budget": 2, "local": "virtual"}
    run = hetjax.fit(plain, np.float32(2), optax.sgd(1.0), {"a": a}, workers=2, **fields)
    assert 2 - float(run.params) == pytest.approx(0.378689, abs=1e-6)

    def held(*arguments):
        values, weights = plain(*arguments)
        return values, jax.lax.stop_gradient(weights)

    constant = hetjax.fit(held, np.float32(2), optax.sgd(1.0), {"a": a}, workers=2, **fields)
    assert 2 - float(constant.params) == pytest.approx(0.335404, abs=1e-6)


def test_a_train_step_descends_the_quotient(float64):
    mesh, optimizer = hetjax.make_worker_mesh(2), optax.sgd(1.0)
    state = hetjax.make_train_state(POINT, optimizer, num_workers=2, mesh=mesh)
    step = jax.jit(hetjax.make_train_step(loss_fn, optimizer, mesh, nominal_examples=12))
    ids = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    batch = hetjax.Microbatch(
        ids, np.ones(ids.shape, np.float32), jax.tree.map(lambda x: x[ids], DATA)
    )
    new, _, _ = step(state, batch, np.array([3, 1], np.int32), jax.random.key(0))
    rows = [ids[0].reshape(-1), ids[1, :1].reshape(-1)]
    expected = varying_weights.by_differences(
        lambda params: varying_weights.objective(params, rows, [0.5, 0.5], "example")
    )
    for name, leaf in expected.items():
        change = POINT[name] - np.asarray(new.params[name])[0]
        np.testing.assert_allclose(change, leaf, rtol=1e-7, atol=1e-9)


def primitives(jaxpr):
    """The names of all operations in it, and how often each is there."""
    found = collections.Counter(str(equation.primitive) for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += primitives(inner)
    return found


def test_constant_weights_have_the_program_of_one_gradient():
    """The rule's `add`, equation by equation, is the one that knows nothing of such weights."""
    data, params = problems.classification(8, np.float32), problems.initial_weights(np.float32)
    found = losses_lib.check_loss(problems.weighted_softmax_loss, params, data, jax.random.key(0))
    assert not found.weights_vary
    rule = gradients.rule_of(None, problems.weighted_softmax_loss, found, per_example_rng=False)
    batch = hetjax.Microbatch(np.arange(8, dtype=np.int32), np.ones(8, np.float32), data)

    def plain(params, sums, batch, rng):
        weigh = losses_lib.masked(problems.weighted_softmax_loss, batch, rng)

        def total(params):
            values, weights = weigh(params)
            return jnp.sum(values), weights.sum()

        (loss, weight), grad = jax.value_and_grad(total, has_aux=True)(params)
        loss = jnp.where(trees.all_finite(grad), loss, jnp.nan)
        return tuple(old + sum([new]) for old, new in zip(sums, (grad, loss, weight), strict=True))

    def ours(params, sums, batch, rng):
        shared = types.Shared(params)
        return rule.add(shared, (), gradients.GradientSums(*sums), batch, rng)[1][:3]

    sums = jnp.zeros_like(params), jnp.zeros(()), jnp.zeros(())
    arguments = params, sums, batch, jax.random.key(0)
    one, other = (primitives(jax.make_jaxpr(f)(*arguments).jaxpr) for f in (ours, plain))
    assert one == other
    assert rule.weight_grads is None


@pytest.mark.parametrize("order", ["d_grab", "pair_balance_exact", "grab", "frozen"])
def test_orders_that_take_signs_refuse_weights_that_vary(order):
    def run(loss):
        fields = {"workers": 2, "epochs": 1, "microbatch_size": 2, "budget": 2}
        return hetjax.Run(
            loss, POINT, optax.sgd(0.1), DATA, ordering=order, local="virtual", **fields
        )

    with pytest.raises(ValueError, match=r"ordering: the weights of loss_fn depend"):
        run(loss_fn)

    run(varying_weights.held).close()


def test_a_rule_of_gradients_alone_is_refused_where_weights_vary():
    fields = {"workers": 1, "epochs": 1, "microbatch_size": 2, "budget": 2, "local": "virtual"}
    with pytest.raises(ValueError, match=r"gradient_sums\(loss_fn, weights_vary=True\)"):
        hetjax.Run(
            loss_fn,
            POINT,
            optax.sgd(0.1),
            DATA,
            rule=gradients.gradient_sums(loss_fn, metrics=("again",)),
            **fields,
        )
    rule = gradients.gradient_sums(loss_fn, metrics=("again",), weights_vary=True)
    hetjax.Run(loss_fn, POINT, optax.sgd(0.1), DATA, rule=rule, **fields).close()


def test_a_microbatch_whose_weights_have_no_finite_gradient_is_left_out():
    def at_a_corner(params, batch, rng):
        return (params - batch["a"]) ** 2, 1 + jnp.sqrt(jnp.abs(params - batch["a"]))

    data = {"a": np.array([2, 4, 1, 3], np.float32)}  # at 2 the square root has no derivative
    fields = {"epochs": 1, "microbatch_size": 2, "budget": 2, "local": "virtual", "workers": 1}
    with pytest.raises(hetjax.NonFiniteError, match="not finite"):
        hetjax.fit(at_a_corner, np.float32(2), optax.sgd(0.1), data, **fields)
    result = hetjax.fit(
        at_a_corner, np.float32(2), optax.sgd(0.1), data, nonfinite="skip", **fields
    )
    assert result.summary["examples_skipped"] == 2
