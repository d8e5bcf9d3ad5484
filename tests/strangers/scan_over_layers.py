"""Equal layers as one, whose parameters are stacked: the program does not grow with depth."""

import jax.numpy as jnp
import net
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)

LAYERS = 6


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = make(rngs.split(LAYERS))
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.out(scan(x, self.layers))


model = Net(nnx.Rngs(0))
loss_fn, params = hetjax.nnx_loss(model, net.loss)
assert params["layers"]["linear"]["kernel"].shape == (LAYERS, 8, 8)
result = hetjax.fit(loss_fn, params, optax.adam(1e-2), net.data, epochs=3, **net.sizes)
assert result.history[-1]["loss"] < result.history[0]["loss"] / 2
