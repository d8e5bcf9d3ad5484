"""What of a device do models reach? Examples a second, share of its peak, compile time, memory.

Each model is measured in both types, in a process of its own on an accelerator, first by plain JAX
(a step and an update each microbatch), then by hetjax in rounds of several microbatches. Operations
are those that XLA's analysis on CPU counts in the loss and its gradient as they are for the device:
a GPU's compiler replaces convolutions by calls that its own analysis does not look into.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hetjax
from experiments import problems
from experiments.benchmarks import quota_overhead
from experiments.benchmarks.rows import Found, Row
from hetjax.zoo import models

# By the beginning of `device_kind`: dense TFLOP/s in bfloat16, and in float32 as JAX computes it by
# default, which is in TF32 on GPUs that have it and in bfloat16 on TPUs. None: it has no such unit.
PEAKS: dict[str, tuple[float | None, float]] = {
    "NVIDIA A100": (312.0, 156.0),
    "NVIDIA H100 PCIe": (756.0, 378.0),
    "NVIDIA H100": (989.0, 495.0),
    "NVIDIA H200": (989.0, 495.0),
    "NVIDIA L4": (121.0, 60.0),
    "NVIDIA L40S": (362.0, 183.0),
    "NVIDIA A10G": (70.0, 35.0),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "NVIDIA GeForce RTX 4090": (165.0, 82.6),
    "Tesla V100": (None, 15.7),
    "Tesla T4": (None, 8.1),
    "TPU v3": (61.5, 61.5),  # of a core, which is a device
    "TPU v4": (275.0, 275.0),
    "TPU v5 lite": (197.0, 197.0),
    "TPU v5": (459.0, 459.0),
    "TPU v6 lite": (918.0, 918.0),
}
_ROUNDS = 5  # of a pass over the data, whose beginning costs something, too
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


class Sizes(NamedTuple):
    """How much is measured, and for how long."""

    tiny: bool
    secs: float  # of a group, in which compiling is, too
    peak_tflops: tuple[float, ...] = ()  # bfloat16, float32; (): as `PEAKS` has them


class Model(NamedTuple):
    """A reference model, and the sizes of a round."""

    name: str  # in `models.MODELS`
    options: dict[str, Any]
    example_shape: tuple[int, ...]
    num_classes: int = 10
    microbatch_size: int = 32
    budget: int = 8

    @property
    def unit(self) -> str:
        return "tokens" if self.is_text else "images"

    @property
    def is_text(self) -> bool:
        return len(self.example_shape) == 1

    @property
    def units_per_example(self) -> int:
        return self.example_shape[0] - 1 if self.is_text else 1


MODELS = {
    "lenet": Model("lenet", {}, (32, 32, 3), microbatch_size=1024),
    "resnet18": Model("resnet18", {}, (32, 32, 3), microbatch_size=256),
    "transformer": Model(
        "transformer", {"width": 512, "blocks": 6, "heads": 8}, (257,), 11_700, microbatch_size=64
    ),
}
TINY_MODELS = {
    "lenet": Model("lenet", {}, (16, 16, 3), microbatch_size=4, budget=2),
    "resnet18": Model("resnet8", {"width": 8}, (8, 8, 3), microbatch_size=2, budget=2),
    "transformer": Model(
        "transformer", {"width": 16, "blocks": 1, "heads": 2}, (9,), 50, microbatch_size=2, budget=2
    ),
}


def problem(model: Model, dtype: Any = jnp.float32) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The loss, parameters and examples of several rounds at random.

    What a step takes does not depend on the values, so no program is compiled to draw them.
    """

    def make() -> nnx.Module:
        options = {"rngs": nnx.Rngs(0), "param_dtype": dtype, **model.options}
        return models.make(model.name, model.example_shape, model.num_classes, **options)

    graph, shapes = nnx.split(nnx.eval_shape(make))
    rng, num_examples = np.random.default_rng(0), _ROUNDS * model.microbatch_size * model.budget
    drawn = jax.tree.map(lambda x: (0.05 * rng.standard_normal(x.shape)).astype(x.dtype), shapes)
    data = problems.images(num_examples, model.example_shape)
    if model.is_text:
        tokens = rng.integers(model.num_classes, size=(num_examples, *model.example_shape))
        data = {"tokens": tokens.astype(np.int32)}
    loss_fn, params = hetjax.nnx_loss(nnx.merge(graph, drawn), _losses)
    return loss_fn, params, data


def _losses(model: nnx.Module, batch: Any) -> jax.Array:
    """f32[B]"""
    inputs = batch["tokens"] if "tokens" in batch else batch["image"]
    labels = batch["tokens"][:, 1:] if "tokens" in batch else batch["label"]
    logits = model(inputs).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return found.reshape(len(inputs), -1).mean(-1)


def model_rows(name: str, dtype_name: str, sizes: Sizes) -> Found:
    """Throughput, compile time and memory of a model in one type."""
    model = (TINY_MODELS if sizes.tiny else MODELS)[name]
    loss_fn, params, data = problem(model, DTYPES[dtype_name])
    size, count = model.microbatch_size, sum(x.size for x in jax.tree.leaves(params))
    batch = jax.device_put({key: x[:size] for key, x in data.items()})
    secs = sizes.secs / 10
    with _compiling() as plain_compiling:
        began = time.perf_counter()
        plain = Plain(loss_fn, params, batch, model.budget)
        plain()
        plain_first = time.perf_counter() - began
    plain_secs, plain_peak = _mean_secs(plain, secs), peak_bytes()
    operations = plain.operations()
    del plain
    fields = {"microbatch_size": size, "budget": model.budget, "workers": 1, **quiet("equal")}
    if sizes.tiny:  # a check that compiles: most of the seconds on a CPU
        fields["loss_over"] = "microbatch"
    with _compiling() as compiling:
        began = time.perf_counter()
        ours = quota_overhead.Rounds(loss_fn, params, sgd(), data, **fields)
        ours()
        first = time.perf_counter() - began
    with ours:
        round_secs, peak = _mean_secs(ours, secs), peak_bytes()
    unit, rate = model.unit, size * model.units_per_example
    speed, plain_speed = (rate * model.budget / each for each in (round_secs, plain_secs))
    tflops = operations * speed / rate / 1e12
    yield Row(f"{unit} a second", "none", f"{speed:,.0f}")
    yield Row(f"{unit} a second over plain JAX", "none", f"{speed / plain_speed:.2f}")
    peak_share, product_share = share_of_peak(tflops, dtype_name, sizes)
    yield Row("share of the device's peak", "none", peak_share)
    yield Row("share of a large product", "none", product_share)
    for title, secs, programs in (
        ("first round", first, compiling),
        ("plain JAX's first steps", plain_first, plain_compiling),
    ):
        yield Row(title, "none", f"{secs:.1f} s")
        reached = f"{sum(programs):.1f} s"
        yield Row(f"{title}: compiling of programs", "none", reached, len(programs))
    memory = "not measured: the device tells no peak (memory_stats)"
    if peak:
        memory = f"{peak / plain_peak:.2f}: {peak / 1e6:,.0f} MB over {plain_peak / 1e6:,.0f} MB"
    yield Row("memory over plain JAX", "none", memory)
    chunks = f" chunks of {model.units_per_example} tokens" if model.is_text else ""
    yield f"{model.name} of {count:,} parameters, {dtype_name}."
    yield f"A round: {model.budget} microbatches of {size}{chunks}; {tflops:.3g} TFLOP/s."


class Plain:
    """Steps of plain JAX on one batch, as many at a call as a round has microbatches."""

    def __init__(self, loss_fn: Any, params: Any, batch: Any, num_steps: int) -> None:
        self._batch, self._key, optimizer = batch, jax.random.key(0), sgd()
        self._num_steps = num_steps
        self._carry = jax.jit(lambda params: (params, optimizer.init(params)))(params)

        def mean_loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
            return loss_fn(params, batch, key).mean()

        def step(carry: Any, batch: Any, key: jax.Array) -> Any:
            params, opt_state = carry
            grads = jax.grad(mean_loss)(params, batch, key)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._gradient = jax.jit(jax.value_and_grad(mean_loss))
        arguments = self._carry, batch, self._key
        self._step = jax.jit(step, donate_argnums=0).lower(*arguments).compile()

    def __call__(self) -> None:
        for _ in range(self._num_steps):
            self._carry = self._step(self._carry, self._batch, self._key)
        jax.block_until_ready(self._carry)

    def operations(self) -> float:
        """Floating point operations of the loss and its gradient; NaN: JAX has no CPU here."""
        arguments = jax.eval_shape(lambda *given: given, self._carry[0], self._batch, self._key)
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        with contextlib.suppress(RuntimeError), jax.default_device(jax.devices("cpu")[0]):
            lowered = self._gradient.trace(*arguments).lower(lowering_platforms=(platform,))
            found: Any = lowered.cost_analysis()
            return float(found["flops"])
        return float("nan")


def sgd() -> optax.GradientTransformation:
    """Of all problems here."""
    return optax.sgd(1e-4, momentum=0.9)


def quiet(policy: str) -> dict[str, Any]:
    """Fields of a run that is never done, and compiles all that it needs."""
    return {"epochs": 1_000_000, "quota": {"policy": policy}, "compilation_cache": "off"}


def peak_bytes() -> int:
    """The most that arrays and programs of this process took on the device; 0: it does not tell."""
    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def share_of_peak(tflops: float, dtype_name: str, sizes: Sizes) -> tuple[str, str]:
    """Of what the device is sold for, and of what a large product reaches here."""
    kind, place = jax.devices()[0].device_kind, list(DTYPES).index(dtype_name)
    known = sizes.peak_tflops or next(
        (PEAKS[name] for name in sorted(PEAKS, key=len, reverse=True) if kind.startswith(name)), ()
    )
    peak = known[place] if known else None
    text = f"not measured: no peak of {kind!r} is known (--peak_tflops)"
    if peak:
        text = f"{tflops / peak:.1%} of {peak:g} TFLOP/s"
    length, product = product_tflops(DTYPES[dtype_name], sizes)
    return text, f"{tflops / product:.1%} of {product:.3g} TFLOP/s ({length} x {length})"


@functools.cache
def product_tflops(dtype: Any, sizes: Sizes) -> tuple[int, float]:
    """The length of a square product, and what it reaches."""
    length = 256 if sizes.tiny else 8192
    matrix = jnp.full((length, length), 0.01, dtype)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(matrix, matrix))
    call = lambda: jax.block_until_ready(multiply(matrix, matrix))  # noqa: E731
    return length, 2 * length**3 / _mean_secs(call, sizes.secs / 40) / 1e12


def _mean_secs(call: Callable[[], Any], secs: float) -> float:
    """Of a call, over so many seconds, once it has run twice more."""
    for _ in range(2):
        call()
    began, times = time.perf_counter(), 0
    while not times or time.perf_counter() - began < secs:
        call()
        times += 1
    return (time.perf_counter() - began) / times


@contextlib.contextmanager
def _compiling() -> Iterator[list[float]]:
    """Seconds of each program that is compiled inside."""
    secs: list[float] = []

    def note(event: str, duration: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            secs.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield secs
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
