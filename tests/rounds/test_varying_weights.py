"""Weights that depend on the parameters: an update is the derivative of sum(w l) / sum(w)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
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


def test_a_train_step_descends_the_quotient(float64):
    ids = np.arange(12).reshape(2, 3, 2)
    step, *given = problems.own_step(ids, DATA, POINT, optax.sgd(1.0), loss_fn=loss_fn)
    new, _, _ = jax.jit(step)(*given, np.array([3, 1], np.int32), jax.random.key(0))
    rows = [ids[0].reshape(-1), ids[1, :1].reshape(-1)]
    expected = varying_weights.by_differences(
        lambda params: varying_weights.objective(params, rows, [0.5, 0.5], "example")
    )
    for name, leaf in expected.items():
        change = POINT[name] - np.asarray(new.params[name])[0]
        np.testing.assert_allclose(change, leaf, rtol=1e-7, atol=1e-9)


def test_constant_weights_have_no_gradient():
    data, params = problems.classification(8, np.float32), problems.initial_weights(np.float32)
    found = losses_lib.check_loss(problems.weighted_softmax_loss, params, data, jax.random.key(0))
    rule = gradients.rule_of(None, problems.weighted_softmax_loss, found, per_example_rng=False)
    assert rule.reads.weight_grads is None


def run(loss=loss_fn, **fields):
    fields = {"microbatch_size": 2, "budget": 2, "local": "virtual", **fields}
    return problems.run(DATA, POINT, loss_fn=loss, **fields)


def test_orders_that_take_signs_refuse_weights_that_vary():
    with pytest.raises(ValueError, match=r"ordering: the weights of loss_fn depend"):
        run(ordering="grab")
    run(varying_weights.held, ordering="grab").close()


def test_a_rule_of_gradients_alone_is_refused_where_weights_vary():
    with pytest.raises(ValueError, match=r"gradient_sums\(loss_fn, weights_vary=True\)"):
        run(rule=gradients.gradient_sums(loss_fn, metrics=("again",)))
    run(rule=gradients.gradient_sums(loss_fn, metrics=("again",), weights_vary=True)).close()


def test_a_microbatch_whose_weights_have_no_finite_gradient_is_left_out():
    def at_a_corner(params, batch, rng):
        weights = 1 + jnp.sqrt(jnp.abs(params - batch["a"]))
        return hetjax.Losses((params - batch["a"]) ** 2, weights)

    data = {"a": np.array([2, 4, 1, 3], np.float32)}  # at 2 the square root has no derivative
    fields = {"epochs": 1, "microbatch_size": 2, "budget": 2, "local": "virtual"}
    fields |= {"loss_fn": at_a_corner, "cluster": {"num_workers": 1}}
    with pytest.raises(hetjax.NonFiniteError, match="not finite"):
        problems.fit(data, np.float32(2), **fields)
    result = problems.fit(data, np.float32(2), nonfinite="skip", **fields)
    assert result.summary["examples_skipped"] == 2
