"""What bad input gets: a message that says what is wrong and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel

X, Y = np.float32(1.5), np.array([1.0, -2.0], np.float32)
STEPS = bilevel.descent(optax.sgd(0.1))


def lower(x, y, batch):
    return 0.5 * jnp.sum((y - x) ** 2)


def upper(x, y, batch):
    return jnp.sum(y**2)


PROBLEM, ONE_STEP = bilevel.Bilevel(upper, lower), bilevel.one_step()


def hypergradient(problem=PROBLEM, estimator=None, x=X, y=Y, **named):
    estimator = bilevel.unroll(STEPS, 3) if estimator is None else estimator
    return bilevel.hypergradient(problem, estimator, x, y, **named)


WITHOUT_Y = [lambda x, y, b: x**2, lambda x, y, b: x**2 + jnp.sum(jax.lax.stop_gradient(y))]


@pytest.mark.parametrize("loss", WITHOUT_Y)
def test_an_upper_loss_without_y_is_refused(loss):
    with pytest.raises(ValueError, match="the upper loss does not depend on y"):
        hypergradient(bilevel.Bilevel(loss, lower))
    with pytest.raises(ValueError, match="the upper loss does not depend on y"):
        jax.jit(lambda x: hypergradient(bilevel.Bilevel(loss, lower), x=x))(X)


def test_steps_by_the_sign_alone_cannot_be_unrolled():
    signs = bilevel.descent(optax.sign_sgd(0.1))
    with pytest.raises(ValueError, match="the lower step has the derivative 0"):
        hypergradient(estimator=bilevel.unroll(signs, 3))
    assert np.isfinite(hypergradient(estimator=bilevel.implicit(signs, 3)).grad_x)


def test_conjugate_gradients_name_a_direction_without_minimum():
    saddle = bilevel.Bilevel(
        upper, lambda x, y, batch: 0.5 * y[0] ** 2 - 0.25 * y[1] ** 2 - x * y[0]
    )
    estimator = bilevel.implicit(STEPS, 1, solve=bilevel.cg(5))
    with pytest.raises(ValueError, match=r"implicit: the lower loss has the curvature -0\.\d+"):
        hypergradient(saddle, estimator)
    found = jax.jit(lambda x: hypergradient(saddle, estimator, x=x))(X)  # cannot raise
    with pytest.raises(ValueError, match="implicit: the lower loss has the curvature"):
        bilevel.check(found)
    enough = bilevel.implicit(STEPS, 1, solve=bilevel.cg(5, damp=0.75))
    assert np.isfinite(hypergradient(saddle, enough).grad_x)


@pytest.mark.parametrize(("size", "scale"), [(1, 1e-3), (5, 1.0)])
def test_conjugate_gradients_may_have_more_steps_than_they_need(size, scale):
    """Thirty hypergradients of a ridge problem, whose system is solved after `size` products."""
    rng = np.random.default_rng(size)
    inputs = rng.normal(size=(20, size)).astype(np.float32)
    targets = rng.normal(size=20).astype(np.float32)

    def lower(x, y, batch):
        return scale * (jnp.mean((inputs @ y - targets) ** 2) + jnp.exp(x) * jnp.sum(y**2))

    problem = bilevel.Bilevel(lambda x, y, batch: scale * jnp.mean((inputs @ y) ** 2), lower)
    estimator = bilevel.implicit(bilevel.descent(optax.sgd(0.1 / scale)), 5, solve=bilevel.cg(10))
    x, y = np.float32(0.0), np.zeros(size, np.float32)
    step = jax.jit(lambda x, state: hypergradient(problem, estimator, x=x, y=y, state=state))
    found = hypergradient(problem, estimator, x=x, y=y)
    for _ in range(29):
        assert found.info.residual < 1e-4
        x = x - found.grad_x / scale
        found = step(x, found.state)
        bilevel.check(found)  # as what is not jitted does
    assert found.info.residual < 1e-4


def test_conjugate_gradients_may_leave_more_than_they_began_with():
    """Their error falls with each step; the norm of their residual need not."""
    curvatures = np.array([1.0, 10.0, 100.0], np.float32)

    def lower(x, y, batch):
        return 0.5 * jnp.sum(curvatures * (y - x) ** 2)

    slow = bilevel.descent(optax.sgd(0.01))
    estimator = bilevel.implicit(slow, 3, solve=bilevel.cg(1), warm=False)
    y = np.array([3.0, 2.0, 1.0], np.float32)
    found = hypergradient(bilevel.Bilevel(lambda x, y, batch: jnp.sum(y), lower), estimator, y=y)
    assert found.info.residual > 1
    assert np.isfinite(found.grad_x)


def test_a_system_that_is_singular_is_named():
    found = hypergradient(estimator=bilevel.implicit(STEPS, 3, solve=bilevel.cg(2)))
    stuck = found._replace(info=found.info._replace(residual=np.float32(1e4)))
    with pytest.raises(ValueError, match=r"implicit: the linear system is left with .* singular"):
        bilevel.check(stuck)


def test_an_upper_loss_may_be_linear_in_y_and_have_what_another_trace_has():
    def of_weights(weights):
        linear = bilevel.Bilevel(lambda x, y, batch: weights @ y, lower)
        return hypergradient(linear).grad_x

    weights = np.array([[1.0, 0.0], [1.0, 1.0]], np.float32)
    found = jax.vmap(of_weights)(weights)
    np.testing.assert_allclose(found, [of_weights(each) for each in weights], rtol=1e-6)
    assert (found > 0).all()


def test_a_series_that_grows_is_named():
    estimator = bilevel.implicit(STEPS, 1, solve=bilevel.neumann(10, eta=3.0), warm=False)
    with pytest.raises(ValueError, match="implicit: the linear system is left with 512 times"):
        hypergradient(estimator=estimator)


def test_a_hypergradient_that_is_not_finite_is_traced_to_its_request():
    def breaks(x, y, batch):
        return 0.5 * jnp.sum((y - x) ** 2) + jnp.where(batch > 0, jnp.nan, 0.0) * jnp.sum(y)

    problem = bilevel.Bilevel(upper, breaks)
    batches = bilevel.Batches(lower=bilevel.Stack(np.array([0.0, 0.0, 1.0], np.float32)))
    estimator = bilevel.unroll(STEPS, 3)
    with pytest.raises(ValueError, match="hypergradient: it is not finite"):
        hypergradient(problem, estimator, batches=batches)
    said = bilevel.explain(problem, estimator, X, Y, batches)
    assert said.startswith("request 2, gradient of the lower level on batch 2: ")
    assert said.endswith("look at the loss and at this batch")
    assert bilevel.explain(PROBLEM, estimator, X, Y) == ""


def barred(*, rate=1.0, num_steps=20, sigma=1e-3, shift=0.01, **named):
    steps, multiplier = bilevel.descent(optax.sgd(rate)), bilevel.barrier(sigma, shift)
    estimator = bilevel.value_gap(steps, num_steps, multiplier=multiplier)
    return hypergradient(estimator=estimator, **named)


def test_steps_behind_a_barrier_stay_there_and_are_counted_where_the_user_called():
    with pytest.warns(UserWarning, match="17 of 19 steps of y crossed the barrier") as eager:
        found = barred()
    with pytest.warns(UserWarning, match="crossed the barrier") as checked:
        bilevel.check(found)
    assert checked[0].filename == eager[0].filename == __file__
    assert (int(found.info.crossed), int(found.info.stood)) == (17, 2)
    assert 0 < float(found.info.gap) < 0.01


@pytest.mark.parametrize("options", [{"rate": 0.03}, {"sigma": 1.0}, {"shift": 10.0}], ids=str)
def test_what_is_advised_beside_a_barrier_helps(options):
    """Nothing crosses; a warning would be an error here."""
    assert int(barred(**options).info.crossed) == 0


def test_of_mapped_hypergradients_those_without_a_step_are_counted():
    """The first begins at its minimum, where no step crosses."""
    xs = np.array([0.0, 1.5, 1.5], np.float32)
    found = jax.jit(jax.vmap(lambda x: barred(num_steps=5, x=x)))(xs)
    np.testing.assert_array_equal(found.info.crossed, [0, 4, 4])
    with pytest.raises(ValueError, match=r"in 2 of 3 hypergradients all steps of y crossed"):
        bilevel.check(found)


def test_of_mapped_hypergradients_the_least_curvature_is_named():
    def lower(x, y, batch):
        return 0.5 * x * jnp.sum(y**2) - jnp.sum(y)

    estimator = bilevel.implicit(STEPS, 1, solve=bilevel.cg(1))
    problem = bilevel.Bilevel(upper, lower)
    mapped = jax.jit(jax.vmap(lambda x: hypergradient(problem, estimator, x=x)))
    found = mapped(np.array([2.0, -0.5, 1.0], np.float32))
    with pytest.raises(ValueError, match=r"has the curvature -0\.5; .* larger by 0\.5"):
        bilevel.check(found)
    bilevel.check(mapped(np.array([2.0, 0.5, 1.0], np.float32)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bilevel.unroll(STEPS, 3, back=4), "unroll: 3 steps, back=4"),
        (lambda: bilevel.unroll(STEPS, 3, mode="both"), "unroll: mode: got 'both'"),
        (lambda: bilevel.unroll(STEPS, 3, mode="forward", back=1), "unroll: mode='forward' goes"),
        (lambda: bilevel.unroll(STEPS, 3, checkpoint=True, pick="worst"), "unroll: checkpoint"),
        (lambda: bilevel.unroll(STEPS, 3, mode="displacement"), "unroll: mode='displacement' is"),
        (lambda: bilevel.implicit(STEPS, 3, cross="both"), "implicit: cross: got 'both'"),
        (lambda: bilevel.implicit(STEPS, 3, fd_step=0.0), r"implicit: fd_step: got 0\.0"),
        (lambda: bilevel.implicit(STEPS, 3, solve=10), "implicit: solve is 10"),
        (lambda: bilevel.implicit(STEPS, 0, solve=ONE_STEP), "implicit: num_steps: got 0"),
        (lambda: bilevel.cg(0), "cg: num_steps: got 0"),
        (lambda: bilevel.descent(0.1), r"descent: tx is 0\.1"),
        (lambda: bilevel.value_gap(optax.sgd(0.1), 2), "value_gap: lower is"),
        (lambda: bilevel.value_gap(STEPS, 2, multiplier=-1.0), "multiplier: got -1"),
        (lambda: bilevel.value_gap(bilevel.aggregate(optax.sgd(0.1)), 3), "value_gap: lower takes"),
        (lambda: bilevel.value_gap(STEPS, 3, prox=-1.0), "value_gap: 3 steps"),
        (lambda: bilevel.value_gap(STEPS, 1, multiplier=bilevel.barrier(1, 1)), "value_gap: 1 st"),
        (lambda: bilevel.value_gap(STEPS, 3, prox=1.0, central=True), "value_gap: take one of"),
    ],
)
def test_options_that_contradict_each_other_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_learned_start_wants_a_learned_variable():
    with pytest.raises(ValueError, match="unroll: with start='learned' x is"):
        hypergradient(estimator=bilevel.unroll(STEPS, 3, start="learned"))


def test_a_stack_of_too_few_batches_is_refused():
    few = bilevel.Batches(lower=bilevel.Stack(np.zeros((4, 2), np.float32)))
    with pytest.raises(ValueError, match=r"Stack: the lower batches are \[4\]"):
        hypergradient(estimator=bilevel.unroll(STEPS, 5), batches=few)
    assert np.isfinite(hypergradient(estimator=bilevel.unroll(STEPS, 4), batches=few).grad_x)
