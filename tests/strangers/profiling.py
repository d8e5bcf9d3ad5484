"""A trace of some rounds, for TensorBoard, Perfetto or xprof."""

import pathlib

import jax
import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] + x[:, 1] > 0).astype(np.int32)}
settings = {"epochs": 3, "microbatch_size": 8, "budget": 16, "progress": False}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.out = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


loss_fn, params = hetjax.nnx_loss(Net(nnx.Rngs(0)), loss)
with hetjax.Run(loss_fn, params, optax.sgd(0.1), data, epochs=3, budget=8) as run:
    state, _ = run.round(run.init())  # compiled before the trace
    with jax.profiler.trace("profile"):
        for _ in range(3):
            state, report = run.round(state)
        jax.block_until_ready(state.train.params)
    assert report.read().round == 3

(trace,) = pathlib.Path("profile").rglob("*.xplane.pb")
assert b"round" in trace.read_bytes()
