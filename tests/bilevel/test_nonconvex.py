"""P3 to P5, whose lower losses are not convex: who reaches the answer, and from where.

Nothing global is claimed. The figures are recorded in `experiments/results/bilevel/README.md`.
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import problems, walking

SGD = bilevel.descent(optax.sgd(0.2))
BEST = 3 * math.pi / 4  # x of P3; y is 2 more
TRACED = {
    "unroll": bilevel.unroll(SGD, 40, start="cold"),
    "checkpoints": bilevel.unroll(SGD, 40, start="cold", checkpoint=True),
    "warm unroll": bilevel.unroll(SGD, 40),
    "implicit": bilevel.implicit(SGD, 40, solve=bilevel.cg(1)),
}


def sine(estimator, start, num_steps=3000, step=0.02):
    """x, y, F of P3 after upper steps from x = y = start."""
    x, result = walking.descended(
        problems.sine(), estimator, start, start, tx=optax.sgd(step), num_steps=num_steps
    )
    return float(x), float(result.state.y), float(result.info.upper_loss)


@pytest.mark.parametrize("name", TRACED)
def test_p3_is_found_from_near_by(name, float64):
    x, y, loss = sine(TRACED[name], 3.0)
    assert x == pytest.approx(BEST, abs=2e-4)
    assert y == pytest.approx(BEST + 2, abs=2e-4)
    assert loss == pytest.approx((1.5 * math.pi - 4) ** 2 / 2, abs=2e-4)  # 0.253749


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize(("start", "least", "most"), [(0.0, 15.2, 15.52), (8.0, 24.0, 24.5)])
def test_p3_stops_at_the_wrong_branch_from_far_away(name, start, least, most, float64):
    """At -pi/4 from 0, F = 15.517; at 7 pi/4 from 8, F = 24.469."""
    x, _, loss = sine(TRACED[name], start)
    assert least < loss < most
    assert x == pytest.approx(-math.pi / 4 if start == 0 else 7 * math.pi / 4, abs=5e-4)


@pytest.mark.parametrize(
    ("start", "least", "most"), [(3.0, 0.25, 0.26), (0.0, 15.2, 15.52), (8.0, 24.0, 24.5)]
)
def test_p3_with_a_dynamic_multiplier_stops_where_unrolling_does(start, least, most, float64):
    """F = 0.25374 from 3, 15.481 from 0, 24.211 from 8, with 200 steps of z."""
    lower = bilevel.descent(optax.sgd(0.02))
    estimator = bilevel.value_gap(lower, 200, multiplier=bilevel.dynamic(0.5))
    assert least < sine(estimator, start, 5000)[2] < most


@pytest.mark.parametrize(
    ("start", "x", "loss"), [(3.0, 2.3238, 0.2097), (0.0, -0.5212, 12.712), (8.0, 5.1562, 19.923)]
)
def test_p3_with_a_constant_multiplier_stays_in_its_branch(start, x, loss, float64):
    """lambda = 10 from the beginning; each minimum is off by O(1 / lambda)."""
    found = sine(bilevel.value_gap(SGD, 20, multiplier=10.0), start)
    assert found[0] == pytest.approx(x, abs=1e-3)
    assert found[2] == pytest.approx(loss, abs=1e-2)


@pytest.mark.parametrize("start", [3.0, 0.0, 8.0])
def test_p3_with_a_multiplier_that_begins_small_is_found_from_all_three(start, float64):
    """From 1 to 50 in 2,450 upper steps: 2.3492, off by O(1 / 50). Here, and not in general."""
    estimator = bilevel.value_gap(SGD, 20, multiplier=bilevel.ramp(1.0, 50.0, 2450))
    assert sine(estimator, start)[0] == pytest.approx(BEST, abs=0.01)


@pytest.mark.parametrize("start", [3.0, 0.0, 8.0])
def test_p3_by_moreau_envelopes_is_found_from_all_three(start, float64):
    """One step of each variable, `c_k = (k + 1)^0.4`: 2.3313 after 10,000 of 0.02."""
    lower = bilevel.descent(optax.sgd(0.05))
    multiplier = bilevel.growing(lambda k: (k + 1.0) ** 0.4)
    estimator = bilevel.value_gap(lower, 1, multiplier=multiplier, prox=0.5)
    assert sine(estimator, start, 10_000)[0] == pytest.approx(BEST, abs=0.03)


@pytest.mark.optimised  # else 3,000 steps from 3 end at 2.254
@pytest.mark.parametrize("start", [3.0, 0.0])
def test_p3_behind_a_barrier_is_found_from_near_by_alone(start, float64):
    """2.305, not yet at 2.356, from 3 after 3,000 upper steps; from 0 it leaves every branch.

    A y that ends next to the barrier has a multiplier without bound, and x jumps.
    """
    multiplier = bilevel.barrier(lambda k: 0.1 * (k + 1.0) ** -0.5, lambda k: (k + 1.0) ** -0.5)
    estimator = bilevel.value_gap(bilevel.descent(optax.sgd(0.05)), 100, multiplier=multiplier)
    x, _, loss = sine(estimator, start)
    if start:
        assert x == pytest.approx(BEST, abs=0.06)
    else:
        assert loss > 100


def within(tx, low, high):
    """Steps that end inside a box."""

    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return jax.tree.map(lambda u, p: jnp.clip(p + u, low, high) - p, updates, params), state

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    ("start", "x", "y"),
    [((9.0, -2.0), 8.64, -2.0), ((8.0, -1.9), 8.64, -2.0), ((1.0, 1.0), 1, 1.57)],
)
def test_p4_is_found_from_near_by_and_a_bound_elsewhere(start, x, y, float64):
    """`F = -11 pi / 4 = -8.6394` at best; 8.6388 from near, 2.5708 at x = 1 from (1, 1)."""
    estimator = bilevel.unroll(bilevel.descent(within(optax.sgd(0.02), -2.0, 2.0)), 40)
    found, result = walking.descended(
        problems.product_sine(),
        estimator,
        *start,
        tx=optax.sgd(0.01),
        num_steps=3000,
        bounds=(1.0, 10.0),
    )
    assert float(found) == pytest.approx(x, abs=1e-3)
    assert float(result.state.y) == pytest.approx(y, abs=1e-3)
    if x > 8:
        assert float(result.info.upper_loss) == pytest.approx(-11 * math.pi / 4, abs=1e-3)


P5 = {
    "unroll": (bilevel.unroll(bilevel.descent(optax.sgd(0.1)), 100), 1e-12),
    "implicit": (
        bilevel.implicit(bilevel.descent(optax.sgd(0.1)), 100, solve=bilevel.cg(1)),
        1e-12,
    ),
    "value gap": (bilevel.value_gap(bilevel.descent(optax.sgd(0.1)), 200, multiplier=100.0), 6e-4),
    "central": (
        bilevel.value_gap(bilevel.descent(optax.sgd(0.1)), 200, multiplier=10.0, central=True),
        2e-4,
    ),
    "Moreau": (
        bilevel.value_gap(
            bilevel.descent(optax.sgd(0.1)),
            1,
            multiplier=bilevel.growing(lambda k: (k + 1.0) ** 0.4),
            prox=0.5,
        ),
        4e-3,
    ),
}


@pytest.mark.parametrize("name", P5)
@pytest.mark.parametrize("start", [(0.5, 0.0), (3.0, 2.0), (1.0, -3.0)])
def test_p5_is_found_by_every_family_from_all_starts(name, start, float64):
    estimator, error = P5[name]
    x, result = walking.descended(
        problems.dominated(),
        estimator,
        *start,
        tx=optax.sgd(0.02),
        num_steps=5000 if name == "Moreau" else 2000,
        bounds=(0.0, 3.0),
    )
    assert float(x) == pytest.approx(1.5, abs=error)
    assert float(result.state.y) == pytest.approx(-1.5, abs=error)
