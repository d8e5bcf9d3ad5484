"""A GAN: two optimisers over one `Run`, three steps of the discriminator to one of the other."""

import jax
import numpy as np
import optax

import hetjax
from hetjax.local import gradients

hetjax.use_cpu_workers(4)
drawn = np.random.default_rng(0)
data = {"x": (drawn.normal(size=(2048, 2)) * [0.3, 1] + [2, -1]).astype(np.float32)}


def made(params, batch, rng):
    return jax.random.normal(rng, batch["x"].shape) @ params["g"]["w"] + params["g"]["b"]


def judged(params, x):
    return jax.numpy.tanh(x @ params["d"]["w"] + params["d"]["b"]) @ params["d"]["out"]


def d_loss(params, batch, rng):
    fake = judged(params, made(params, batch, rng))
    return jax.nn.softplus(-judged(params, batch["x"])) + jax.nn.softplus(fake)


def g_loss(params, batch, rng):
    return jax.nn.softplus(-judged(params, made(params, batch, rng)))


def at_given(rule):  # computes at the parameters that a round is given
    def at(function):
        return lambda shared, *rest: function(shared._replace(params=shared.given), *rest)

    return rule._replace(begin=at(rule.begin), add=at(rule.add))


def begun(**shapes):
    return {name: np.float32(drawn.normal(size=shape)) / 2 for name, shape in shapes.items()}


params = {"d": begun(w=(2, 32), b=(1, 32), out=(32,)), "g": begun(w=(2, 2), b=(1, 2))}
optimizers = {"d": optax.adam(1e-2, b1=0.5), "g": optax.adam(2e-2, b1=0.5)}
states = {name: optimizers[name].init(params[name]) for name in optimizers}
d_rule, g_rule = (at_given(gradients.gradient_sums(f)) for f in (d_loss, g_loss))
fields = {"workers": 4, "epochs": 90, "microbatch_size": 64, "budget": 4}
with hetjax.Run(d_loss, params, None, data, rule=d_rule, rules={"g": g_rule}, **fields) as run:
    state = run.init(given=params)
    while not run.done(state):
        for kind, name in [("main", "d")] * 3 + [("g", "g")]:
            state, report = run.round(state, kind=kind, given=params)
            grads = jax.tree.map(lambda rows: np.asarray(rows)[0], report.mean[name])
            updates, states[name] = optimizers[name].update(grads, states[name])
            params = {**params, name: optax.apply_updates(params[name], updates)}
fake = made(params, {"x": np.zeros((4096, 2))}, jax.random.key(1))
print(f"mean {fake.mean(0)} of (2, -1), deviation {fake.std(0)} of (0.3, 1)")
assert abs(fake.mean(0) - np.array([2, -1])).max() < 0.5
