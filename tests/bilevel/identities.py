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
_T = 12  # on P1; on the MLP 5, which two segments of checkpoints do not share evenly


def adam(rate) -> optax.GradientTransformation:
    """Adam; optax relies on JAX's promotion of types inside it."""
    made = optax.adam(rate)

    def update(gradients, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return made.update(gradients, state, params)

    return optax.GradientTransformation(made.init, update)


DYNAMICS: dict[str, Callable] = {
    "adam": lambda x: adam(0.1),
    "adam, rate in x": lambda x: adam(jnp.exp(x["rate"])),
    "rate in the state": lambda x: optax.inject_hyperparams(optax.sgd)(
        learning_rate=jnp.exp(x["rate"])
    ),
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
    for options in ({}, {"checkpoint": True}, {"mode": "forward"}):
        estimator = bilevel.unroll(lower, 5, **options)
        result = walking.jitted(case.problem, estimator, case.x, case.y)
        found.append((result.grad_x, (result.info.upper_loss, result.state.y)))
    grads, others = zip(*found, strict=True)
    return max(walking.apart(grad, *grads), walking.apart((value, reached), *others))


def learned_start(dynamics: str, **options) -> float:
    """MAML: the gradient of the start, and of x, against `jax.grad` through the loop."""
    case, tx = problems.mlp(), DYNAMICS[dynamics]

    def loop(x, y):
        return walking.plain(case.problem, tx(x), 5, x, y)[0]

    wanted = jax.jit(jax.grad(loop, (0, 1)), compiler_options=walking.QUICKLY)(case.x, case.y)
    estimator = bilevel.unroll(bilevel.descent(tx), 5, start="learned", **options)
    x = bilevel.Learned(case.x, case.y)
    return walking.apart(wanted, tuple(walking.jitted(case.problem, estimator, x, case.y).grad_x))


def first_order_maml() -> float:
    """`back=0`: the start gets `d_y F(y_T)`, x its direct part."""
    case, tx = problems.mlp(), optax.sgd(STEP)

    @jax.jit
    def by_hand(x, y):
        _, reached = walking.plain(case.problem, tx, 5, x, y)
        return jax.grad(case.problem.upper, (0, 1))(x, reached, None)

    wanted = by_hand(case.x, case.y)
    estimator = bilevel.unroll(bilevel.descent(tx), 5, start="learned", back=0)
    x = bilevel.Learned(case.x, case.y)
    return walking.apart(wanted, tuple(walking.jitted(case.problem, estimator, x, case.y).grad_x))


def first_order(dynamics: str, **options) -> float:
    """`back=0` against `jax.grad` through a loop whose gradients are constants: the rates' own."""
    case, tx = problems.mlp(), DYNAMICS[dynamics]

    def loop(x, y):
        constant = lambda _, gradient, k: jax.lax.stop_gradient(gradient)  # noqa: E731
        return walking.plain(case.problem, tx(x), 5, x, y, direction=constant)[0]

    wanted = jax.jit(jax.grad(loop, (0, 1)), compiler_options=walking.QUICKLY)(case.x, case.y)
    lower = bilevel.descent(tx)
    if options.pop("of_ones_own", False):
        lower = bilevel.Lower(lower.levels, lower.init, lower.step, lower.keeps_state)
    estimator = bilevel.unroll(lower, 5, start="learned", back=0, **options)
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
    found = []
    for x, how in (
        (bilevel.Learned(case.x, case.y), {"start": "learned"}),
        (case.x, {"mode": "forward"}),
    ):
        estimator = bilevel.unroll(bilevel.descent(tx), 7, pick="worst", **how)
        result = walking.jitted(case.problem, estimator, x, case.y)
        assert int(result.info.step_chosen) == chosen
        found.append(result.grad_x)
    return walking.apart((*wanted, wanted[0]), (*found[0], found[1]))


def closed_form() -> float:
    """Reverse mode on P1 against `rho x + B'A^{-1}(I - M^T)(y_T - t)`."""
    p1, lower = problems.quadratic(), bilevel.descent(optax.sgd(STEP))
    found = [
        walking.jitted(p1.problem, bilevel.unroll(lower, T), p1.x, p1.y).grad_x for T in (1, 7, 40)
    ]
    return walking.apart([p1.unrolled(T, STEP) for T in (1, 7, 40)], found)


def truncated_is_neumann() -> float:
    """The last K steps differentiated, and K terms of the series with the same step: on P1."""
    p1, lower, distances = problems.quadratic(), bilevel.descent(optax.sgd(STEP)), []
    for K in (1, 3, _T):
        unrolled = bilevel.unroll(lower, _T, back=K)
        implied = bilevel.implicit(lower, _T, solve=bilevel.neumann(K, STEP), warm=False)
        results = [walking.jitted(p1.problem, e, p1.x, p1.y) for e in (unrolled, implied)]
        distances.append(walking.apart(*[(r.grad_x, r.state.y) for r in results]))
    return max(distances)


def one_step_is_scaled() -> float:
    """One step back, `scaled` by the step, and `one_step()`: on P1."""
    p1, lower = problems.quadratic(), bilevel.descent(optax.sgd(STEP))
    estimators = [
        bilevel.unroll(lower, _T, back=1),
        bilevel.implicit(lower, _T, solve=bilevel.scaled(STEP)),
        bilevel.implicit(lower, _T, solve=bilevel.one_step()),
        bilevel.implicit(lower, _T, solve=bilevel.neumann(1, STEP), warm=False),
    ]
    reached = p1.descended(_T, STEP)
    wanted = p1.rho * p1.x + STEP * p1.B.T @ (reached - p1.t)
    found = [walking.jitted(p1.problem, e, p1.x, p1.y).grad_x for e in estimators]
    return walking.apart(wanted, *found)


def one_step_of_adam() -> float:
    """`one_step()` is one step back where the cross product does not depend on y: P1, Adam."""
    p1, lower = problems.quadratic(), bilevel.descent(adam(0.1))
    estimators = [
        bilevel.unroll(lower, _T, back=1),
        bilevel.implicit(lower, _T, solve=bilevel.one_step()),
    ]
    return walking.apart(*[walking.jitted(p1.problem, e, p1.x, p1.y).grad_x for e in estimators])


def cg_is_exact() -> float:
    """As many steps as y has numbers, at the lower minimum of P1."""
    p1, lower = problems.quadratic(), bilevel.descent(optax.sgd(STEP))
    estimator = bilevel.implicit(lower, 300, solve=bilevel.cg(len(p1.y)))
    return walking.apart(p1.exact, walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x)


def damped_solvers() -> float:
    """`(H + damp I)^{-1}` by conjugate gradients and by a long series: on P1."""
    p1, lower, distances = problems.quadratic(), bilevel.descent(optax.sgd(STEP)), []
    for damp in (0.01, 0.5):
        matrix = p1.A + damp * np.eye(len(p1.y))
        for solve in (bilevel.cg(len(p1.y), damp), bilevel.neumann(400, STEP, damp)):
            estimator = bilevel.implicit(lower, 300, solve=solve)
            found = walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x
            distances.append(walking.apart(p1.through(p1.best - p1.t, matrix), found))
    return max(distances)


def neumann_by_hand() -> float:
    """Cold and then warm: `v <- v + eta (b - H v)`, Q times, from the last v."""
    p1, lower, distances = problems.quadratic(), bilevel.descent(optax.sgd(STEP)), []
    for Q in (1, 2, 5):
        estimator = bilevel.implicit(lower, 3, solve=bilevel.neumann(Q, 0.2))
        problem, state, solution, y = p1.problem, None, np.zeros_like(p1.y), p1
        for _ in range(3):
            y = y._replace(y=y.descended(3, STEP))
            for _ in range(Q):
                solution = solution + 0.2 * (y.y - p1.t - p1.A @ solution)
            result = walking.jitted(problem, estimator, p1.x, p1.y, state=state)
            state, wanted = result.state, p1.rho * p1.x + p1.B.T @ solution
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
    p1, lower, distances = problems.quadratic(), bilevel.descent(optax.sgd(STEP)), []
    for fd_step in (1e-2, 1.0):
        found = [
            walking.jitted(
                p1.problem, bilevel.implicit(lower, _T, solve=bilevel.cg(3), **cross), p1.x, p1.y
            ).grad_x
            for cross in ({}, {"cross": "fd", "fd_step": fd_step})
        ]
        distances.append(walking.apart(*found))
    return max(distances)


def gap_is_damped_implicit() -> float:
    """Exact y and z, multiplier lambda: `(H + I / lambda)^{-1}`, at y*: on P1."""
    p1, lower, distances = problems.quadratic(), bilevel.descent(optax.sgd(STEP)), []
    for multiplier in (1.0, 10.0, 100.0, 1e4):
        matrix = p1.A + np.eye(len(p1.y)) / multiplier
        wanted = p1.through(p1.best - p1.t, matrix)
        estimator = bilevel.value_gap(lower, 400, multiplier=multiplier)
        result = walking.jitted(p1.problem, estimator, p1.x, p1.y)
        found = (result.grad_x, result.state.y)
        distances.append(walking.apart((wanted, p1.penalised(multiplier)), found))
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
    p1, tx, rng = problems.quadratic(), adam(0.2), np.random.default_rng(4)
    stack, upper = rng.normal(size=(7, len(p1.y))), rng.normal(size=len(p1.y))

    def squared(x, y, batch):  # its cross and Hessian products depend on the batch
        return p1.problem.lower(x, y, batch) + 0.1 * jnp.sum((x * batch[:3]) ** 2) * jnp.sum(y**2)

    problem = bilevel.Bilevel(p1.problem.upper, squared)
    batches = bilevel.Batches(upper, bilevel.Stack(stack))

    def loop(x):
        return walking.plain(problem, tx, 7, x, p1.y, batches=stack, upper=upper)[0]

    wanted = jax.jit(jax.grad(loop))(p1.x)
    estimators = [
        bilevel.unroll(bilevel.descent(tx), 7, **options)
        for options in ({}, {"checkpoint": True}, {"mode": "forward"})
    ]
    found = [walking.jitted(problem, e, p1.x, p1.y, batches).grad_x for e in estimators]
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
    "conjugate gradients are exact after as many steps as numbers": cg_is_exact,
    "damping adds to the diagonal": damped_solvers,
    "Neumann's series goes on where it ended": neumann_by_hand,
    "rank one is its formula": rank_one_formula,
    "finite differences are exact on quadratics": differences_on_quadratics,
    "the value gap is implicit, damped by 1 / lambda": gap_is_damped_implicit,
    "hypergradients of example weights are their formulas": example_weights,
    "every step has its own batch": steps_take_their_batches,
    "MAML is jax.grad through the loop": lambda: learned_start("rate in the state"),
    "MAML with checkpoints": lambda: learned_start("adam", checkpoint=True),
    "first-order MAML is no step back": first_order_maml,
    **{
        f"no step back leaves a rate its own derivative, {name}": (
            lambda name=name: first_order(name, of_ones_own=name == "adam, rate in x")
        )
        for name in DYNAMICS
    },
    "the worst iterate is found and differentiated": worst_iterate,
}
