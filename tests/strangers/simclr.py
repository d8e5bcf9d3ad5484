"""SimCLR: two random views of each image, and NT-Xent over all images of a round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax

hetjax.use_cpu_workers(4)

drawn = np.random.default_rng(0)
y = drawn.integers(10, size=1024)
images = drawn.normal(size=(10, 64))[y].reshape(-1, 8, 8)
images = [np.roll(image, drawn.integers(8), 1) for image in images]  # as moved as a view is
data = {"image": (images + drawn.normal(size=(1024, 8, 8))).astype(np.float32)}


def view(image, key):
    move, noise = jax.random.split(key)
    image = jnp.roll(image, jax.random.randint(move, (), 0, 8), 1)
    return image + 0.5 * jax.random.normal(noise, image.shape)


def encode(params, x):
    z = jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"]) @ params["out"]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def embed(params, batch, keys):  # a key an image
    keys = jax.vmap(jax.random.split)(keys)
    views = [jax.vmap(view)(batch["image"], keys[:, which]) for which in (0, 1)]
    return [encode(params, each) for each in views]


def loss(params, views, mask):
    z, mask, num = jnp.concatenate(views), jnp.concatenate([mask, mask]), len(mask)
    is_other = mask[None] * (1 - jnp.eye(2 * num)) > 0
    log_chances = jax.nn.log_softmax(jnp.where(is_other, z @ z.T / 0.2, -1e9))
    return -jnp.sum(mask * jnp.diag(jnp.roll(log_chances, num, 1))) / jnp.sum(mask)


params = {"hidden": drawn.normal(size=(64, 256)) / 8, "out": drawn.normal(size=(256, 32)) / 16}
params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
fields = {"epochs": 25, "microbatch_size": 32, "budget": 8, "per_example_rng": True}
result = hetjax.fit(hetjax.batch_loss(embed, loss), params, optax.adam(3e-3), data, **fields)


def accuracy(params):  # of the nearest other image
    z = encode(params, data["image"])
    return (y[np.argmax(z @ z.T - 2 * jnp.eye(len(z)), 1)] == y).mean()


print(f"nearest neighbours of the class: {accuracy(params):.0%}, {accuracy(result.params):.0%}")
assert accuracy(result.params) > accuracy(params) + 0.1
