"""The first layer stays as it is."""

import net
import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)
loss_fn, params = hetjax.nnx_loss(net.Net(nnx.Rngs(0)), net.loss)
labels = {name: "frozen" if name == "hidden" else "trained" for name in params}
optimizer = optax.multi_transform(
    {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels
)
result = hetjax.fit(loss_fn, params, optimizer, net.data, epochs=3, **net.sizes)
np.testing.assert_array_equal(result.params["hidden"]["kernel"], params["hidden"]["kernel"])
assert not np.array_equal(result.params["out"]["kernel"], params["out"]["kernel"])
