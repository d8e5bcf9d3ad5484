"""How `implicit` solves `(H + damp I) v = b`. H is the second derivative of the lower loss in y.

A solver asks for one product `H p` at a time, and keeps what it needs between two of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import parts
from hetjax.bilevel.vectors import add, dtype_of, inner, like, zeros_like
from hetjax.types import PyTree


class Solving(NamedTuple):
    """What a solver keeps between two products."""

    solution: PyTree  # v
    residual: PyTree  # b - (H + damp) v, as far as it is known
    vector: PyTree  # p, the vector whose product is wanted next
    right: PyTree  # b
    curvature: Any  # the least p' (H + damp) p / p' p so far; () if it is not computed


class Solver(NamedTuple):
    """A record of pure functions.

    Attributes:
        num_products: products after the first one of a warm start.
        begin: `(right, start) -> Solving`; `start` is None for a cold start.
        warm: `(solving, product) -> Solving`, of the product with the start; None: it takes no
            start.
        take: `(solving, product) -> Solving`.
        kind: how the hypergradient is made. 'solution': by a cross product with v. 'optimizer': v
            is b pulled through the last lower step. 'rank_one': as `rank_one` says.
        damp: of 'rank_one', added to `|g|^2`.
    """

    num_products: int
    begin: Callable[[PyTree, PyTree | None], Solving]
    warm: Callable[[Solving, PyTree], Solving] | None
    take: Callable[[Solving, PyTree], Solving]
    kind: str = "solution"
    damp: float = 0.0


def cg(num_steps: int, damp: float = 0.0) -> Solver:
    """Conjugate gradients: the error falls by (sqrt(kappa) - 1)/(sqrt(kappa) + 1) a step.

    H + damp I has to be positive definite. `info.curvature` is the least curvature that was met; a
    step along which it is not positive is not made. Once the residual is only rounding, the system
    is solved: no more steps are made and no curvature is computed.

    Args:
        num_steps: Q.
        damp: added to the diagonal; it acts as the inverse of a value gap's multiplier does.

    Raises:
        ValueError: num_steps is less than 1.
    """
    parts.integer(at_least=1).check("cg: num_steps", num_steps)

    def warm(solving: Solving, product: PyTree) -> Solving:
        residual = add(solving.right, add(product, solving.solution, damp), -1.0)
        return solving._replace(residual=residual, vector=residual)

    def take(solving: Solving, product: PyTree) -> Solving:
        p, r = solving.vector, solving.residual
        product = add(product, p, damp)
        size, along, length = inner(r, r), inner(p, product), inner(p, p)
        is_left = size > jnp.finfo(size.dtype).eps ** 2 * inner(solving.right, solving.right)
        curvature = jnp.where(is_left, along / jnp.where(is_left, length, 1), jnp.inf)
        goes = is_left & (along > 0)
        alpha = jnp.where(goes, size / jnp.where(goes, along, 1), 0)
        residual = add(r, product, -alpha)
        beta = jnp.where(goes, inner(residual, residual) / jnp.where(goes, size, 1), 0)
        return Solving(
            add(solving.solution, p, alpha),
            residual,
            add(residual, p, beta),
            solving.right,
            jnp.minimum(solving.curvature, curvature),
        )

    return Solver(num_steps, _from_nothing, warm, take)


def neumann(num_terms: int, eta: float, damp: float = 0.0) -> Solver:
    """`v = eta sum_{j < Q} (I - eta H)^j b`, 0 < eta < 2 / L: also the steps of SOBA, warm.

    The same as differentiating the last Q steps of gradient descent if they do not move.
    `info.residual` is the residual before the last term.

    Args:
        num_terms: Q; a cold start takes Q - 1 products, a warm one Q.
        eta: the step.
        damp: added to the diagonal.

    Raises:
        ValueError: num_terms is less than 1.
    """
    parts.integer(at_least=1).check("neumann: num_terms", num_terms)

    def begun(solving: Solving) -> Solving:
        r = solving.residual
        return solving._replace(solution=add(solving.solution, r, eta), vector=r)

    def begin(right: PyTree, start: PyTree | None) -> Solving:
        solving = _from_nothing(right, start)._replace(curvature=())
        return begun(solving) if start is None else solving

    def warm(solving: Solving, product: PyTree) -> Solving:
        product = add(product, solving.solution, damp)
        return begun(solving._replace(residual=add(solving.right, product, -1.0)))

    def take(solving: Solving, product: PyTree) -> Solving:
        residual = add(solving.residual, add(product, solving.residual, damp), -eta)
        return begun(solving._replace(residual=residual))

    return Solver(num_terms - 1, begin, warm, take)


def scaled(eta: float) -> Solver:
    """`v = eta b`: a multiple of the identity stands for the inverse of H (T1-T2; one step).

    Args:
        eta: stands for the inverse of H; above 0.

    Returns:
        What `implicit` takes as `solver`.
    """

    def begin(right: PyTree, start: PyTree | None) -> Solving:
        return _from_nothing(right, None)._replace(solution=jax.tree.map(lambda b: eta * b, right))

    return Solver(0, begin, None, _never)


def one_step() -> Solver:
    """v is b pulled through the last lower step: `v = -(d y' / d gradient)' b`.

    For gradient descent it is `scaled` with the learning rate. For Adam it is a diagonal that
    adapts (SAMA).
    """
    return Solver(0, _from_nothing, None, _never, "optimizer")


def rank_one(damp: float = 0.0) -> Solver:
    """`g g'` stands for H, g the lower gradient (IGA): `d_x F - <b, g> / (|g|^2 + damp) d_x f`.

    It takes only gradients. If `damp` is 0, the quotient grows as `1 / |g|` near the lower
    minimum. If the lower gradient is 0, nothing is subtracted.

    Args:
        damp: added to `|g|^2`; at least 0.

    Returns:
        What `implicit` takes as `solver`.
    """
    return Solver(0, _from_nothing, None, _never, "rank_one", damp)


def _from_nothing(right: PyTree, start: PyTree | None) -> Solving:
    solution = zeros_like(right) if start is None else like(start, right)
    vector = right if start is None else solution
    return Solving(solution, right, vector, right, jnp.asarray(jnp.inf, dtype_of(right)))


def _never(solving: Solving, product: Any) -> Solving:
    return solving
