"""What was trained is saved by Orbax, and used by plain Flax without hetjax."""

import pathlib

import numpy as np
import optax
import orbax.checkpoint as ocp
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
result = hetjax.fit(loss_fn, params, optax.adam(1e-2), data, **settings)
trained = hetjax.nnx_model(Net(nnx.Rngs(0)), result.params)

path = pathlib.Path("exported").absolute()
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, nnx.state(trained))

with ocp.StandardCheckpointer() as checkpointer:
    fresh = Net(nnx.Rngs(1))
    nnx.update(fresh, checkpointer.restore(path, nnx.state(fresh)))
np.testing.assert_array_equal(fresh(x), trained(x))
right = (fresh(x).argmax(-1) == data["y"]).mean()
assert right > 0.9
