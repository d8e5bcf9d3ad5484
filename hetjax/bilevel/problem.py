"""A bilevel problem, what an estimator may ask about it, and the answer on one device."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import trees
from hetjax.bilevel import per_example
from hetjax.bilevel.batches import Batches, Blocks, Stack
from hetjax.losses import weights
from hetjax.types import PyTree

UPPER, LOWER = "upper", "lower"


class Bilevel(NamedTuple):
    """`min_x F(x, y)` with y among the minimisers of `f(x, ·)`.

    Losses are `(x, y, batch) -> scalar`. A batch is whatever the caller gives, or None if it gives
    nothing. Or they return one number an example, f[B], or `(losses, weights)`, as those of
    `hetjax.fit` do. Then the loss is their mean, and `hetjax.fit_bilevel` takes the problem, too.
    With weights the loss is `sum(w l) / sum(w)`. If w depends on x or y, both sums are
    differentiated; `jax.lax.stop_gradient` makes weights constant.
    """

    upper: Callable[[PyTree, PyTree, Any], jax.Array]  # F
    lower: Callable[[PyTree, PyTree, Any], jax.Array]  # f


class Kind(enum.Enum):
    """Which sum over a batch is wanted."""

    LOSS = "loss"
    """Only the loss."""
    GRADIENT = "gradient"
    """The loss, and its gradient with respect to what `wrt` names."""
    PRODUCTS = "products"
    """The derivatives along `vector` of the gradient with respect to y, in y and in x.

    With v the vector: `H v`, H the second derivative in y; and `grad_x <grad_y f, v>`.
    """
    TANGENTS = "tangents"
    """The gradient with respect to y, and its derivatives along n tangents of (x, y)."""


class What(NamedTuple):
    """The part of a request that is known before anything is computed."""

    kind: Kind
    level: str  # UPPER or LOWER
    wrt: tuple[str, ...] = ("y",)  # of "x" and "y"
    is_new: bool = False  # it takes a batch that no request had before; else one that is held
    num_tangents: int = 0


class At(NamedTuple):
    """The part of a request that is computed: at which point, along what, on which batch."""

    x: PyTree  # the upper variable
    y: PyTree  # the lower variable
    batch: Any = 0  # i32[]: number of the batch, among those of its level
    vector: PyTree = ()  # like y; of PRODUCTS
    tangents: PyTree = ()  # (like x, like y), leaves [n, ...]; of TANGENTS


class Answer(NamedTuple):
    """The sums that were asked for; the other fields are ()."""

    loss: Any = ()  # f[]
    x: PyTree = ()  # gradient or product, like x
    y: PyTree = ()  # gradient or product, like y
    tangents: PyTree = ()  # like y, leaves [n, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Cost:
    """How many sums of each kind an estimator asks for, each over one batch. Static under jit."""

    losses: int = 0
    gradients: int = 0
    hessian_products: int = 0
    cross_products: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """The sum of this cost and `times` another."""
        mine, theirs = vars(self), vars(other)
        return Cost(**{name: mine[name] + times * theirs[name] for name in mine})


def cost_of(what: What) -> Cost:
    """What one request costs."""
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


def ratio(loss: Callable[[PyTree, PyTree, Any], Any]) -> Callable[..., tuple[jax.Array, Any]]:
    """A loss of a problem as `(sum(w l), sum(w))`; as `(mean, None)` if it has no weights."""

    def both(x: PyTree, y: PyTree, batch: Any) -> tuple[jax.Array, Any]:
        found = loss(per_example.plain(x), y, batch)
        losses, weights = found[:2] if isinstance(found, tuple) else (found, None)
        if weights is None:
            return jnp.mean(losses) if jnp.ndim(losses) else losses, None
        denominator = jnp.sum(weights)  # first, as where weights are constants
        return jnp.sum(losses * weights), denominator

    return both


def mean(loss: Callable[[PyTree, PyTree, Any], Any]) -> Callable[[PyTree, PyTree, Any], jax.Array]:
    """A loss of a problem as a scalar: a mean by weights if it returns one number an example."""
    both = ratio(loss)

    def scalar(x: PyTree, y: PyTree, batch: Any) -> jax.Array:
        numerator, denominator = both(x, y, batch)
        return numerator if denominator is None else trees.over(numerator, denominator)

    return scalar


def answer(problem: Bilevel, what: What, at: At, batch: Any) -> Answer:
    """What a request asks for, by JAX's derivatives of the problem's losses.

    A product is the derivative of a scalar, `<grad_y f, v>`: no matrix is formed. For `Blocks` a
    scan holds one of them at a time, adds up the `summands`, and divides once.

    Raises:
        ValueError: the leaves of `Blocks` have no leading axis in common.
    """
    loss = problem.upper if what.level == UPPER else problem.lower
    if not isinstance(batch, Blocks):
        return _answer(mean(loss), what, at, batch)
    if per_example.split(at.x)[1]:
        raise ValueError("Blocks: x has PerExample leaves; give arrays, read as x[batch.index]")
    both, first = ratio(loss), batch.block(0)
    depends = weights_depend(both, what, at, first)

    def of_block(block: PyTree) -> tuple[tuple[Answer, ...], Any]:
        return summands(both, what, at, block, depends=depends), both(at.x, at.y, block)[1]

    def added(sums: PyTree, block: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, of_block(block)), None

    shapes = jax.eval_shape(of_block, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, trees.wider(jnp.float32, s.dtype)), shapes)
    (sums, weight), _ = jax.lax.scan(added, zeros, batch.batches)

    def over_all(leaf: jax.Array, like: Any) -> jax.Array:
        if weight is None:
            return (leaf / batch.num_blocks).astype(like.dtype)
        return trees.over(leaf, weight.astype(leaf.dtype)).astype(like.dtype)

    like = jax.eval_shape(lambda parts: quotient(what, parts), shapes[0])
    return jax.tree.map(over_all, quotient(what, sums), like)


# --- A mean by weights over a batch in parts ---


def weights_depend(both: Callable, what: What, at: At, batch: Any) -> bool:
    """Whether what is asked for differentiates `sum(w)`, too; `both` is a loss from `ratio`."""
    names = {
        Kind.LOSS: (),
        Kind.GRADIENT: what.wrt,
        Kind.PRODUCTS: ("y", *what.wrt),
        Kind.TANGENTS: ("x", "y"),
    }

    def of_point(point: dict[str, PyTree], others: dict[str, PyTree], batch: Any) -> Any:
        at_point = {**others, **point}
        return both(at_point["x"], at_point["y"], batch)

    others = {"x": at.x, "y": at.y}
    return weights.depend(of_point, {n: others[n] for n in names[what.kind]}, others, batch)


def summands(
    both: Callable, what: What, at: At, batch: Any, *, depends: bool
) -> tuple[Answer, ...]:
    """What a part of a batch adds; `quotient` makes the answer of it.

    If weights are constant, it is what is asked for, of `sum(w l)`. Else it is the gradients of
    `sum(w l)` and of `sum(w)`, each with its sum as loss. For products and tangents the derivatives
    of all that along them are added.

    Args:
        both: `(x, y, batch) -> (sum(w l), sum(w))`.
        what, at, batch: the request.
        depends: as `weights_depend` says.
    """
    if not depends:
        return (_answer(lambda x, y, batch: both(x, y, batch)[0], what, at, batch),)
    names = ("y",) if what.kind is Kind.TANGENTS else what.wrt

    def gradients(x: PyTree, y: PyTree) -> tuple[Answer, Answer]:
        point = {"x": x, "y": y}

        def at_point(*given: PyTree) -> tuple[jax.Array, jax.Array]:
            at = {**point, **dict(zip(names, given, strict=True))}
            return both(at["x"], at["y"], batch)

        (top, bottom), pull = jax.vjp(at_point, *(point[name] for name in names))
        of_top = pull((jnp.ones_like(top), jnp.zeros_like(bottom)))
        of_bottom = pull((jnp.zeros_like(top), jnp.ones_like(bottom)))
        return (
            Answer(loss=top, **dict(zip(names, of_top, strict=True))),
            Answer(loss=bottom, **dict(zip(names, of_bottom, strict=True))),
        )

    if what.kind is Kind.GRADIENT:
        return gradients(at.x, at.y)
    if what.kind is Kind.PRODUCTS:
        here, along = jax.jvp(lambda y: gradients(at.x, y), (at.y,), (at.vector,))
        return *here, *along
    here, along_one = jax.linearize(gradients, at.x, at.y)
    return *here, *jax.vmap(along_one)(*at.tangents)


def quotient(what: What, sums: tuple[Answer, ...]) -> Answer:
    """What a request asks for, times `sum(w)`, from the `summands` of all parts of its batch.

    Each may be divided by any number that is the same for all; then the answer is, too.
    """
    if len(sums) == 1:
        return sums[0]

    def gradients(numerator: Answer, denominator: Answer) -> dict[str, PyTree]:
        by, over = jax.grad(trees.over, (0, 1))(numerator.loss, denominator.loss)
        return {
            name: jax.tree.map(
                lambda a, b: by.astype(a.dtype) * a + over.astype(b.dtype) * b,
                getattr(numerator, name),
                getattr(denominator, name),
            )
            for name in ("x", "y")
        }

    here, along = sums[:2], sums[2:]
    if what.kind is Kind.PRODUCTS:
        found = Answer(**jax.jvp(gradients, here, along)[1])
    else:
        found = Answer(**gradients(*here))
    if what.kind is Kind.TANGENTS:
        tangents = jax.vmap(lambda *along: jax.jvp(gradients, here, along)[1]["y"])(*along)
        found = found._replace(tangents=tangents)
    numerator, denominator = here[0].loss, here[1].loss
    found = jax.tree.map(lambda leaf: denominator.astype(leaf.dtype) * leaf, found)
    return found if what.kind is Kind.PRODUCTS else found._replace(loss=numerator)


def _answer(function: Callable, what: What, at: At, batch: Any) -> Answer:
    """What a request asks for, of a scalar `(x, y, batch) -> f[]`."""

    def inner_product(x: PyTree, y: PyTree) -> jax.Array:
        """`<grad_y f(x, y), v>`; its gradient in y is H v, since H is symmetric."""
        return jax.jvp(lambda y: function(x, y, batch), (y,), (at.vector,))[1]

    def gradient(x: PyTree, y: PyTree) -> tuple[PyTree, jax.Array]:
        loss, of_y = jax.value_and_grad(function, 1)(x, y, batch)
        return of_y, loss

    argnums = tuple("xy".index(name) for name in what.wrt)
    match what.kind:
        case Kind.LOSS:
            return Answer(loss=function(at.x, at.y, batch))
        case Kind.GRADIENT:
            loss, grads = jax.value_and_grad(function, argnums)(at.x, at.y, batch)
            return Answer(loss=loss, **dict(zip(what.wrt, grads, strict=True)))
        case Kind.PRODUCTS:
            products = jax.grad(inner_product, argnums)(at.x, at.y)
            return Answer(**dict(zip(what.wrt, products, strict=True)))
        case Kind.TANGENTS:
            of_y, along, loss = jax.linearize(gradient, at.x, at.y, has_aux=True)
            return Answer(loss=loss, y=of_y, tangents=jax.vmap(along)(*at.tangents))
