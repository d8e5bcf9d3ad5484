"""What an unrolled estimator carries, where it makes a request, and what becomes of the answer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.bilevel import vectors
from hetjax.bilevel.problem import Answer, At
from hetjax.types import PyTree


class Learned(NamedTuple):
    """An upper variable that has the lower level's start in it, for `start="learned"`."""

    x: PyTree
    start: PyTree  # like y


class Moment(NamedTuple):
    """What the way back needs of a step."""

    y: PyTree
    opt: PyTree
    gradients: tuple[PyTree, ...]


class Tangents(NamedTuple):
    """Forward mode: derivatives along each number of x, leaves `[n, ...]`."""

    x: PyTree  # the basis
    y: PyTree
    opt: list[jax.Array]  # of the optimiser's numbers
    gradients: tuple[PyTree, ...]


class Choice(NamedTuple):
    """The iterate with the worst upper loss so far."""

    loss: jax.Array
    step: jax.Array  # i32[], 1 to T
    y: PyTree
    tangents: PyTree


class Walk(NamedTuple):
    """What an unrolled estimator carries."""

    x: PyTree
    y: PyTree
    opt: PyTree
    k: jax.Array  # i32[]: steps made, and on the way back those that are left
    gradients: tuple[PyTree, ...]  # of this step, by level; on the way back, vectors of products
    past: PyTree  # reverse mode: what is held of the steps
    tangents: Any  # Tangents, or () in reverse mode
    chosen: Any  # Choice, or () where the last iterate is taken
    reached: tuple[PyTree, PyTree]  # y and opt at the end
    loss: jax.Array  # F there
    lower_loss: jax.Array  # f before the last step
    grad_x: PyTree
    adjoint: tuple[PyTree, list[jax.Array]]  # of y, and of the optimiser's numbers
    turn: jax.Array  # i32[]: hypergradients before this one


def at_end(batch: int, walk: Walk) -> At:
    """Where the upper loss is looked at: on the batch after those of the steps, if any."""
    return At(walk.x, walk.y, batch)


def at_step(walk: Walk) -> At:
    """Step k has the k-th batch of each level that it asks."""
    return At(walk.x, walk.y, walk.k)


def tangents_at(walk: Walk) -> At:
    return at_step(walk)._replace(tangents=(walk.tangents.x, walk.tangents.y))


def take_gradient(index: int, walk: Walk, answer: Answer) -> Walk:
    """The gradients of a step are in the order of its levels, the lower one last."""
    walk = walk._replace(gradients=_with(walk.gradients, index, answer.y))
    if index < len(walk.gradients) - 1 or isinstance(answer.loss, tuple):
        return walk
    return walk._replace(lower_loss=answer.loss.astype(walk.loss.dtype))


def take_tangents(index: int, walk: Walk, answer: Answer) -> Walk:
    walk = take_gradient(index, walk, answer)
    gradients = _with(walk.tangents.gradients, index, answer.tangents)
    return walk._replace(tangents=walk.tangents._replace(gradients=gradients))


def take_loss(walk: Walk, answer: Answer) -> Walk:
    """Keeps the iterate where its upper loss is the highest so far."""
    loss = answer.loss.astype(walk.chosen.loss.dtype)
    now = Choice(loss, walk.k, walk.y, walk.tangents)
    is_worse = loss > walk.chosen.loss
    chosen = jax.tree.map(lambda new, old: jnp.where(is_worse, new, old), now, walk.chosen)
    return walk._replace(chosen=chosen)


def to_chosen(walk: Walk) -> Walk:
    chosen = walk.chosen
    return walk._replace(y=chosen.y, k=chosen.step, tangents=chosen.tangents)


def take_upper(walk: Walk, answer: Answer) -> Walk:
    return walk._replace(
        reached=(walk.y, walk.opt),
        loss=answer.loss.astype(walk.loss.dtype),
        grad_x=vectors.like(answer.x, walk.x),
        adjoint=(vectors.like(answer.y, walk.y), walk.adjoint[1]),
    )


def take_products(walk: Walk, answer: Answer) -> Walk:
    of_y, of_opt = walk.adjoint
    return walk._replace(
        adjoint=(vectors.add(of_y, answer.y), of_opt),
        grad_x=vectors.add(walk.grad_x, answer.x),
    )


def one_less(walk: Walk) -> Walk:
    return walk._replace(k=walk.k - 1)


def through_first(init: Callable[[PyTree, PyTree], PyTree], y: PyTree, walk: Walk) -> Walk:
    """Through the optimiser's first state, made of x and the first y, after all steps back.

    A learning rate that the state holds has its gradient here.
    """
    of_y, of_opt = walk.adjoint
    if not of_opt:
        return walk

    def made(x: PyTree, y: PyTree) -> list[jax.Array]:
        return vectors.floats(vectors.like(init(x, y), walk.opt))

    _, pull = jax.vjp(made, walk.x, y)
    of_x, of_first = pull([jnp.where(walk.k == 0, adjoint, 0) for adjoint in of_opt])
    adjoint = vectors.add(of_y, of_first), of_opt
    return walk._replace(adjoint=adjoint, grad_x=vectors.add(walk.grad_x, of_x))


def _with(items: tuple, index: int, item: PyTree) -> tuple:
    return (*items[:index], vectors.like(item, items[index]), *items[index + 1 :])
