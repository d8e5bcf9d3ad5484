"""An estimator of hypergradients of one's own: descent, then one cross product (T1-T2).

hetjax.fit_bilevel(problem, x, y, one_product(num_steps=5, rate=0.1), optimizer, …)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import bilevel

At, Kind, What = bilevel.At, bilevel.Kind, bilevel.What


class Carry(NamedTuple):
    x: Any
    y: Any
    right: Any  # d F / d y, like y
    grad_x: Any  # like x
    upper_loss: jax.Array  # f[]
    num_batches: jax.Array  # i32[], of the lower level, taken so far


def one_product(num_steps, rate):
    """`d_x F - rate (d_x d_y f) d_y F`: `rate` stands for the inverse of the Hessian."""

    def begin(x, y, state):
        x, y = jax.tree.map(jnp.asarray, (x, y if state is None else state.y))
        right, grad_x = jax.tree.map(jnp.zeros_like, (y, x))
        return Carry(x, y, right, grad_x, jnp.zeros(()), jnp.zeros((), jnp.int32))

    def descended(carry, answer):
        y = jax.tree.map(lambda y, gradient: y - rate * gradient, carry.y, answer.y)
        return carry._replace(y=y, num_batches=carry.num_batches + 1)

    def take_upper(carry, answer):
        return carry._replace(right=answer.y, grad_x=answer.x, upper_loss=answer.loss)

    def take_product(carry, answer):
        grad_x = jax.tree.map(lambda g, product: g - rate * product, carry.grad_x, answer.x)
        return carry._replace(grad_x=grad_x)

    def program(x):
        def at(carry):
            return At(carry.x, carry.y, carry.num_batches, vector=carry.right)

        step = What(Kind.GRADIENT, "lower", ("y",), is_new=True)
        upper = What(Kind.GRADIENT, "upper", ("x", "y"), is_new=True)
        product = What(Kind.PRODUCTS, "lower", ("x",), is_new=True)
        return (
            bilevel.Repeat(num_steps, (bilevel.Ask(step, at, descended),)),
            bilevel.Ask(upper, lambda carry: At(carry.x, carry.y), take_upper),
            bilevel.Ask(product, at, take_product),
        )

    def end(carry):
        return bilevel.Result(carry.grad_x, bilevel.State(carry.y), bilevel.Info(carry.upper_loss))

    return bilevel.Estimator(begin, program, end, needs_all="each step of y needs the whole sum")
