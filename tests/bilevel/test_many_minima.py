"""P2, whose lower level has many minima: truth x = 1, y = (1, 1), and who finds it.

The gradient of phi is linear in x for all but a barrier and a dynamic multiplier: its root follows
from two gradients. These two go down by upper steps. What came out of them is recorded in
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


@pytest.mark.parametrize("start", [0.0, 0.5, -2.0])
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"mode": "forward"}])
def test_unrolling_descent_is_wrong_and_depends_on_its_start(start, options, float64):
    """`(1 + b) / 2` from y = (0, b): 0.5 from 0, though the answer is 1."""
    found = root(bilevel.unroll(SGD, 64, **options), (0.0, start))
    assert found == pytest.approx((1 + start) / 2, abs=1e-12)


@pytest.mark.parametrize(
    ("solve", "wanted"),
    [
        (bilevel.neumann(20, 1.0), 0.5),
        (bilevel.cg(2), 0.5),
        (bilevel.cg(10), 0.5),
        (bilevel.cg(2, 0.01), 1 / 2.01),  # 0.49751
    ],
)
def test_implicit_gradients_are_wrong_too(solve, wanted, float64):
    found = root(bilevel.implicit(SGD, 64, solve=solve))
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("power", "wanted"),
    [
        (-1.0, {16: 0.840, 64: 0.921, 256: 0.960, 1024: 0.980}),
        (-0.5, {16: 0.957, 64: 0.99938, 256: 0.99999983}),
        (-0.25, {16: 0.9913, 64: 0.9999997}),
    ],
)
def test_the_aggregate_of_both_losses_goes_to_the_answer(power, wanted, float64):
    """To one of the last digit given; each longer way is nearer."""
    lower = bilevel.aggregate(optax.sgd(0.5), alpha=lambda k: (k + 1.0) ** power, mu=0.5)
    found = {T: root(bilevel.unroll(lower, T)) for T in wanted}
    for T, x in wanted.items():
        assert found[T] == pytest.approx(x, abs=10.0 ** (2 - len(str(x))))
    errors = [1 - found[T] for T in sorted(found)]
    assert errors == sorted(errors, reverse=True)
    if power == -0.5:
        assert all(abs(1 - x) < 1e-3 for T, x in found.items() if T >= 64)


@pytest.mark.parametrize("multiplier", [1.0, 10.0, 100.0, 1000.0])
def test_a_value_gap_finds_the_answer_with_any_multiplier(multiplier, float64):
    """Steps of y to the end: its slowest part falls by `1 - 0.9 / lambda` a step."""
    estimator = bilevel.value_gap(
        bilevel.descent(optax.sgd(0.9)),
        50,
        multiplier=multiplier,
        upper_steps=200 + int(40 * multiplier),
    )
    assert root(estimator) == pytest.approx(1.0, abs=2e-13)


def test_a_learned_start_finds_the_answer(float64):
    estimator = bilevel.unroll(SGD, 64, start="learned")
    x, result = walking.descended(
        PROBLEM,
        estimator,
        bilevel.Learned(0.0, jnp.zeros(2)),
        jnp.zeros(2),
        tx=optax.sgd(0.3),
        num_steps=400,
    )
    assert float(x.x) == pytest.approx(1.0, abs=1e-12)
    assert float(x.start[1]) == pytest.approx(1.0, abs=1e-12)
    assert float(result.info.upper_loss) == pytest.approx(0.0, abs=1e-12)


def barrier_error(power, num_steps, *, ridge=0.1):
    """`1 - x` with sigma and shift `(k + 1)^power`, ridges `ridge` times these."""

    def falling(k):
        return (k + 1.0) ** power

    multiplier = bilevel.barrier(
        falling,
        falling,
        ridge=lambda k: ridge * falling(k),
        upper_ridge=lambda k: ridge * falling(k),
    )
    x, result = walking.descended(
        PROBLEM,
        bilevel.value_gap(SGD, 100, multiplier=multiplier),
        0.0,
        jnp.zeros(2),
        tx=optax.sgd(0.1),
        num_steps=num_steps,
    )
    assert int(result.info.crossed) == 0
    return 1 - float(x)


@pytest.mark.slow
def test_a_barrier_finds_the_answer_as_fast_as_its_ridges_fall(float64):
    """0.9965 after 1000 upper steps, 0.9983 after 4000 with power -1/2; 0.99989, 0.99997 with -1.

    Without ridges 1 to 1e-12 after 1000.
    """
    assert barrier_error(-0.5, 1000) == pytest.approx(3.49e-3, rel=0.01)
    assert barrier_error(-0.5, 4000) == pytest.approx(1.736e-3, rel=0.01)
    assert barrier_error(-1.0, 1000) == pytest.approx(1.12e-4, rel=0.01)
    assert barrier_error(-1.0, 4000) == pytest.approx(2.76e-5, rel=0.01)
    assert abs(barrier_error(-0.5, 1000, ridge=0.0)) < 1e-12


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("num_steps", "error"), [(1, 1e-5), (10, 1e-11)])
def test_a_dynamic_multiplier_finds_the_answer(eta, num_steps, error, float64):
    """10,000 joint steps of 0.05: 1 - x is 8e-6 with one step of z, 2e-13 with ten, for any eta."""
    estimator = bilevel.value_gap(
        bilevel.descent(optax.sgd(0.05)), num_steps, multiplier=bilevel.dynamic(eta)
    )
    x, result = walking.descended(
        PROBLEM, estimator, 0.0, jnp.zeros(2), tx=optax.sgd(0.05), num_steps=10_000
    )
    assert abs(1 - float(x)) < error
    assert jnp.abs(result.state.y - 1).max() < 2 * error
