"""A loop of one's own over the rounds."""

import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] + x[:, 1] > 0).astype(np.int32)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.out = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


model = Net(nnx.Rngs(0))
loss_fn, params = hetjax.nnx_loss(model, loss)

fields = {"workers": 4, "epochs": 2, "microbatch_size": 8, "budget": 16}
with hetjax.Run(loss_fn, params, optax.adam(1e-2), data, **fields) as run:
    state = run.init()
    while not run.done(state):
        state, report = run.round(state)
        print(report.read().round, report.read().loss, report.read().quotas)
    trained, _ = run.params(state)
assert set(trained) == set(params)
