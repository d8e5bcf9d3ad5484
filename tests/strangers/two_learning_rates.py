"""The last layer learns faster than the rest, by an optimiser of its own."""

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
labels = {name: "head" if name == "out" else "body" for name in params}
optimizer = optax.multi_transform({"head": optax.adam(1e-2), "body": optax.sgd(1e-3)}, labels)
result = hetjax.fit(loss_fn, params, optimizer, data, **settings)


def moved(name):
    return np.abs(result.params[name]["kernel"] - params[name]["kernel"]).mean()


assert 0 < 10 * moved("hidden") < moved("out")
