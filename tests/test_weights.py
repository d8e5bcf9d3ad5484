"""Whether weights depend on what a loss is differentiated by, and whether it reaches them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import pallas as pl

import hetjax
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


# --- Do the parameters reach them, with derivative or not? ---


def two_kernels(p, a):
    """What two kernels make."""

    def kernel(x, out):
        out[...] = x[...] * 2

    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
    double = pl.pallas_call(kernel, shape, interpret=True)
    return double(p * a) > 1, double(a) > 1


def called(a, **how):
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(a.shape, a.dtype), a, **how)


@jax.jit
def in_turns(p, a):
    """After three steps the last slot holds what was in the first."""
    step = lambda _, c: (p * c[0], c[0], c[1], c[3])  # noqa: E731
    return jax.lax.fori_loop(0, 3, step, (a, a, a, a))


# Of each a function of `(p, a)`: what p reaches, and beside it what is made of a alone.
REACH = {
    "argmax": lambda p, a: (jnp.argmax(p * a) == jnp.arange(3), jnp.argmax(a) == jnp.arange(3)),
    "stop_gradient": lambda p, a: (jax.lax.stop_gradient(p * a), jax.lax.stop_gradient(a)),
    "shape": lambda p, a: (0 * p * a, jnp.ones_like(p * a)),
    "jit": jax.jit(lambda p, a: (p * a > 1, a > 1)),
    "remat": jax.checkpoint(lambda p, a: (jnp.round(p * a), jnp.round(a))),
    "custom_jvp": lambda p, a: (jax.nn.relu(p * a) > 0, jax.nn.relu(a) > 0),
    "custom_vjp": lambda p, a: (own_gradient(p, a)[0] > 1, own_gradient(p, a)[1]),
    "cond": lambda p, a: jax.lax.cond(a[0] > 0, lambda: (p * a > 1, a), lambda: (a > 1, a + 1)),
    "predicate": lambda p, a: jax.lax.cond(p > 0, lambda: (a > 1, a), lambda: (a > 2, a)),
    "scan": lambda p, a: added_up(p, a, lambda p, a: (p * a > 1, a > 1)),
    "carried": lambda p, a: (in_turns(p, a)[2], in_turns(p, a)[3]),
    "while": lambda p, a: (looped(p, a, lambda p, c: c * p), looped(p, a, lambda p, c: c / 2)),
    "pallas": two_kernels,
    "callback": lambda p, a: (called(p * a, vmap_method="sequential"), called(a)),
}


@pytest.mark.parametrize("name", REACH)
def test_what_the_parameters_reach_is_told_from_what_is_made_of_examples(name):
    found = [
        weights.reached(lambda p, a, i=i: (a, REACH[name](p, a)[i]), np.float32(2), A)
        for i in range(2)
    ]
    assert found == [True, False]
    assert weights.reached(
        lambda p, a: (called(p * a), a > 1), np.float32(2), A
    )  # for all one knows


X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
DATA = {"x": X, "y": (X[:, 0] > 0).astype(np.int32)}
QUICK = {"workers": 1, "local": "virtual", "budget": 2, "microbatch_size": 6, "epochs": 1}


def right(logits, batch):
    return logits.argmax(-1) == batch["y"]


def negative_too(logits, batch):
    return jnp.where(batch["x"][..., 0] > 1, -0.1, 1.0)


def in_each_form(weigh, returned):
    """`{form: (loss, parameters, options)}` in each of which a loss may be given."""

    def pair(logits, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return returned(losses, weigh(logits, batch))

    def of(w, batch, *_):
        return pair(batch["x"] @ w, batch)

    def of_model(model, batch):
        return pair(model(batch["x"]), batch)

    begun, module = np.zeros((4, 2), np.float32), linen.Dense(2)
    variables = module.init(jax.random.key(0), X)
    with_state = lambda w, state, batch, rng: (of(w, batch), state)  # noqa: E731
    return {
        "function": (of, begun, {}),
        "per example": (hetjax.per_example(of), begun, {}),
        "with state": (with_state, begun, {"model_state": {"n": begun}}),
        "nnx": (*hetjax.nnx_loss(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), of_model), {}),
        "linen": (*hetjax.linen_loss(module, variables, of_model), {}),
    }


@pytest.mark.parametrize("form", in_each_form(right, tuple))
def test_what_is_right_is_no_weight_of_a_tuple_and_a_mask_is(form):
    def run(weigh, returned):
        loss_fn, params, options = in_each_form(weigh, returned)[form]
        hetjax.Run(loss_fn, params, optax.sgd(0.1), DATA, **QUICK, **options).close()

    message = r"depends on the parameters.*Losses\(losses, metrics=.*Losses\(losses, weights="
    with pytest.raises(ValueError, match=message):
        run(right, lambda *both: both)
    run(negative_too, lambda *both: both)
    run(right, hetjax.Losses)
