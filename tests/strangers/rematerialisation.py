"""The activations of a block are computed again in the backward pass."""

import jax
import jax.numpy as jnp
import net
import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(8, 256, rngs=rngs)
        self.narrow = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jnp.tanh(self.wide(x)))


class Net(nnx.Module):
    def __init__(self, again, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.out, self.again = nnx.Linear(8, 2, rngs=rngs), again

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x) if self.again else block(x)
        return self.out(x)


found, kept = [], []
for again in (False, True):
    loss_fn, params = hetjax.nnx_loss(Net(again, nnx.Rngs(0)), net.loss)
    found.append(
        hetjax.fit(loss_fn, params, optax.sgd(0.1), net.data, epochs=3, **net.sizes).params
    )
    pullback = jax.vjp(lambda p, f=loss_fn: f(p, net.data, jax.random.key(0)), params)[1]
    kept.append(sum(leaf.nbytes for leaf in jax.tree.leaves(pullback)))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)
assert kept[1] < kept[0] / 4
