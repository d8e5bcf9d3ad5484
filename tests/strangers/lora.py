"""Adapters alone are trained."""

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
        self.base = nnx.Linear(8, 2, rngs=rngs)
        self.lora = nnx.LoRA(8, 4, 2, base_module=self.base, rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


model = Net(nnx.Rngs(0))
loss_fn, params = hetjax.nnx_loss(model, loss, wrt=nnx.LoRAParam)
result = hetjax.fit(loss_fn, params, optax.adam(5e-2), data, epochs=5, microbatch_size=8, budget=16)
trained = hetjax.nnx_model(model, result.params, wrt=nnx.LoRAParam)
np.testing.assert_array_equal(trained.base.kernel[...], model.base.kernel[...])
assert result.history[-1]["loss"] < result.history[0]["loss"]
