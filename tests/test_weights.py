"""Whether weights depend on what a loss is differentiated by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.losses import weights

A = np.arange(1.0, 4.0, dtype=np.float32)


@jax.custom_vjp
def own_gradient(p, a):
    return p * a, 1 + a


own_gradient.defvjp(
    lambda p, a: (own_gradient(p, a), (p, a)),
    lambda kept, g: (jnp.sum(kept[1] * g[0]), kept[0] * g[0]),
)


def added_up(p, a, step):
    return jax.lax.scan(lambda c, a: (c + p * a, step(p, a)), jnp.float32(0), a)[1]


def looped(p, a, step):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(p, c[1])), (0, a))[1]


CONSTANT = {
    "none": lambda p, a: None,
    "numpy": lambda p, a: np.ones(3, np.float32),
    "data": lambda p, a: 1 / (1 + a),
    "stopped": lambda p, a: jax.lax.stop_gradient(jax.nn.sigmoid(p["w"] * a)),
    "mask": lambda p, a: p["w"] > a,
    "where": lambda p, a: jnp.where(p["w"] > a, 1.0, 0.0),
    "jit": lambda p, a: jax.jit(lambda p, a: (p["w"] * a, 1 + a))(p, a)[1],
    "scan": lambda p, a: added_up(p["w"], a, lambda p, a: 2 * a),
    "cond": lambda p, a: jax.lax.cond(p["w"] > 0, lambda: a, lambda: 2 * a),
    "while": lambda p, a: looped(p["w"], a, lambda p, c: c / 2),
    "another leaf": lambda p, a: p["number"] * jnp.ones(3, jnp.int32),
}
DEPENDENT = {
    "of the loss": lambda p, a: 1 / (1 + (p["w"] - a) ** 2),
    "where": lambda p, a: jnp.where(p["w"] > a, p["w"], a),
    "part of them": lambda p, a: jnp.stack([a[0], a[1], p["w"]]),
    "jit": lambda p, a: jax.jit(lambda p, a: (a, p["w"] * a))(p, a)[1],
    "scan": lambda p, a: added_up(p["w"], a, lambda p, a: p * a),
    "cond": lambda p, a: jax.lax.cond(p["w"] > 0, lambda: a, lambda: p["w"] * a),
    "while": lambda p, a: looped(p["w"], a, lambda p, c: c * p),
    "inner gradient": lambda p, a: a * jax.grad(lambda w: jnp.sum(a * w**2))(p["w"]),
    "custom_vjp, for all that one knows": lambda p, a: own_gradient(p["w"], a)[1],
}


def of(rule):
    def pair(p, a):
        return (p["w"] - a) ** 2, rule(p, a)

    return weights.depend(pair, {"w": jnp.float32(2), "number": jnp.int32(1)}, A)


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_weights_are_known_as_such(name):
    assert not of(CONSTANT[name])


@pytest.mark.parametrize("name", DEPENDENT)
def test_weights_that_depend_are_known_as_such(name):
    assert of(DEPENDENT[name])


def test_nothing_is_computed_for_it():
    def pair(p, a):
        jax.debug.callback(lambda: pytest.fail("it was computed"))
        return (p - a) ** 2, jax.nn.sigmoid(p * a)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    assert weights.depend(pair, shape, A)


def test_it_may_be_asked_while_something_else_is_traced():
    answers = []

    def step(p, a):
        answers.append(weights.depend(lambda p: (p * a, p * a), p))
        answers.append(weights.depend(lambda p: (p * a, a), p))
        return jnp.sum(p * a)

    jax.jit(jax.grad(step))(jnp.float32(1), A)
    assert answers == [True, False]
