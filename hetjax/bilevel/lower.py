"""Lower dynamics: how one step moves the lower variable."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from hetjax import trees
from hetjax.bilevel import problem, vectors
from hetjax.types import PyTree


class Lower(NamedTuple):
    """One step of the lower level, as pure functions.

    `step` is differentiated by `unroll`, in x, y, the state and the gradients.
    """

    levels: tuple[str, ...]
    """The levels whose gradients in y a step takes, in this order."""
    init: Callable[[PyTree, PyTree], PyTree]
    """`(x, y) -> state`, such as an optimiser's."""
    step: Callable[[PyTree, PyTree, PyTree, tuple[PyTree, ...], Any], tuple[PyTree, PyTree]]
    """`(x, y, state, gradients, k) -> (y, state)`; k counts the steps from 0."""
    keeps_state: bool = True
    """Whether the state goes on from one hypergradient to the next, if y does."""
    uses_x: bool = True
    """Whether x is in a step beside its gradients, as a learning rate is."""

    def first_state(self, x: PyTree, y: PyTree, kept: PyTree = ()) -> PyTree:
        """The state before the first step: what was kept, or a new one.

        Args:
            x: the upper variable.
            y: the lower variable.
            kept: the state that a hypergradient before left; () where there is none.

        Returns:
            A pytree of arrays.
        """
        if self.keeps_state and kept != ():
            return kept
        return jax.tree.map(jnp.asarray, self.init(x, y))


Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[[PyTree], optax.GradientTransformation]
)


def moved(
    lower: Lower, x: PyTree, y: PyTree, state: PyTree, gradients: tuple[PyTree, ...], k: Any
) -> tuple[PyTree, PyTree]:
    """A step whose y and state have the types of those before, as a loop keeps them."""
    return vectors.like(lower.step(x, y, state, gradients, k), (y, state))


def check(lower: Any, estimator: str, *, of_lower_alone: bool = False) -> None:
    """Refuses what is no lower step, or one by other gradients than an estimator can do with.

    Raises:
        ValueError: it is none, or takes the upper gradient where it is to be `of_lower_alone`.
    """
    if not isinstance(lower, Lower):
        raise ValueError(f"{estimator}: lower is {lower!r}; give descent(tx) or aggregate(tx)")
    if of_lower_alone and lower.levels != (problem.LOWER,):
        raise ValueError(
            f"{estimator}: lower takes gradients of both levels; give descent(tx), or take unroll"
        )


def descent(tx: Optimizer) -> Lower:
    """Steps of an optimiser down the lower loss.

    Args:
        tx: an optax optimiser; its state goes on from one hypergradient to the next if y does. Or
            a function of x that makes one, if x holds its learning rate, decay or the like; then
            its state begins anew each time.

    Raises:
        ValueError: `tx` is neither.

    Example:
        >>> lower = descent(lambda x: optax.sgd(jnp.exp(x["log_rate"])))
    """
    return _of_optimizer("descent", tx, (problem.LOWER,), lambda gradients, k: gradients[0])


def aggregate(
    tx: Optimizer,
    *,
    alpha: Callable[[Any], Any] = lambda k: (k + 1.0) ** -0.5,
    mu: float = 0.5,
    upper_scale: float = 1.0,
) -> Lower:
    """Bilevel descent aggregation: steps down both losses, for lower problems with many solutions.

    The direction is `mu alpha(k) upper_scale grad_y F + (1 - mu) grad_y f`. `alpha` falls to 0, but
    its sum is infinite. So the steps end at the lower solution with the least F.

    Args:
        tx: as for `descent`; plain gradient descent in the paper.
        alpha: a function of the step's number, from 0; falls to 0, with an infinite sum.
        mu: between 0 and 1.
        upper_scale: the upper step over the lower one.

    Returns:
        What the estimators take as `lower`.

    Raises:
        ValueError: `tx` is no optax optimiser and makes none.

    References:
        Liu, Mu, Yuan, Zeng, Zhang, "A generic first-order algorithmic framework for bi-level
        programming beyond lower-level singleton", 2020, arXiv 2006.04045.
    """

    def direction(gradients: tuple[PyTree, ...], k: Any) -> PyTree:
        dtype = trees.wider(jnp.float32, vectors.dtype_of(gradients))
        share = mu * upper_scale * alpha(jnp.asarray(k, dtype))
        return jax.tree.map(
            lambda upper, lower: share.astype(upper.dtype) * upper + (1 - mu) * lower, *gradients
        )

    return _of_optimizer("aggregate", tx, (problem.UPPER, problem.LOWER), direction)


def _of_optimizer(
    caller: str,
    tx: Optimizer,
    levels: tuple[str, ...],
    direction: Callable[[tuple[PyTree, ...], Any], PyTree],
) -> Lower:
    """Steps of an optimiser along a direction made of the gradients of these levels."""
    if not (isinstance(tx, optax.GradientTransformation) or callable(tx)):
        raise ValueError(f"{caller}: tx is {tx!r}; give an optax optimiser, or a function of x")

    def made(x: PyTree) -> optax.GradientTransformation:
        return tx if isinstance(tx, optax.GradientTransformation) else tx(x)

    def step(x, y, state, gradients, k):
        updates, state = made(x).update(direction(gradients, k), state, y)
        return optax.apply_updates(y, updates), state

    is_plain = isinstance(tx, optax.GradientTransformation)
    return Lower(levels, lambda x, y: made(x).init(y), step, is_plain, uses_x=not is_plain)
