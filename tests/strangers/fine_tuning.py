"""Training goes on from another run's parameters and optimiser."""

import net
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)
loss_fn, params = hetjax.nnx_loss(net.Net(nnx.Rngs(0)), net.loss)
given = (optax.adam(1e-2), net.data)
first = hetjax.fit(loss_fn, params, *given, epochs=3, **net.sizes)
second = hetjax.fit(loss_fn, None, *given, epochs=1, init_state=first.state, **net.sizes)
assert second.history[0]["loss"] < first.history[0]["loss"]
