"""A ResNet as Flax's examples write it, in Linen, from its pre-trained variables."""

import flax.linen as nn
import jax
import numpy as np
import optax

import hetjax

hetjax.use_cpu_workers(4)

rng = np.random.default_rng(0)
label = rng.integers(2, size=256).astype(np.int32)
image = rng.normal(size=(256, 8, 8, 1)).astype(np.float32) + label[:, None, None, None]
data = {"image": image, "label": label}


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for width in (4, 8):
            norm = {"use_running_average": not train, "momentum": 0.9}
            y = nn.relu(nn.BatchNorm(**norm)(nn.Conv(width, (3, 3), strides=2)(x)))
            y = nn.BatchNorm(scale_init=nn.initializers.zeros, **norm)(nn.Conv(width, (3, 3))(y))
            x = nn.relu(y + nn.BatchNorm(**norm)(nn.Conv(width, (1, 1), strides=2)(x)))
        return nn.Dense(2)(x.mean((1, 2)))


def loss(model, batch):
    logits = model(batch["image"], train=False)  # the statistics stay
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


module = ResNet()
variables = module.init(jax.random.key(0), image[:1], train=False)  # or from a checkpoint
loss_fn, params = hetjax.linen_loss(module, variables, loss)
settings = {"epochs": 8, "microbatch_size": 8, "budget": 8}
result = hetjax.fit(loss_fn, params, optax.adam(3e-2), data, **settings)
tuned = hetjax.linen_variables(variables, result.params)
jax.tree.map(np.testing.assert_array_equal, tuned["batch_stats"], variables["batch_stats"])
assert (module.apply(tuned, image, train=False).argmax(-1) == label).mean() > 0.9  # plain Flax
