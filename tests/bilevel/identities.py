"""What has to be equal: each function returns the largest distance that it found, float64.

A distance is the largest one of a number, over the largest number.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import flatten_util

from hetjax import bilevel
from tests.bilevel import problems, walking

STEP = 0.3  # of gradient descent on P1: A has eigenvalues from 0.5 to 2
P1, _LOWER = problems.quadratic(), bilevel.descent(optax.sgd(STEP))
_MODES = ({}, {"checkpoint": True}, {"mode": "forward"})
_T = 12  # on P1; on the MLP 5, which two segments of checkpoints do not share evenly


def adam(rate) -> optax.GradientTransformation:
    """Adam; optax relies on JAX's promotion of types inside it."""
    made = optax.adam(rate)

    def update(gradients, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return made.update(gradients, state, params)

    return optax.GradientTransformation(made.init, update)


_INJECTED = optax.inject_hyperparams(optax.sgd)
DYNAMICS: dict[str, Callable] = {
    "adam": lambda x: adam(0.1),
    "adam, rate in x": lambda x: adam(jnp.exp(x["rate"])),
    "rate in the state": lambda x: _INJECTED(learning_rate=jnp.exp(x["rate"])),
}


def modes_agree(dynamics: str, *, aggregated: bool = False) -> float:
    """Reverse, checkpointed and forward mode against a plain loop and `jax.grad`: on the MLP."""
    case, tx = problems.mlp(), DYNAMICS[dynamics]
    lower, direction = bilevel.descent(tx), None
    if aggregated:
        alpha = lambda k: 0.5 * (k + 1.0) ** -0.25  # noqa: E731
        lower = bilevel.aggregate(tx, alpha=alpha, mu=0.3, upper_scale=0.7)

        def direction(upper, lower, k):
            share = 0.3 * 0.7 * alpha(k)
            return jax.tree.map(lambda u, g: share * u + 0.7 * g, upper, lower)

    def loop(x, y):
        return walking.plain(case.problem, tx(x), 5, x, y, direction=direction)

    (value, reached), grad = jax.jit(
        jax.value_and_grad(loop, has_aux=True), compiler_options=walking.QUICKLY
    )(case.x, case.y)
    found = []
    for options in _MODES:
        estimator = bilevel.unroll(lower, 5, **options)
        result = walking.jitted(case.problem, estimator, case.x, case.y)
        found.append((result.grad_x, (result.info.upper_loss, result.state.y)))
    grads, others = zip(*found, strict=True)
    return max(walking.apart(grad, *grads), walking.apart((value, reached), *others))


def learned_start(dynamics: str, *, of_ones_own: bool = False, **options) -> float:
    """MAML: the gradient of the start, and of x, against `jax.grad` through the loop.

    With `back=0` through a loop whose gradients are constants: x gets what its rates do.
    """
    case, tx = problems.mlp(), DYNAMICS[dynamics]
    lower, direction = bilevel.descent(tx), None
    if of_ones_own:
        lower = bilevel.Lower(lower.levels, lower.init, lower.step, lower.keeps_state)
    if options.get("back") == 0:
        direction = lambda _, gradient, k: jax.lax.stop_gradient(gradient)  # noqa: E731

    def loop(x, y):
        return walking.plain(case.problem, tx(x), 5, x, y, direction=direction)[0]

    wanted = jax.jit(jax.grad(loop, (0, 1)), compiler_options=walking.QUICKLY)(case.x, case.y)
    estimator = bilevel.unroll(lower, 5, start="learned", **options)
    x = bilevel.Learned(case.x, case.y)
    return walking.apart(wanted, tuple(walking.jitted(case.problem, estimator, x, case.y).grad_x))


def worst_iterate() -> float:
    """IAPTT: through the steps up to the iterate where F is highest, found by hand; two modes."""
    case, tx = problems.mlp(), optax.sgd(2.0, momentum=0.8)  # F rises and falls
    case = case._replace(y=jax.tree.map(lambda leaf: 3 * leaf, case.y))

    def loop(x, y, num_steps):
        return walking.plain(case.problem, tx, num_steps, x, y)[0]

    of_all = jax.jit(
        lambda x, y: jnp.stack([loop(x, y, t) for t in range(1, 8)]),
        compiler_options=walking.QUICKLY,
    )
    losses = of_all(case.x, case.y)
    chosen = 1 + int(np.argmax(losses))
    assert 1 < chosen < 7, losses
    of_one = jax.grad(lambda x, y: loop(x, y, chosen), (0, 1))
    wanted = jax.jit(of_one, compiler_options=walking.QUICKLY)(case.x, case.y)
    found, learned = [], bilevel.Learned(case.x, case.y)
    for x, how in ((learned, {"start": "learned"}), (case.x, {"mode": "forward"})):
        estimator = bilevel.unroll(bilevel.descent(tx), 7, pick="worst", **how)
        result = walking.jitted(case.problem, estimator, x, case.y)
        assert int(result.info.step_chosen) == chosen
        found.append(result.grad_x)
    return walking.apart((*wanted, wanted[0]), (*found[0], found[1]))


def on_p1(estimator, state=None) -> bilevel.Result:
    return walking.jitted(P1.problem, estimator, P1.x, P1.y, state=state)


def closed_form() -> float:
    """Reverse mode on P1 against `rho x + B'A^{-1}(I - M^T)(y_T - t)`."""
    found = [on_p1(bilevel.unroll(_LOWER, T)).grad_x for T in (1, 7, 40)]
    return walking.apart([P1.unrolled(T, STEP) for T in (1, 7, 40)], found)


def truncated_is_neumann() -> float:
    """The last K steps differentiated, and K terms of the series with the same step: on P1."""
    distances = []
    for K in (1, 3, _T):
        unrolled = bilevel.unroll(_LOWER, _T, back=K)
        implied = bilevel.implicit(_LOWER, _T, solve=bilevel.neumann(K, STEP), warm=False)
        results = [on_p1(e) for e in (unrolled, implied)]
        distances.append(walking.apart(*[(r.grad_x, r.state.y) for r in results]))
    return max(distances)


def one_step_is_scaled() -> float:
    """One step back, `scaled` by the step, and `one_step()`: on P1."""
    estimators = [
        bilevel.unroll(_LOWER, _T, back=1),
        bilevel.implicit(_LOWER, _T, solve=bilevel.scaled(STEP)),
        bilevel.implicit(_LOWER, _T, solve=bilevel.one_step()),
        bilevel.implicit(_LOWER, _T, solve=bilevel.neumann(1, STEP), warm=False),
    ]
    reached = P1.descended(_T, STEP)
    wanted = P1.rho * P1.x + STEP * P1.B.T @ (reached - P1.t)
    found = [on_p1(e).grad_x for e in estimators]
    return walking.apart(wanted, *found)


def one_step_of_adam() -> float:
    """`one_step()` is one step back where the cross product does not depend on y: P1, Adam."""
    lower = bilevel.descent(adam(0.1))
    implied = bilevel.implicit(lower, _T, solve=bilevel.one_step())
    estimators = [bilevel.unroll(lower, _T, back=1), implied]
    return walking.apart(*[on_p1(e).grad_x for e in estimators])


def solvers_are_exact() -> float:
    """`(H + damp I)^{-1}` at the lower minimum of P1.

    By conjugate gradients, as many steps as y has numbers, and by a long series.
    """
    distances = []
    for damp in (0.0, 0.01, 0.5):
        matrix = P1.A + damp * np.eye(len(P1.y))
        for solve in (bilevel.cg(len(P1.y), damp), bilevel.neumann(400, STEP, damp)):
            estimator = bilevel.implicit(_LOWER, 300, solve=solve)
            found = on_p1(estimator).grad_x
            distances.append(walking.apart(P1.through(P1.best - P1.t, matrix), found))
    return max(distances)


def neumann_by_hand() -> float:
    """Cold and then warm: `v <- v + eta (b - H v)`, Q times, from the last v."""
    distances = []
    for Q in (1, 2, 5):
        estimator = bilevel.implicit(_LOWER, 3, solve=bilevel.neumann(Q, 0.2))
        state, solution, y = None, np.zeros_like(P1.y), P1
        for _ in range(3):
            y = y._replace(y=y.descended(3, STEP))
            for _ in range(Q):
                solution = solution + 0.2 * (y.y - P1.t - P1.A @ solution)
            result = on_p1(estimator, state)
            state, wanted = result.state, P1.rho * P1.x + P1.B.T @ solution
            distances.append(walking.apart((wanted, y.y), (result.grad_x, state.y)))
    return max(distances)


def rank_one_formula() -> float:
    """`d_x F - <d_y F, g> / |g|^2 d_x f`, g = d_y f: on the MLP."""
    case, tx = problems.mlp(), optax.sgd(STEP)

    @jax.jit
    def gradients(x, y):
        _, reached = walking.plain(case.problem, tx, 3, x, y)
        return [jax.grad(loss, (0, 1))(x, reached, None) for loss in case.problem]

    (upper_x, upper_y), (lower_x, lower_y) = gradients(case.x, case.y)
    b, g = (flatten_util.ravel_pytree(tree)[0] for tree in (upper_y, lower_y))
    wanted = jax.tree.map(lambda u, f: u - (b @ g) / (g @ g) * f, upper_x, lower_x)
    estimator = bilevel.implicit(bilevel.descent(tx), 3, solve=bilevel.rank_one())
    return walking.apart(wanted, walking.jitted(case.problem, estimator, case.x, case.y).grad_x)


def differences_on_quadratics() -> float:
    """Cross products by finite differences are exact on P1, whatever their step."""
    distances = []
    for fd_step in (1e-2, 1.0):
        crosses = ({}, {"cross": "fd", "fd_step": fd_step})
        each = [bilevel.implicit(_LOWER, _T, solve=bilevel.cg(3), **cross) for cross in crosses]
        found = [on_p1(e).grad_x for e in each]
        distances.append(walking.apart(*found))
    return max(distances)


def gap_is_damped_implicit() -> float:
    """Exact y and z, multiplier lambda: `(H + I / lambda)^{-1}`, at y*: on P1."""
    distances = []
    for multiplier in (1.0, 10.0, 100.0, 1e4):
        matrix = P1.A + np.eye(len(P1.y)) / multiplier
        wanted = P1.through(P1.best - P1.t, matrix)
        estimator = bilevel.value_gap(_LOWER, 400, multiplier=multiplier)
        result = on_p1(estimator)
        found = (result.grad_x, result.state.y)
        distances.append(walking.apart((wanted, P1.penalised(multiplier)), found))
    return max(distances)


def example_weights() -> float:
    """Cleaning: `-s'(x_i) <grad l_i, v> / N` and `lambda s'(x_i) (l_i(y) - l_i(z)) / N`."""
    task, lower = problems.cleaning(), bilevel.descent(optax.sgd(0.5))
    slope = jax.nn.sigmoid(task.x) * (1 - jax.nn.sigmoid(task.x)) / len(task.x)
    implied = bilevel.implicit(lower, 20, solve=bilevel.cg(12))
    gap = bilevel.value_gap(lower, 20, multiplier=4.0)
    by_products = walking.jitted(task.problem, implied, task.x, task.y)
    v = by_products.state.memory
    _, along = jax.jvp(lambda y: task.losses(y, 0), (by_products.state.y,), (v,))
    by_losses = walking.jitted(task.problem, gap, task.x, task.y)
    y, z = by_losses.state.memory
    difference = task.losses(y, 0) - task.losses(z, 0)
    return walking.apart(
        (-slope * along, 4.0 * slope * difference), (by_products.grad_x, by_losses.grad_x)
    )


def steps_take_their_batches() -> float:
    """Step t takes the t-th lower batch, also on the way back and between checkpoints: P1, Adam."""
    tx, rng = adam(0.2), np.random.default_rng(4)
    stack, upper = rng.normal(size=(7, len(P1.y))), rng.normal(size=len(P1.y))

    def squared(x, y, batch):  # its cross and Hessian products depend on the batch
        return P1.problem.lower(x, y, batch) + 0.1 * jnp.sum((x * batch[:3]) ** 2) * jnp.sum(y**2)

    problem = bilevel.Bilevel(P1.problem.upper, squared)
    batches = bilevel.Batches(upper, bilevel.Stack(stack))

    def loop(x):
        return walking.plain(problem, tx, 7, x, P1.y, batches=stack, upper=upper)[0]

    wanted = jax.jit(jax.grad(loop))(P1.x)
    estimators = [bilevel.unroll(bilevel.descent(tx), 7, **options) for options in _MODES]
    found = [walking.jitted(problem, e, P1.x, P1.y, batches).grad_x for e in estimators]
    return walking.apart(wanted, *found)


IDENTITIES: dict[str, Callable[[], float]] = {
    "reverse mode is the closed form on P1": closed_form,
    **{
        f"reverse, checkpoints, forward and a plain loop agree on the MLP, {name}": (
            lambda name=name: modes_agree(name)
        )
        for name in DYNAMICS
    },
    "the same for the aggregate of both levels, adam": lambda: modes_agree("adam", aggregated=True),
    "K steps back are K terms of Neumann's series on P1": truncated_is_neumann,
    "one step back is the scaled upper gradient": one_step_is_scaled,
    "one step back is one_step() for Adam": one_step_of_adam,
    "solvers are exact after enough steps, and damping adds to the diagonal": solvers_are_exact,
    "Neumann's series goes on where it ended": neumann_by_hand,
    "rank one is its formula": rank_one_formula,
    "finite differences are exact on quadratics": differences_on_quadratics,
    "the value gap is implicit, damped by 1 / lambda": gap_is_damped_implicit,
    "hypergradients of example weights are their formulas": example_weights,
    "every step has its own batch": steps_take_their_batches,
    "MAML is jax.grad through the loop": lambda: learned_start("rate in the state"),
    "MAML with checkpoints": lambda: learned_start("adam", checkpoint=True),
    **{
        f"no step back is first-order MAML and leaves a rate its own derivative, {name}": (
            lambda name=name: learned_start(name, back=0, of_ones_own=name == "adam, rate in x")
        )
        for name in DYNAMICS
    },
    "the worst iterate is found and differentiated": worst_iterate,
}
