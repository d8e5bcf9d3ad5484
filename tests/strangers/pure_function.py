"""A loss without Flax."""

import numpy as np
import optax

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] + x[:, 1] > 0).astype(np.int32)}


def loss_fn(params, batch, rng):
    margin = (batch["x"] @ params["w"] + params["b"]) * (2.0 * batch["y"] - 1)
    return optax.sigmoid_binary_cross_entropy(margin, np.float32(1))


params = {"w": np.zeros(8, np.float32), "b": np.zeros((), np.float32)}
result = hetjax.fit(loss_fn, params, optax.sgd(0.5), data, epochs=5, microbatch_size=8, budget=16)
assert result.summary["train_loss"] < 0.4
