"""What one core computes of the benchmark of processes: matrix products, and forms of LeNet.

    python experiments/benchmarks/core_speed.py --library=jax --out=OUT.json [--tune=JSON]

With --tune the size that `tune_microbatch` gives for a model, in place of seconds. Run by
`benchmarks.processes --only=alone`, once with JAX and once with PyTorch, each time held to one
core. Needs nothing of hetjax for PyTorch, so that any interpreter that has torch can run it.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

BATCH = 512  # rows of the products: a microbatch of the MLP
IMAGES = 32  # a microbatch of LeNet
LAYERS = {"first layer, 3072 x 1024": (3072, 1024), "the next, 1024 x 1024": (1024, 1024)}
_SECS = 4.0  # of each comparison
Call = Callable[[], Any]
Sizes = tuple[int, int, int]


def product_shapes(inputs: int, outputs: int) -> dict[str, tuple[str, Sizes]]:
    """The three products of a layer: how they are written, and `(rows, inner, columns)`."""
    return {
        "forward": ("ij,jk->ik", (BATCH, inputs, outputs)),
        "gradient of the kernel": ("ji,jk->ik", (inputs, BATCH, outputs)),
        "gradient of the input": ("ij,kj->ik", (BATCH, outputs, inputs)),
    }


def take_turns(calls: Mapping[str, Call]) -> dict[str, float]:
    """Lower quartiles of the seconds of each call, all of them in turn."""
    secs: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + _SECS
    while time.monotonic() < end:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            secs[name].append(time.perf_counter() - began)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in secs.items()}


def _operands(equation: str, sizes: Sizes) -> list[np.ndarray]:
    size = dict(zip("ijk", sizes, strict=True))
    first, second = equation.split("->")[0].split(",")
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal([size[axis] for axis in axes]).astype(np.float32)
        for axes in (first, second)
    ]


def _with_jax() -> tuple[Callable[[str, Sizes], Call], dict[str, Call]]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import hetjax
    from hetjax.zoo import models
    from hetjax.zoo.models import layers

    def product(equation: str, sizes: Sizes) -> Call:
        operands = [jnp.asarray(x) for x in _operands(equation, sizes)]
        compiled = jax.jit(functools.partial(jnp.einsum, equation))
        return lambda: jax.block_until_ready(compiled(*operands))

    def lenet(conv_relu_pool: Callable[..., Any]) -> Call:
        model = models.make("lenet", (32, 32, 3), 10, rngs=nnx.Rngs(0))
        loss_fn, params = hetjax.nnx_loss(
            model,
            lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
                model(batch["image"]), batch["label"]
            ),
        )
        rng = np.random.default_rng(0)
        examples = {
            "image": jnp.asarray(rng.integers(0, 256, (IMAGES, 32, 32, 3), np.uint8)),
            "label": jnp.asarray(rng.integers(0, 10, IMAGES)),
        }
        key, chosen = jax.random.key(0), layers.conv_relu_pool
        layers.conv_relu_pool = conv_relu_pool
        try:
            step = jax.jit(
                lambda p: jax.value_and_grad(lambda p: loss_fn(p, examples, key).sum())(p)
            )
            jax.block_until_ready(step(params))
        finally:
            layers.conv_relu_pool = chosen
        return lambda: jax.block_until_ready(step(params))

    return product, {
        "banded products": lenet(layers.conv_relu_pool),
        "XLA's convolution": lenet(layers.conv_relu_pool_by_xla),
    }


def _with_torch() -> tuple[Callable[[str, Sizes], Call], dict[str, Call]]:
    import ddp_baseline
    import torch

    torch.set_num_threads(1)

    def product(equation: str, sizes: Sizes) -> Call:
        operands = [torch.from_numpy(x) for x in _operands(equation, sizes)]
        return functools.partial(torch.einsum, equation, *operands)

    def lenet(memory_format: torch.memory_format) -> Call:
        model = ddp_baseline.make_model("lenet").to(memory_format=memory_format)
        images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
        images, labels = images.to(memory_format=memory_format), torch.randint(0, 10, (IMAGES,))

        def call() -> None:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(images.float() / 255), labels).backward()

        return call

    return product, {
        "channels last": lenet(torch.channels_last),
        "channels first": lenet(torch.contiguous_format),
    }


def tune(name: str, options: Mapping[str, Any], most: int) -> dict[str, Any]:
    """What `tune_microbatch` gives for a model of the zoo, on images as CIFAR-10 has."""
    import optax
    from flax import nnx

    import hetjax
    from experiments import tuning
    from hetjax.zoo import models

    model = models.make(name, (32, 32, 3), 10, rngs=nnx.Rngs(0), **options)
    loss_fn, params = hetjax.nnx_loss(
        model,
        lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
            model(batch["image"]), batch["label"]
        ),
    )
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (most, 32, 32, 3), np.uint8)
    data = {"image": images, "label": rng.integers(0, 10, most, np.int32)}
    found = tuning.tune_microbatch(loss_fn, params, data)
    speeds = {row.microbatch_size: row.examples_per_sec for row in found.rows}
    return {"microbatch_size": found.microbatch_size, "examples_per_sec": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--library", choices=("jax", "torch"), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="gets the seconds, JSON")
    parser.add_argument("--tune", help="a model, JSON: its name, its options, the largest size")
    flags = parser.parse_args()
    if flags.tune:
        flags.out.write_text(json.dumps(tune(*json.loads(flags.tune))))
        return
    product, lenet = _with_jax() if flags.library == "jax" else _with_torch()
    calls = {
        layer: {name: product(*shape) for name, shape in product_shapes(*sizes).items()}
        for layer, sizes in LAYERS.items()
    } | {"lenet": lenet}
    flags.out.write_text(json.dumps({name: take_turns(some) for name, some in calls.items()}))


if __name__ == "__main__":
    main()
