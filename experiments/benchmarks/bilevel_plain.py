"""Hypergradients written plainly in JAX, and what hetjax.bilevel takes beside them."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import rows
from hetjax import bilevel

_RATE, _CG, _MULTIPLIER, _RIDGE = 0.1, 10, 10.0, 1e-3


class Shape(NamedTuple):
    """Sizes of a linear cleaning problem, and the lower steps of one hypergradient."""

    train: int
    valid: int
    features: int
    steps: int


SHAPES = {
    "linear Fashion-MNIST, 5000 x 784": Shape(5000, 5000, 784, 20),
    "digits, 600 x 64": Shape(600, 400, 64, 100),
}


def upper(x, y, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(images @ y, labels).mean()


def lower(x, y, batch):
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(images @ y, labels)
    return (jax.nn.sigmoid(x) * losses).mean() + 0.5 * _RIDGE * jnp.sum(y**2)


def made(shape: Shape) -> tuple[jax.Array, jax.Array, Any, Any]:
    """x, y, and a batch of each level, of made data.

    Features of unequal scales, as of images: the Hessian is far from a multiple of the identity,
    and conjugate gradients have something to do in each step.
    """
    rng = np.random.default_rng(0)
    scales = np.logspace(0, -2, shape.features)
    scales /= np.linalg.norm(scales)

    def batch(num):
        images = 5 * scales * rng.standard_normal((num, shape.features))
        return jnp.asarray(images, jnp.float32), jnp.asarray(rng.integers(0, 10, num))

    return (
        jnp.zeros(shape.train),
        jnp.zeros((shape.features, 10)),
        batch(shape.valid),
        batch(shape.train),
    )


# --- Plainly: one function for each method, as one would write it for this problem alone ---


def _descended(x, y, train, num_steps):
    def step(y, _):
        return y - _RATE * jax.grad(lower, 1)(x, y, train), y

    return jax.lax.scan(step, y, length=num_steps)


def plain_implicit(x, y, valid, train, num_steps):
    y, _ = _descended(x, y, train, num_steps)
    loss, (grad_x, b) = jax.value_and_grad(upper, (0, 1))(x, y, valid)

    def product(v):
        along = lambda y: jax.jvp(lambda y: lower(x, y, train), (y,), (v,))[1]  # noqa: E731
        return jax.grad(along)(y)

    def step(carry, _):
        v, r, p = carry
        hp = product(p)
        alpha = jnp.vdot(r, r) / jnp.vdot(p, hp)
        new = r - alpha * hp
        beta = jnp.vdot(new, new) / jnp.vdot(r, r)
        return (v + alpha * p, new, new + beta * p), None

    v, _, _ = jax.lax.scan(step, (jnp.zeros_like(b), b, b), length=_CG)[0]
    cross = jax.grad(lambda x: jax.jvp(lambda y: lower(x, y, train), (y,), (v,))[1])(x)
    return grad_x - cross, y, loss


def plain_gap(x, y, valid, train, num_steps):
    z, _ = _descended(x, y, train, num_steps)

    def step(y, _):
        of_upper, of_lower = jax.grad(upper, 1)(x, y, valid), jax.grad(lower, 1)(x, y, train)
        return y - _RATE * (of_upper / _MULTIPLIER + of_lower), None

    y, _ = jax.lax.scan(step, y, length=num_steps)
    loss, grad_x = jax.value_and_grad(upper)(x, y, valid)
    at_y, of_y = jax.value_and_grad(lower)(x, y, train)
    at_z, of_z = jax.value_and_grad(lower)(x, z, train)
    return grad_x + _MULTIPLIER * (of_y - of_z), y, z, loss, at_y - at_z


def plain_reverse(x, y, valid, train, num_steps):
    """The adjoint's recursion, with the same products as the estimator asks for."""
    y, past = _descended(x, y, train, num_steps)
    loss, (grad_x, adjoint) = jax.value_and_grad(upper, (0, 1))(x, y, valid)

    def back(carry, y):
        grad_x, adjoint = carry
        v = -_RATE * adjoint

        def along(x, y):
            return jax.jvp(lambda y: lower(x, y, train), (y,), (v,))[1]

        of_x, of_y = jax.grad(along, (0, 1))(x, y)
        return (grad_x + of_x, adjoint + of_y), None

    grad_x, _ = jax.lax.scan(back, (grad_x, adjoint), past, reverse=True)[0]
    return grad_x, y, loss


def plain_grad(x, y, valid, train, num_steps):
    """`jax.grad` through the loop: it holds what each step computed, and computes less again."""

    def reached(x):
        last, _ = _descended(x, y, train, num_steps)
        return upper(x, last, valid), last

    (loss, y), grad_x = jax.value_and_grad(reached, has_aux=True)(x)
    return grad_x, y, loss


def _ours(estimator: bilevel.Estimator) -> Callable:
    problem = bilevel.Bilevel(upper, lower)

    def call(x, y, valid, train):
        return bilevel.hypergradient(problem, estimator, x, y, bilevel.Batches(valid, train))

    return call


METHODS: dict[str, tuple[Callable[[int], bilevel.Estimator], Callable]] = {
    "implicit, CG 10": (
        lambda T: bilevel.implicit(
            bilevel.descent(optax.sgd(_RATE)), T, solve=bilevel.cg(_CG), warm=False
        ),
        plain_implicit,
    ),
    "value gap": (
        lambda T: bilevel.value_gap(bilevel.descent(optax.sgd(_RATE)), T, multiplier=_MULTIPLIER),
        plain_gap,
    ),
    "RHG": (lambda T: bilevel.unroll(bilevel.descent(optax.sgd(_RATE)), T), plain_reverse),
    "RHG, against jax.grad through the loop": (
        lambda T: bilevel.unroll(bilevel.descent(optax.sgd(_RATE)), T),
        plain_grad,
    ),
}


def compared(shape: Shape, name: str, num_turns: int) -> tuple[float, float, float, float]:
    """Median of the ratios of turns, own / plain; both medians in ms; and how far apart they are.

    The two take turns, and who begins takes turns too.
    """
    estimator, plain = METHODS[name]
    arguments = made(shape)
    calls = [
        jax.jit(_ours(estimator(shape.steps))),
        jax.jit(functools.partial(plain, num_steps=shape.steps)),
    ]
    first, second = (jax.block_until_ready(call(*arguments)) for call in calls)
    distance = jnp.abs(first[0] - second[0]).max() / jnp.abs(second[0]).max()
    secs: list[list[float]] = [[], []]
    for turn in range(num_turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            jax.block_until_ready(calls[which](*arguments))
            secs[which].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(*secs, strict=True))
    return ratio, *(1e3 * statistics.median(values) for values in secs), float(distance)


def plain_rows(num_turns: int = 31) -> list[rows.Row]:
    found = []
    for place, shape in SHAPES.items():
        for name in METHODS:
            ratio, own, plain, distance = compared(shape, name, num_turns)
            found.append(
                rows.Row(
                    f"{name}, {place}, T = {shape.steps}: time over the same written plainly, "
                    f"median of {num_turns} turns",
                    "none" if "jax.grad" in name else "≤ 1.05",
                    f"{ratio:.3f} ({own:.1f} and {plain:.1f} ms); gradients {distance:.0e} apart",
                )
            )
    return found
