"""A task of one's own for the commands: what it loads, builds, minimises and measures.

python -m experiments.train --config=FILE --config.data.name=tests.own_parts.task:load …
"""

import jax
import numpy as np
import optax
from flax import linen, nnx

import hetjax
from hetjax.zoo import datasets


def load(num_examples=160):
    x = np.random.default_rng(0).normal(size=(num_examples, 6)).astype(np.float32)
    arrays, cut = {"x": x, "label": x[:, :3].argmax(1).astype(np.int32)}, num_examples * 3 // 4
    return {
        "train": {name: each[:cut] for name, each in arrays.items()},
        "test": {name: each[cut:] for name, each in arrays.items()},
    }


def load_known():
    train, test = ({"features": x["x"], "label": x["label"]} for x in load().values())
    return datasets.Dataset(train, {"test": test}, 3, (6,), "own", "features")


def of_digits(rngs, batch):
    linear = nnx.Linear(batch["image"].size, 10, rngs=rngs)
    return nnx.Sequential(lambda x: x.reshape(len(x), -1).astype(np.float32) / 16, linear)


class Net(nnx.Module):
    def __init__(self, rngs, width=8):
        self.inner, self.outer = nnx.Linear(6, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


def linen_net(rngs, batch):
    module = linen.Dense(3)
    return module, module.init(rngs.params(), batch["x"])


def weights(rngs):
    return {"w": jax.random.normal(rngs.params(), (6, 3)) / 3}


def pair(rngs):
    return hetjax.nnx_loss(Net(rngs), loss)


def annealed(rngs):
    def of_both(model, batch, *, frozen, values):
        return loss(model, batch) + values * frozen.sum()

    given = {"frozen": np.ones(2, np.float32), "values": lambda progress: 0.1 / (1 + progress)}
    return *hetjax.nnx_loss(Net(rngs), of_both), given


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])


def metrics(model, batch):
    is_right = model(batch["x"]).argmax(-1) == batch["label"]
    return {"loss": loss(model, batch), "accuracy": is_right}


def loss_of_weights(params, batch, rng):
    return loss(lambda x: x @ params["w"], batch)


def noisy(example, rng):
    return {**example, "x": example["x"] + rng.normal(size=6).astype(np.float32) / 50}
