"""A Flax Linen model."""

import jax
import numpy as np
import optax
from flax import linen as nn

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] + x[:, 1] > 0).astype(np.int32)}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(32)(x)))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


module = Net()
variables = module.init(jax.random.key(0), data["x"][:1])
loss_fn, params = hetjax.linen_loss(module, variables, loss)
result = hetjax.fit(loss_fn, params, optax.adam(1e-2), data, epochs=5, microbatch_size=8, budget=16)
logits = module.apply({"params": result.params}, data["x"])
assert (logits.argmax(-1) == data["y"]).mean() > 0.9
