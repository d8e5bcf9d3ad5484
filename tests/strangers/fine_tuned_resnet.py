"""A Flax ResNet with BatchNorm is fine-tuned: its head alone, with the statistics as they are."""

import jax
import numpy as np
import optax
from flax import nnx

import hetjax
from hetjax.zoo import models

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
label = rng.integers(2, size=256).astype(np.int32)
image = rng.normal(size=(256, 8, 8, 1)).astype(np.float32) + label[:, None, None, None]
data = {"image": image, "label": label}
settings = {"epochs": 2, "microbatch_size": 8, "budget": 8, "progress": False}
more = {"rngs": nnx.Rngs(0), "width": 4, "norm": "batch", "input_max": 1.0}
model = models.MODELS["resnet8"]((8, 8, 1), 2, **more)
HEAD = nnx.All(nnx.Param, nnx.PathContains("dense"))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


loss_fn, params = hetjax.nnx_loss(model, loss)  # pre-training, which moves the statistics
first = hetjax.fit(loss_fn, params, optax.sgd(0.1), data, **settings)
model = hetjax.nnx_model(model, first.params, first.model_state)

model.eval()  # from here on BatchNorm uses them, and leaves them
loss_fn, params = hetjax.nnx_loss(model, loss, wrt=HEAD)
head = hetjax.fit(loss_fn, params, optax.adam(1e-2), data, **settings)
tuned = hetjax.nnx_model(model, head.params, wrt=HEAD)

before, after = nnx.state(model, nnx.BatchStat), nnx.state(tuned, nnx.BatchStat)
jax.tree.map(np.testing.assert_array_equal, before, after)
assert list(head.params) == ["dense"]
assert not np.array_equal(tuned.dense.kernel[...], model.dense.kernel[...])
assert head.history[-1]["loss"] < head.history[0]["loss"]
