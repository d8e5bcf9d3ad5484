"""As CLIP: two towers, and a temperature that is trained, over all pairs of a round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax

hetjax.use_cpu_workers(4)

drawn = np.random.default_rng(0)
what = drawn.normal(size=(1280, 6))
image, text = (np.tanh(what @ drawn.normal(size=(6, 24))) for _ in range(2))
pairs = {"image": image.astype(np.float32), "text": text.astype(np.float32)}
train, test = (
    {name: leaf[part] for name, leaf in pairs.items()} for part in (slice(1024), slice(1024, None))
)


def tower(params, x):
    z = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def embed(params, batch, rng):
    return {name: tower(params[name], batch[name]) for name in ("image", "text")}


def loss(params, e, mask):
    scores = jnp.exp(params["log_scale"]) * (e["image"] @ e["text"].T)
    scores = jnp.where(mask[:, None] * mask[None] > 0, scores, -1e9)
    by_both = jax.nn.log_softmax(scores, 0) + jax.nn.log_softmax(scores, 1)
    return -jnp.sum(jnp.diag(by_both) * mask) / (2 * jnp.sum(mask))


def begun():
    shapes = {"hidden": (24, 64), "out": (64, 16)}
    return {n: (drawn.normal(size=s) / 5).astype(np.float32) for n, s in shapes.items()}


params = {"image": begun(), "text": begun(), "log_scale": np.float32(2)}
fields = {"epochs": 25, "microbatch_size": 16, "budget": 16}
result = hetjax.fit(hetjax.batch_loss(embed, loss), params, optax.adam(3e-3), train, **fields)
found = embed(result.params, test, None)
right = (jnp.argmax(found["image"] @ found["text"].T, 1) == jnp.arange(256)).mean()
print(f"the right one of 256 texts: {right:.0%}; scale {np.exp(result.params['log_scale']):.1f}")
assert right > 0.5
assert abs(result.params["log_scale"] - 2) > 0.1
