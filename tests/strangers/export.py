"""What was trained is saved by Orbax, and used by plain Flax without hetjax."""

import pathlib

import net
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)
loss_fn, params = hetjax.nnx_loss(net.Net(nnx.Rngs(0)), net.loss)
result = hetjax.fit(loss_fn, params, optax.adam(1e-2), net.data, epochs=3, **net.sizes)
trained = hetjax.nnx_model(net.Net(nnx.Rngs(0)), result.params)

path = pathlib.Path("exported").absolute()
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, nnx.state(trained))

with ocp.StandardCheckpointer() as checkpointer:
    fresh = net.Net(nnx.Rngs(1))
    nnx.update(fresh, checkpointer.restore(path, nnx.state(fresh)))
np.testing.assert_array_equal(fresh(net.x), trained(net.x))
assert (fresh(net.x).argmax(-1) == net.data["y"]).mean() > 0.9
