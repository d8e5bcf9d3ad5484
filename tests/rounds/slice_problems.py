"""A small transformer, how its arrays lie on a slice, and runs of it; also as a program."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import hetjax

VOCABULARY, LENGTH, WIDTH, HEADS, HEAD, HIDDEN, BLOCKS = 32, 8, 16, 4, 4, 32, 2


def data(num_examples=240):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(VOCABULARY, size=(num_examples, LENGTH + 1)).astype(np.int32)}


def params(dtype=np.float64):
    rng = np.random.default_rng(1)

    def normal(*shape):
        return (0.3 * rng.normal(size=shape)).astype(dtype)

    def block():
        into, out = (WIDTH, HEADS, HEAD), (HEADS, HEAD, WIDTH)
        attention = {"q": normal(*into), "k": normal(*into), "v": normal(*into), "o": normal(*out)}
        dense = {"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)}
        return attention | dense | {"scale": np.ones(WIDTH, dtype)}

    blocks = [block() for _ in range(BLOCKS)]
    return {"embed": normal(VOCABULARY, WIDTH), "blocks": blocks, "out": normal(WIDTH, VOCABULARY)}


def loss(params, batch, rng):
    tokens = batch["tokens"]
    h = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for block in params["blocks"]:
        norm = jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3)
        x = h * block["scale"][None, None] / norm
        q, k, v = (jnp.einsum("bld,dhk->blhk", x, block[name]) for name in "qkv")
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k)
        weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e9))
        attended = jnp.einsum("bhlm,bmhk->blhk", weights, v)
        h = h + jnp.einsum("blhk,hkd->bld", attended, block["o"])
        h = h + jax.nn.gelu(h @ block["up"]) @ block["down"]
    log_chances = jax.nn.log_softmax(h @ params["out"])
    told = jnp.take_along_axis(log_chances, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.mean(told, -1)


def tensor_parallel(path, shape):
    columns, rows = P(None, "model"), P("model")
    kinds = dict.fromkeys(("q", "k", "v", "up", "out"), columns) | dict.fromkeys("o", rows)
    return (kinds | {"down": rows}).get(path.split(".")[-1], P())


def both(path, shape):
    """Tensor parallel, and what is left of an array over the data axis."""
    spec = [*tensor_parallel(path, shape), *[None] * len(shape)][: len(shape)]
    if len(shape) > 1:
        spec[spec.index(None)] = "data"
    return P(*spec)


SHAPES = {
    "fsdp": ({"data": 2}, hetjax.slices.fsdp(min_size=1)),
    "tensor parallel": ({"model": 2}, tensor_parallel),
    "both": ({"data": 2, "model": 2}, both),
    "what is left": ({"data": 0}, hetjax.slices.fsdp(min_size=1)),
}
FIELDS = {
    "epochs": 20,
    "max_rounds": 50,
    "microbatch_size": 4,
    "budget": 9,
    "progress": False,
}


def fit(*, shape=None, proportions=(), **fields):
    more = {}
    if shape is not None:
        more["slices"], more["shard"] = SHAPES[shape]
    if proportions:
        more["quota"] = {"policy": "static", "proportions": proportions}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    return hetjax.fit(loss, params(), optimizer, data(), **{**FIELDS, **more, **fields})


def main(given):
    """Of a process: trains, and leaves its parameters."""
    process = int(os.environ["HETJAX_PROCESS_ID"])
    start = int(os.environ.get("HETJAX_START", process))
    devices = given.pop("devices")
    hetjax.use_cpu_workers(devices[start % len(devices)])
    jax.config.update("jax_enable_x64", True)
    hetjax.join_processes()
    directory = given.pop("directory")
    result = fit(**given)
    found = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(result.params))}
    np.savez(f"{directory}/{process}.npz", **found)
    summary = result.summary
    told = {name: summary[f"examples_{name}"] for name in ("missing", "duplicated")}
    mesh = result.state.params["out"].sharding.mesh
    line = result.history[0]
    told |= {"mesh": dict(mesh.shape), "quotas": line["quotas"]}
    told["bytes"] = line["bytes_sent"], line["bytes_of_sums"]
    print(f"result {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
