"""A bilevel problem, what an estimator may ask about it, and the answer on one device."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.bilevel import per_example
from hetjax.types import PyTree

UPPER, LOWER = "upper", "lower"


class Bilevel(NamedTuple):
    """`min_x F(x, y)` with y among the minimisers of `f(x, ·)`.

    Losses are `(x, y, batch) -> scalar`; a batch is whatever the caller gives, and None where
    it gives nothing. Or they return one number an example, f[B], or `(losses, weights)`, as those
    of `hetjax.fit` do: then the loss is their mean, and the problem can be given to
    `hetjax.fit_bilevel`, too.
    """

    upper: Callable[[PyTree, PyTree, Any], jax.Array]  # F
    lower: Callable[[PyTree, PyTree, Any], jax.Array]  # f


class Stack(NamedTuple):
    """Batches, leaves `[K, ...]`: each request of a level that wants a new one takes the next."""

    batches: PyTree


class Blocks(NamedTuple):
    """One batch in B equal blocks, leaves `[B, size, ...]`, of which one at a time is in memory.

    What is asked of it is the mean of what is asked of each block. For losses that are means over
    the examples of a batch, and for what they add without examples, that is the same as of all
    examples at once, and so are the derivatives. A loss that reads numbers of x for each example
    finds them by an index in the batch: `x[batch.index]`.

    A `Stack` of batches in blocks is `Stack(Blocks(tree))`, leaves `[K, B, size, ...]`.

    Example:
        >>> import numpy as np
        >>> blocks = Blocks.of({"a": np.zeros((12, 3)), "index": np.arange(12)}, size=4)
        >>> blocks.batches["a"].shape, blocks.batches["index"].shape
        ((3, 4, 3), (3, 4))
    """

    batches: PyTree

    @classmethod
    def of(cls, batch: PyTree, size: int) -> "Blocks":
        """Cuts a batch, leaves `[n, ...]`, into blocks of `size` examples; n / size blocks.

        Raises:
            ValueError: the leaves are of several lengths, or `size` does not divide n.
        """
        if isinstance(batch, Stack | Blocks):
            raise ValueError(
                f"Blocks.of: got a {type(batch).__name__}; give one batch, leaves [n, ...]. "
                "Batches in blocks are Stack(Blocks(tree)), leaves [K, B, size, ...]"
            )
        lengths = lengths_of(batch)
        if len(lengths) != 1 or min(lengths) < 1:
            raise ValueError(
                f"Blocks.of: the leaves of the batch have leading axes {_said(lengths)}; all "
                "have to have one of the same length, that of the examples"
            )
        (num,) = lengths
        if size < 1 or num % size:
            near = sorted(
                (d for d in range(1, num + 1) if num % d == 0), key=lambda d: abs(d - size)
            )
            raise ValueError(
                f"Blocks.of: {num} examples cannot be cut into blocks of {size}: the mean over "
                "blocks is that over examples where all blocks are of one size. Sizes that divide "
                f"{num}: {', '.join(map(str, sorted(near[:3])))}"
            )
        return cls(
            jax.tree.map(lambda a: jnp.reshape(a, (num // size, size, *jnp.shape(a)[1:])), batch)
        )

    @property
    def num_blocks(self) -> int:
        """B.

        Raises:
            ValueError: the leaves do not have one.
        """
        if isinstance(self.batches, Stack):
            raise ValueError(
                "Blocks: got a Stack. Batches in blocks are Stack(Blocks(tree)), leaves "
                "[K, B, size, ...]"
            )
        lengths = lengths_of(self.batches)
        if len(lengths) != 1 or min(lengths) < 1:
            raise ValueError(
                f"Blocks: the leaves have leading axes {_said(lengths)}; give all of them "
                "[B, size, ...] with the same B, at least 1, as Blocks.of(batch, size) does"
            )
        return min(lengths)

    def block(self, number: Any) -> PyTree:
        """One of them, leaves `[size, ...]`.

        Raises:
            ValueError: as `num_blocks`.
        """
        _ = self.num_blocks
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], self.batches)


def lengths_of(tree: PyTree) -> set[int]:
    """Those of the leading axes; 0 for a leaf without axes."""
    return {(*jnp.shape(leaf), 0)[0] for leaf in jax.tree.leaves(tree)}


def _said(lengths: set[int]) -> str:
    return ", ".join(map(str, sorted(lengths))) or "none"


class Batches(NamedTuple):
    """The batches of one hypergradient. What is no `Stack` is taken whole by every request.

    Either may be in `Blocks`, which are answered one after the other.
    """

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


def mean(loss: Callable[[PyTree, PyTree, Any], Any]) -> Callable[[PyTree, PyTree, Any], jax.Array]:
    """A loss of a problem as a scalar: a mean by weights where it returns one number an example."""

    def scalar(x: PyTree, y: PyTree, batch: Any) -> jax.Array:
        found = loss(per_example.plain(x), y, batch)
        losses, weights = found[:2] if isinstance(found, tuple) else (found, None)
        if weights is not None:
            total = jax.lax.stop_gradient(jnp.sum(weights))
            return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1)
        return jnp.mean(losses) if jnp.ndim(losses) else losses

    return scalar


def answer(problem: Bilevel, what: What, at: At, batch: Any) -> Answer:
    """What a request asks for, by JAX's derivatives of the problem's losses.

    A product is the derivative of a scalar, `<grad_y f, v>`: no matrix is formed. Of `Blocks` it
    is the mean over blocks, by a scan that holds one of them.

    Raises:
        ValueError: the leaves of `Blocks` have no leading axis in common.
    """
    function = mean(problem.upper if what.level == UPPER else problem.lower)
    if isinstance(batch, Blocks) and per_example.split(at.x)[1]:
        raise ValueError(
            "Blocks: x has PerExample leaves, one row for each example of the whole batch. Give a "
            "plain array, and let the loss find its rows by an index: x[batch.index]"
        )
    if not isinstance(batch, Blocks):
        return _answer(function, what, at, batch)
    num_blocks = batch.num_blocks

    def added(sums: Answer, block: PyTree) -> tuple[Answer, None]:
        own = _answer(function, what, at, block)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, own), None

    shapes = jax.eval_shape(lambda block: _answer(function, what, at, block), batch.block(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, trees.wider(jnp.float32, s.dtype)), shapes)
    sums, _ = jax.lax.scan(added, zeros, batch.batches)
    return jax.tree.map(lambda a, s: (a / num_blocks).astype(s.dtype), sums, shapes)


def _answer(function: Callable, what: What, at: At, batch: Any) -> Answer:
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
