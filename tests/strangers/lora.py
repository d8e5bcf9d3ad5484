"""Adapters alone are trained."""

import net
import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(8, 2, rngs=rngs)
        self.lora = nnx.LoRA(8, 4, 2, base_module=self.base, rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


model = Net(nnx.Rngs(0))
loss_fn, params = hetjax.nnx_loss(model, net.loss, wrt=nnx.LoRAParam)
result = hetjax.fit(loss_fn, params, optax.adam(5e-2), net.data, epochs=5, **net.sizes)
trained = hetjax.nnx_model(model, result.params, wrt=nnx.LoRAParam)
np.testing.assert_array_equal(trained.base.kernel[...], model.base.kernel[...])
assert result.history[-1]["loss"] < result.history[0]["loss"]
