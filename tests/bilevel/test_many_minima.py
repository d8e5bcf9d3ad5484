"""P2, whose lower level has many minima: truth x = 1, y = (1, 1), and who finds it.

The gradient of phi is linear in x for all but a dynamic multiplier: its root follows from two
gradients. That one goes down by upper steps. What came out of them is recorded in
`experiments/results/bilevel/README.md`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import problems, walking

PROBLEM = problems.many_minima()
SGD = bilevel.descent(optax.sgd(0.5))


def root(estimator, start=(0.0, 0.0)):
    """x where the hypergradient is 0, lower steps beginning at `start`."""

    def gradient(x):
        return bilevel.hypergradient(PROBLEM, estimator, x, jnp.asarray(start)).grad_x

    at_0, at_1 = jax.jit(jax.vmap(gradient))(jnp.array([0.0, 1.0]))
    return float(at_0 / (at_0 - at_1))


@pytest.mark.parametrize("start", [0.0, -2.0])
def test_unrolling_descent_is_wrong_and_depends_on_its_start(start, float64):
    """`(1 + b) / 2` from y = (0, b): 0.5 from 0, though the answer is 1."""
    found = root(bilevel.unroll(SGD, 64), (0.0, start))
    assert found == pytest.approx((1 + start) / 2, abs=1e-12)


def test_implicit_gradients_are_wrong_too(float64):
    found = root(bilevel.implicit(SGD, 64, solve=bilevel.cg(2, 0.01)))
    assert found == pytest.approx(1 / 2.01, abs=1e-12)


def test_the_aggregate_of_both_losses_goes_to_the_answer(float64):
    """To one of the last digit given; each longer way is nearer."""
    lower = bilevel.aggregate(optax.sgd(0.5), alpha=lambda k: (k + 1.0) ** -0.5, mu=0.5)
    for T, x in {16: 0.957, 64: 0.99938, 256: 0.99999983}.items():
        assert root(bilevel.unroll(lower, T)) == pytest.approx(x, abs=10.0 ** (2 - len(str(x))))


@pytest.mark.parametrize("multiplier", [1.0, 100.0])
def test_a_value_gap_finds_the_answer_with_any_multiplier(multiplier, float64):
    """Steps of y to the end: its slowest part falls by `1 - 0.9 / lambda` a step."""
    estimator = bilevel.value_gap(
        bilevel.descent(optax.sgd(0.9)),
        50,
        multiplier=multiplier,
        upper_steps=200 + int(40 * multiplier),
    )
    assert root(estimator) == pytest.approx(1.0, abs=2e-13)


@pytest.mark.parametrize(("num_steps", "error", "eta"), [(1, 1e-5, 0.1), (10, 1e-11, 1.0)])
def test_a_dynamic_multiplier_finds_the_answer(num_steps, error, eta, float64):
    """10,000 joint steps of 0.05: 1 - x is 8e-6 with one step of z, 2e-13 with ten."""
    estimator = bilevel.value_gap(
        bilevel.descent(optax.sgd(0.05)), num_steps, multiplier=bilevel.dynamic(eta)
    )
    x, result = walking.descended(
        PROBLEM, estimator, 0.0, jnp.zeros(2), tx=optax.sgd(0.05), num_steps=10_000
    )
    assert abs(1 - float(x)) < error
    assert jnp.abs(result.state.y - 1).max() < 2 * error
