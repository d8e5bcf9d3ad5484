"""Parameters in float32, computed with in bfloat16, or in float16 with a loss that is scaled."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] + x[:, 1] > 0).astype(np.int32)}
settings = {"epochs": 3, "microbatch_size": 8, "budget": 16, "progress": False}


def trained(dtype, scale):
    rngs, more = nnx.Rngs(0), {"dtype": dtype, "param_dtype": jnp.float32}
    hidden, out = nnx.Linear(8, 32, rngs=rngs, **more), nnx.Linear(32, 2, rngs=rngs, **more)

    def loss(model, batch):
        logits = model(batch["x"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return hetjax.Losses(scale * losses, metrics={"cross_entropy": losses})

    loss_fn, params = hetjax.nnx_loss(nnx.Sequential(hidden, nnx.relu, out), loss)
    optimizer = optax.chain(optax.scale(1 / scale), optax.adam(1e-2))
    return hetjax.fit(loss_fn, params, optimizer, data, **settings)


expected = trained(jnp.float32, 1).summary["train_cross_entropy"]
for dtype, scale in ((jnp.bfloat16, 1), (jnp.float16, 2**10)):
    result = trained(dtype, scale)
    kernel = result.params["layers"][0]["kernel"]
    assert kernel.dtype == jnp.float32
    assert abs(result.summary["train_cross_entropy"] - expected) < 0.02
