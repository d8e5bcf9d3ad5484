"""What an unrolled estimator carries, where it asks, and what it does with the answers.

`implicit` asks for its lower steps as here.
"""

from typing import Any, NamedTuple

import jax

from hetjax import trees
from hetjax.bilevel import vectors
from hetjax.bilevel.problem import Answer, At
from hetjax.types import PyTree


class Learned(NamedTuple):
    """An upper variable that holds the lower level's start, for `start="learned"`."""

    x: PyTree  # the upper variable itself, a pytree of arrays
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


class Trajectory(NamedTuple):
    """What an unrolled estimator carries."""

    x: PyTree
    y: PyTree
    opt: PyTree
    k: jax.Array  # i32[]: steps made; on the way back, steps left
    gradients: tuple[PyTree, ...]  # of this step, by level; on the way back, vectors of products
    past: PyTree  # reverse mode: what is held of the steps
    tangents: Any  # Tangents, or () in reverse mode
    chosen: Any  # Choice, or () if the last iterate is taken
    reached: tuple[PyTree, PyTree]  # y and opt at the end
    loss: jax.Array  # F there
    lower_loss: jax.Array  # f before the last step
    grad_x: PyTree
    adjoint: tuple[PyTree, list[jax.Array]]  # of y, and of the optimiser's numbers
    turn: jax.Array  # i32[]: hypergradients before this one


def at_step(carry: PyTree) -> At:
    """Where a step asks: step k takes the k-th batch of each of its levels."""
    return At(carry.x, carry.y, carry.k)


def tangents_at(carry: Trajectory) -> At:
    return at_step(carry)._replace(tangents=(carry.tangents.x, carry.tangents.y))


def take_gradient(index: int, carry: PyTree, answer: Answer) -> PyTree:
    """Keeps a gradient of a step; they are in the order of its levels, the lower one last."""
    carry = carry._replace(gradients=_with(carry.gradients, index, answer.y))
    if index < len(carry.gradients) - 1 or isinstance(answer.loss, tuple):
        return carry
    return carry._replace(lower_loss=answer.loss.astype(carry.loss.dtype))


def take_tangents(index: int, carry: Trajectory, answer: Answer) -> Trajectory:
    carry = take_gradient(index, carry, answer)
    gradients = _with(carry.tangents.gradients, index, answer.tangents)
    return carry._replace(tangents=carry.tangents._replace(gradients=gradients))


def take_loss(carry: Trajectory, answer: Answer) -> Trajectory:
    """Keeps the iterate if its upper loss is the highest so far."""
    loss = answer.loss.astype(carry.chosen.loss.dtype)
    now = Choice(loss, carry.k, carry.y, carry.tangents)
    return carry._replace(chosen=trees.select(loss > carry.chosen.loss, now, carry.chosen))


def to_chosen(carry: Trajectory) -> Trajectory:
    chosen = carry.chosen
    return carry._replace(y=chosen.y, k=chosen.step, tangents=chosen.tangents)


def take_upper(carry: Trajectory, answer: Answer) -> Trajectory:
    return carry._replace(
        reached=(carry.y, carry.opt),
        loss=answer.loss.astype(carry.loss.dtype),
        grad_x=vectors.like(answer.x, carry.x),
        adjoint=(vectors.like(answer.y, carry.y), carry.adjoint[1]),
    )


def take_products(carry: Trajectory, answer: Answer) -> Trajectory:
    of_y, of_opt = carry.adjoint
    return carry._replace(
        adjoint=(vectors.add(of_y, answer.y), of_opt), grad_x=vectors.add(carry.grad_x, answer.x)
    )


def _with(items: tuple, index: int, item: PyTree) -> tuple:
    return (*items[:index], vectors.like(item, items[index]), *items[index + 1 :])
