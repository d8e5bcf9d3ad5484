"""A bilevel problem, what an estimator may ask about it, and the answer on one device."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.types import PyTree

UPPER, LOWER = "upper", "lower"


class Bilevel(NamedTuple):
    """`min_x F(x, y)` with y among the minimisers of `f(x, ·)`.

    Losses are `(x, y, batch) -> scalar`; a batch is whatever the caller gives, and None where
    it gives nothing.
    """

    upper: Callable[[PyTree, PyTree, Any], jax.Array]  # F
    lower: Callable[[PyTree, PyTree, Any], jax.Array]  # f


class Stack(NamedTuple):
    """Batches, leaves `[K, ...]`: each request of a level that wants a new one takes the next."""

    batches: PyTree


class Batches(NamedTuple):
    """The batches of one hypergradient. What is no `Stack` is taken whole by every request."""

    upper: Any = None
    lower: Any = None


class Kind(enum.Enum):
    """Which sum over a batch is wanted."""

    LOSS = "loss"
    """The loss alone."""
    GRADIENT = "gradient"
    """The loss, and its gradient with respect to what `wrt` names."""
    PRODUCTS = "products"
    """Of the gradient with respect to y: its derivative along `vector`, in y and in x.

    With v the vector: `H v`, H the second derivative in y; and `grad_x <grad_y f, v>`.
    """
    TANGENTS = "tangents"
    """The gradient with respect to y, and its derivatives along n tangents of (x, y)."""


class What(NamedTuple):
    """The part of a request that is known before anything is computed."""

    kind: Kind
    level: str  # UPPER or LOWER
    wrt: tuple[str, ...] = ("y",)  # of "x" and "y"
    is_new: bool = False  # a batch that no request had before; else one that is held
    num_tangents: int = 0


class At(NamedTuple):
    """The part of a request that is computed: where, along what, on which batch."""

    x: PyTree
    y: PyTree
    batch: Any = 0  # i32[]: number of the batch, among those of its level
    vector: PyTree = ()  # like y; of PRODUCTS
    tangents: PyTree = ()  # (like x, like y), leaves [n, ...]; of TANGENTS


class Answer(NamedTuple):
    """The sums that were asked for; the others are ()."""

    loss: Any = ()
    x: PyTree = ()  # gradient or product, like x
    y: PyTree = ()  # gradient or product, like y
    tangents: PyTree = ()  # like y, leaves [n, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Cost:
    """What an estimator asks for: numbers of calls, each over one batch. Static, also under jit."""

    losses: int = 0
    gradients: int = 0
    hessian_products: int = 0
    cross_products: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """The sum of this cost and of so many of another."""
        mine, theirs = vars(self), vars(other)
        return Cost(**{name: mine[name] + times * theirs[name] for name in mine})


def cost_of(what: What) -> Cost:
    """Of one request."""
    match what.kind:
        case Kind.LOSS:
            return Cost(losses=1)
        case Kind.GRADIENT:
            return Cost(gradients=1)
        case Kind.PRODUCTS:
            return Cost(hessian_products=int("y" in what.wrt), cross_products=int("x" in what.wrt))
        case Kind.TANGENTS:
            return Cost(gradients=1, hessian_products=what.num_tangents)


def batch_of(batches: Batches, what: What, at: At) -> Any:
    """The batch that a request is about."""
    given = batches.upper if what.level == UPPER else batches.lower
    if not isinstance(given, Stack):
        return given
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[at.batch], given.batches)


def answer(problem: Bilevel, what: What, at: At, batch: Any) -> Answer:
    """What a request asks for, by JAX's derivatives of the problem's losses.

    A product is the derivative of a scalar, `<grad_y f, v>`: no matrix is formed.
    """
    function = problem.upper if what.level == UPPER else problem.lower
    match what.kind:
        case Kind.LOSS:
            return Answer(loss=function(at.x, at.y, batch))
        case Kind.GRADIENT:
            return _gradient(function, what, at, batch)
        case Kind.PRODUCTS:
            return _products(function, what, at, batch)
        case Kind.TANGENTS:
            return _tangents(function, at, batch)


def _gradient(function: Callable, what: What, at: At, batch: Any) -> Answer:
    argnums = tuple("xy".index(name) for name in what.wrt)
    loss, grads = jax.value_and_grad(function, argnums)(at.x, at.y, batch)
    return Answer(loss=loss, **dict(zip(what.wrt, grads, strict=True)))


def _products(function: Callable, what: What, at: At, batch: Any) -> Answer:
    def along(x: PyTree, y: PyTree) -> jax.Array:
        """`<grad_y f(x, y), v>`, whose gradient in y is H v since H is symmetric."""
        return jax.jvp(lambda y: function(x, y, batch), (y,), (at.vector,))[1]

    argnums = tuple("xy".index(name) for name in what.wrt)
    products = jax.grad(along, argnums)(at.x, at.y)
    return Answer(**dict(zip(what.wrt, products, strict=True)))


def _tangents(function: Callable, at: At, batch: Any) -> Answer:
    def gradient(x: PyTree, y: PyTree) -> tuple[PyTree, jax.Array]:
        loss, of_y = jax.value_and_grad(function, 1)(x, y, batch)
        return of_y, loss

    of_y, along, loss = jax.linearize(gradient, at.x, at.y, has_aux=True)
    return Answer(loss=loss, y=of_y, tangents=jax.vmap(along)(*at.tangents))
