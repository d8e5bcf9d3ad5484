"""A digest tells two functions apart by all arrays in them, however these come into a program."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hetjax
from hetjax import digests
from hetjax.inputs import fingerprint
from hetjax.local import gradients
from hetjax.losses import named

DATA = {"x": np.ones((8, 3), np.float32)}
WEIGHTS = np.ones(3, np.float32)
ONE = np.array([1, 2, 3], np.float32)


def of_loss(change, hold=np.asarray):
    """A way to close over an array: `change(params f32[3], hold(array)) -> f32[3]`, in a loss."""

    def given(a):
        held = hold(a)
        return {"loss_fn": lambda p, batch, rng: batch["x"] @ change(p, held)}

    return given


def scan(p, a):
    return jax.lax.scan(lambda carry, _: (carry * a, None), p, None, length=2)[0]


def held_while(p, a):
    step = lambda c: (c[0] * 2, c[1] + a)  # noqa: E731
    return p + jax.lax.while_loop(lambda c: c[0] < a[0], step, (1.0, a))[1]


def with_vjp(p, forward, backward):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x * forward, None), lambda _, g: (g * backward,))
    return f(p)


def with_jvp(p, a):
    @jax.custom_jvp
    def f(x):
        return x

    f.defjvp(lambda point, tangent: (point[0], tangent[0] * a))
    return f(p)


def of_metrics(a):
    def loss_fn(p, batch, rng):
        losses = batch["x"] @ p
        return hetjax.Losses(losses, metrics={"m": losses * a[0]})

    return {"loss_fn": loss_fn}


def of_model(a):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.frozen = nnx.Variable(jnp.asarray(a))
    loss_fn, params = hetjax.nnx_loss(
        model, lambda m, batch: m(batch["x"] * m.frozen[None])[:, 0], wrt=nnx.Param
    )
    return {"loss_fn": loss_fn, "params": params}


class Frozen(linen.Module):
    start: tuple

    @linen.compact
    def __call__(self, x):
        kept = self.variable("frozen", "scale", lambda: jnp.array(self.start))
        return linen.Dense(1)(x * kept.value[None])[:, 0]


def of_linen(a):
    model = Frozen(tuple(a.tolist()))
    variables = model.init(jax.random.key(0), DATA["x"])
    frozen = {"frozen": {"scale": jnp.asarray(a)}}

    def loss_fn(p, batch, rng):
        return model.apply({"params": p, **frozen}, batch["x"])

    return {"loss_fn": loss_fn, "params": variables["params"]}


def of_rule(a):
    rule = gradients.gradient_sums(of_loss(jnp.multiply)(ONE)["loss_fn"])

    def finish(shared, worker, sums):
        worker, grads, weight = rule.finish(shared, worker, sums)
        return worker, grads * a, weight

    return {"rule": rule._replace(finish=finish)}


def scaled(a):
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: u * a, updates))


class Method:
    def __init__(self, a):
        self.a = a

    def loss(self, p, batch, rng):
        return batch["x"] @ (p * self.a)


WAYS = {
    "an array of JAX": of_loss(lambda p, a: p * a, jnp.asarray),
    "one of NumPy": of_loss(lambda p, a: p * a),
    "a list": of_loss(lambda p, a: p * jnp.array(a.tolist())),
    "an element": of_loss(lambda p, a: p * jnp.asarray(a)[1]),
    "an array of one": of_loss(lambda p, a: p * a[:1]),
    "without axes": of_loss(lambda p, a: p * np.array(a[0])),
    "bfloat16": of_loss(lambda p, a: p * a.astype(p.dtype), lambda a: jnp.asarray(a, jnp.bfloat16)),
    "integers": of_loss(lambda p, a: p[a.astype(int) % 3]),
    "a typed key": of_loss(
        lambda p, key: p + jax.random.normal(key, (3,)), lambda a: jax.random.key(int(a[0]))
    ),
    "a pytree": of_loss(lambda p, a: jax.tree.map(lambda each: p * each, {"a": [a]})["a"][0]),
    "jit in jit": of_loss(lambda p, a: jax.jit(jax.jit(lambda x: x * a))(p)),
    "scan": of_loss(scan),
    "cond": of_loss(lambda p, a: jax.lax.cond(p[0] > 0, lambda x: x * a, lambda x: x, p)),
    "while": of_loss(held_while),
    "vmap": of_loss(lambda p, a: jax.vmap(lambda x, y: x * jnp.sum(y * a), (0, None))(p, p)),
    "remat": of_loss(lambda p, a: jax.checkpoint(lambda x: x * a)(p)),
    "custom_vjp, forward": of_loss(lambda p, a: with_vjp(p, a, 2.0)),
    "custom_vjp, backward": of_loss(lambda p, a: with_vjp(p, 2.0, a)),
    "custom_jvp": of_loss(with_jvp),
    "a callback": of_loss(lambda p, a: p + jax.lax.stop_gradient(jax.pure_callback(lambda: a, p))),
    "weights": lambda a: {"loss_fn": lambda p, batch, rng: (batch["x"] @ p, batch["x"] @ a)},
    "a metric": of_metrics,
    "a partial": lambda a: {
        "loss_fn": functools.partial(lambda a, p, batch, rng: batch["x"] @ (p * a), a)
    },
    "a method's self": lambda a: {"loss_fn": Method(a).loss},
    "a round's loss": lambda a: {
        "loss_fn": hetjax.batch_loss(
            lambda p, batch, rng: batch["x"] * p[None], lambda p, e, mask: jnp.sum((e @ a) * mask)
        )
    },
    "NNX, frozen": of_model,
    "Linen, frozen": of_linen,
    "a rule": of_rule,
    "an optimiser": lambda a: {"optimizer": optax.chain(scaled(a), optax.sgd(0.1))},
    "a schedule": lambda a: {"optimizer": optax.sgd(lambda count: jnp.asarray(a)[count % 3])},
    "an optimiser's start": lambda a: {
        "optimizer": optax.GradientTransformation(
            lambda params: jnp.asarray(a), lambda updates, state, params=None: (updates, state)
        )
    },
    "augmentation": lambda a: {
        "source": hetjax.augmented(DATA, lambda each, rng: {"x": each["x"] * a})
    },
}


def made(given):
    given = {
        "loss_fn": of_loss(jnp.multiply)(ONE)["loss_fn"],
        "params": WEIGHTS,
        "optimizer": optax.sgd(0.1),
        "source": DATA,
        **given,
    }
    source = hetjax.data.sources.as_source(given.pop("source"))
    rule = given.pop("rule", None)
    named_rule = types.SimpleNamespace(name="mine" if rule else "gradient_sums")
    config = types.SimpleNamespace(seed=0, microbatch_size=4, form="stepped", rule=named_rule)
    rule = rule or gradients.gradient_sums(given["loss_fn"])
    by_name = named.Beside(named.frozen_of(given["loss_fn"], ()))
    of_run = {"config": config, "rule": rule, "per_example_rng": False, "by_name": by_name}
    return fingerprint.make(source=source, **of_run, **given)


@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_is_closed_over_is_in_a_digest(way):
    own, again, other = (made(WAYS[way](a.copy())) for a in (ONE, ONE, ONE + ONE))
    assert not fingerprint.differences(own, again)
    assert fingerprint.differences(own, other)


def test_an_array_outside_is_what_it_is_now():
    outside = {"a": ONE}

    def loss_fn(p, batch, rng):
        return batch["x"] @ (p * outside["a"])

    before = made({"loss_fn": loss_fn})
    outside["a"] = ONE + 1
    assert "loss" in fingerprint.differences(before, made({"loss_fn": loss_fn}))


def test_a_large_array_is_digested_once(monkeypatch):
    real, seen, large = digests.of_arrays, [], jnp.ones((300, 3))
    monkeypatch.setattr(digests, "of_arrays", lambda tree: seen.append(np.size(tree)) or real(tree))

    def step(p):
        return jax.checkpoint(lambda x: x * large[0])(jax.jit(lambda x: x + large[1])(p))

    digests.of_programs((step, (ONE,)), (jax.grad(lambda p: step(p).sum()), (ONE,)))
    assert seen.count(large.size) == 1
