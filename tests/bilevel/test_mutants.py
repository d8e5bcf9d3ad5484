"""Faults made on purpose: for each, the identity that is there for it has to break."""

import jax
import jax.numpy as jnp
import pytest

from hetjax import bilevel
from hetjax.bilevel import problem as problem_lib
from hetjax.bilevel import solvers, trajectory, vectors
from tests.bilevel import identities, problems

WHOLE = 1e-11  # what test_identities asks for
BROKEN = 1e-4


def with_the_old_residual(num_steps, damp=0.0):
    """Conjugate gradients whose next direction is made of the residual before the step."""

    def take(solving, product):
        p, r = solving.vector, solving.residual
        product = vectors.add(product, p, damp)
        alpha = vectors.inner(r, r) / vectors.inner(p, product)
        residual = vectors.add(r, product, -alpha)
        beta = vectors.inner(residual, residual) / vectors.inner(r, r)
        return solving._replace(
            solution=vectors.add(solving.solution, p, alpha),
            residual=residual,
            vector=vectors.add(r, p, beta),  # the mistake: r for residual
        )

    return solvers.cg(num_steps, damp)._replace(take=take)


def without_eta(num_terms, eta, damp=0.0):
    """A Neumann series whose residual takes a whole step, and its solution one of eta."""

    def take(solving, product):
        product = vectors.add(product, solving.residual, damp)
        residual = vectors.add(solving.residual, product, -1.0)
        solution = vectors.add(solving.solution, residual, eta)
        return solving._replace(residual=residual, solution=solution, vector=residual)

    return solvers.neumann(num_terms, eta, damp)._replace(take=take)


def answering(change):
    """Answers that were changed: `(what, answer) -> answer`."""
    real = problem_lib.answer
    return lambda problem, what, at, batch: change(what, real(problem, what, at, batch))


def doubled(what, answer):
    """Twice the gradient in x of the lower loss: a central difference over h, not over 2 h."""
    if what.kind is problem_lib.Kind.GRADIENT and what == what._replace(level="lower", wrt=("x",)):
        return answer._replace(x=jax.tree.map(lambda g: 2 * g, answer.x))
    return answer


def halved_products(what, answer):
    if what.kind is problem_lib.Kind.PRODUCTS and "y" in what.wrt:
        return answer._replace(y=jax.tree.map(lambda g: g / 2, answer.y))
    return answer


def over_the_sum_of_weights(task):
    """The cleaning problem, its lower loss over the sum of the weights."""

    def lower(x, y, batch):
        del batch
        weights = jax.nn.sigmoid(x)
        mean = jnp.sum(weights * task.losses(y, 0)) / jnp.sum(weights)
        return mean + 0.5 * task.ridge * jnp.sum(y**2)

    def upper(x, y, batch):
        del x, batch
        return jnp.sum(task.losses(y, 1)) / task.labels.shape[1]

    return bilevel.Bilevel(upper, lower)


def without_x_in(part, real=bilevel.descent):
    """Lower dynamics whose state or step does not see that its optimiser depends on x."""

    def descent(tx):
        made = real(tx)
        stop = jax.lax.stop_gradient
        if part == "init":
            return made._replace(init=lambda x, y: made.init(stop(x), y))
        return made._replace(step=lambda x, *rest: made.step(stop(x), *rest))

    return descent


AGREE = "reverse, checkpoints, forward and a plain loop agree on the MLP, "
MUTANTS = {
    "conjugate gradients with the old residual": (
        (bilevel, "cg", with_the_old_residual),
        "conjugate gradients are exact after as many steps as numbers",
    ),
    "damped conjugate gradients with the old residual": (
        (bilevel, "cg", with_the_old_residual),
        "damping adds to the diagonal",
    ),
    "a Neumann series without eta": (
        (bilevel, "neumann", without_eta),
        "K steps back are K terms of Neumann's series on P1",
    ),
    "a warm Neumann series without eta": (
        (bilevel, "neumann", without_eta),
        "Neumann's series goes on where it ended",
    ),
    "one step without eta": (
        (bilevel, "scaled", lambda eta: solvers.scaled(1.0)),
        "one step back is the scaled upper gradient",
    ),
    "damping left out": (
        (bilevel, "cg", lambda num_steps, damp=0.0: solvers.cg(num_steps)),
        "damping adds to the diagonal",
    ),
    "differences over h for 2 h": (
        (problem_lib, "answer", answering(doubled)),
        "finite differences are exact on quadratics",
    ),
    "half of the Hessian product": (
        (problem_lib, "answer", answering(halved_products)),
        "reverse mode is the closed form on P1",
    ),
    "a multiplier twice as large": (
        (bilevel, "value_gap", lambda *a, multiplier, **k: real_gap(*a, multiplier=2 * multiplier)),
        "the value gap is implicit, damped by 1 / lambda",
    ),
    "weights in the denominator": (
        (problems.Cleaning, "problem", property(over_the_sum_of_weights)),
        "hypergradients of example weights are their formulas",
    ),
    "the first batch for every step": (
        (trajectory, "at_step", lambda walk: problem_lib.At(walk.x, walk.y)),
        "every step has its own batch",
    ),
    "the rate's own gradient left out": (
        (bilevel, "descent", without_x_in("step")),
        AGREE + "rate in x",
    ),
    "the first state's gradient left out": (
        (bilevel, "descent", without_x_in("init")),
        AGREE + "rate in the state",
    ),
}
real_gap = bilevel.value_gap


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_breaks_its_identity(name, monkeypatch, float64):
    (where, what, mutant), identity = MUTANTS[name]
    assert identities.IDENTITIES[identity]() < WHOLE
    monkeypatch.setattr(where, what, mutant)
    assert not identities.IDENTITIES[identity]() < BROKEN
