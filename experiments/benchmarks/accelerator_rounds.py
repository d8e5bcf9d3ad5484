"""What do rounds cost on the device that JAX finds? hetjax's ways to run them, against each other.

All workers are of one process, one on each device. Programs take turns, so that what the machine
does beside hits all of them.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import accelerator_models, quota_overhead
from experiments.benchmarks.accelerator_models import Model, Sizes
from experiments.benchmarks.rows import Found, Row
from hetjax.local import stepped
from hetjax.ordering import balance

DEPTHS = (1, 2, 4)
_FORMS = ("stepped", "fused", "virtual")
_WARM_UP = 3  # turns that are not counted
_MOST_TURNS = 1000

_LENET = Model("lenet", {}, (32, 32, 3), microbatch_size=32)
_MLP = Model("mlp", {"hidden": (1024, 1024, 1024)}, (32, 32, 3), microbatch_size=512)
# A microbatch that a device has done before the host can ask for the next, and a long one.
MODELS = (_LENET, _MLP)
TINY_MODELS = (Model("mlp", {"hidden": (16,)}, (8, 8, 3), microbatch_size=4, budget=4),)


def models(sizes: Sizes) -> tuple[Model, ...]:
    return TINY_MODELS if sizes.tiny else MODELS


def turns(programs: Mapping[str, Callable[[], None]], secs: float) -> dict[str, np.ndarray]:
    """Seconds of each program in each turn, of as many turns as take about `secs`."""
    tried = quota_overhead.in_turn(programs, 2, warm_up=_WARM_UP)
    turn = sum(values.mean() for values in tried.values())
    count = int(np.clip(secs / turn, 5, _MOST_TURNS))
    return quota_overhead.in_turn(programs, count, warm_up=0)


def rounds_of(model: Model, **fields: Any) -> quota_overhead.Rounds:
    """Rounds of this model by equal quotas, a worker for each device where nothing else is said."""
    loss_fn, params, data = accelerator_models.problem(model)
    workers: Any = {} if "cluster" in fields else {"workers": min(4, jax.device_count())}
    of_run = accelerator_models.quiet("equal") | workers
    of_run |= {"microbatch_size": model.microbatch_size, "budget": model.budget, **fields}
    optimizer = accelerator_models.sgd()
    return quota_overhead.Rounds(loss_fn, params, optimizer, data, **of_run)


def _in_turn(model: Model, arms: Mapping[str, dict[str, Any]], secs: float) -> dict[str, Any]:
    """Seconds of the rounds of each arm, which is fields of a configuration."""
    with contextlib.ExitStack() as stack:
        of_arms = {
            name: stack.enter_context(rounds_of(model, **fields)) for name, fields in arms.items()
        }
        return turns(of_arms, secs)


def _against(
    model: Model, secs: dict[str, np.ndarray], first: str, target: str = "none", workers: int = 0
) -> Found:
    """The median of the first arm, and the others' ratios to it with their intervals."""
    count, block = len(secs[first]), min(10, len(secs[first]) // 4)
    yield Row(f"{model.name}: {first}", "none", f"{np.median(secs[first]) * 1e3:.2f} ms", count)
    for name in [name for name in secs if name != first]:
        ratio, low, high = quota_overhead.ratio_of(secs[name], secs[first], block=block)
        reached = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        yield Row(f"{model.name}: {name} over {first}", target, reached, count)
    yield (
        f"{model.name}: a round of {model.budget} microbatches of {model.microbatch_size}, "
        f"workers: {workers or min(4, jax.device_count())}."
    )


def loop_rows(sizes: Sizes) -> Found:
    """A round of hetjax over the bare loop of the same compiled calls."""
    for model in models(sizes):
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(rounds_of(model))
            setup = ours.run.setup
            num_workers = len(setup.where.devices)
            threads = stack.enter_context(stepped.worker_threads(num_workers))
            ids = np.arange(model.budget * model.microbatch_size, dtype=np.int32)
            ids = ids.reshape(num_workers, -1, model.microbatch_size)
            bare = quota_overhead.bare_loop(setup, accelerator_models.sgd(), ids, threads)
            secs = turns({"bare loop": bare, "hetjax": ours}, sizes.secs / 8)
        yield from _against(model, secs, "bare loop", "≤ 1.02")


def form_rows(sizes: Sizes) -> Found:
    """The three local forms."""
    for model in models(sizes):
        secs = _in_turn(model, {form: {"local": form} for form in _FORMS}, sizes.secs / 8)
        yield from _against(model, secs, "stepped")


def depth_rows(sizes: Sizes) -> Found:
    """More microbatches in flight than one."""
    for model in models(sizes):
        arms = {f"depth {depth}": {"dispatch_depth": depth} for depth in DEPTHS}
        secs = _in_turn(model, arms, sizes.secs / 8)
        yield from _against(model, secs, "depth 1")


def host_rows(sizes: Sizes) -> Found:
    """What the host adds where the device has next to nothing to do."""
    num_workers = min(4, jax.device_count())
    yield from quota_overhead.host_rows(20 if sizes.tiny else 500, num_workers)


def order_rows(sizes: Sizes) -> Found:
    """A step with balanced orders over one without."""
    for model in models(sizes):
        one_each = model._replace(budget=min(4, jax.device_count()))
        arms = {"random order": {}, "d_grab": {"ordering": "d_grab"}}
        secs = _in_turn(one_each, arms, sizes.secs / 8)
        yield from _against(one_each, secs, "random order")


def _copy_in_place(size_bytes: int) -> Callable[[], jax.Array]:
    """Reads and writes an array; into the same memory, so that no page is new."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.zeros(size_bytes // 4, jnp.float32)]

    def call() -> jax.Array:
        held[0] = step(held[0])
        return held[0]

    return call


def kernel_rows(sizes: Sizes) -> Found:
    """The kernel of balanced orders against copies of the same bytes."""
    size = 10**4 if sizes.tiny else 10**6
    device = jax.devices()[0].device_kind
    diffs, r = jax.random.normal(jax.random.key(0), (64, size)), jnp.zeros(size)
    chosen = jax.jit(balance.balance_signs)
    fresh_copy = jax.jit(lambda x: x + 1)
    calls = {
        "chosen": lambda: chosen(diffs, r),
        "in place": _copy_in_place(diffs.nbytes),
        "to new memory": lambda: fresh_copy(diffs),
    }
    programs = {
        name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()
    }
    secs = quota_overhead.in_turn(programs, 3 if sizes.tiny else 20, warm_up=1)
    for copy in ("in place", "to new memory"):
        ratio = np.median(secs[copy] / secs["chosen"]) / 2  # a copy moves each byte twice
        rate = 2 * diffs.nbytes / np.median(secs[copy]) / 1e9
        name, reached = f"kernel over a copy {copy}", f"{ratio:.0%} of {rate:.1f} GB/s"
        yield Row(name, "≥ 50 %", reached, len(secs[copy]))
    chosen_secs = np.median(secs["chosen"])
    yield Row("kernel", "none", f"{chosen_secs * 1e3:.1f} ms", len(secs["chosen"]))
    yield f"{device}: bytes of differences a second, each counted once; of a copy, all that moves."
    yield f"d = {size:,}, K = 64, float32."


def beside_rows(sizes: Sizes) -> Found:
    """The CPU as one more worker beside the accelerators, in one process."""
    title = "devices alone over both"
    backend, num_devices = jax.default_backend(), jax.device_count()
    if backend == "cpu":
        yield Row(title, "> 1", "not measured: JAX has no other device than the CPU here")
        return
    for model in models(sizes):
        both = {"platforms": (backend, "cpu"), "num_workers": num_devices + 1}
        alone = {"num_workers": num_devices}
        more = {"quota": "adaptive", "budget": 16 * (num_devices + 1)}
        wide = model._replace(budget=more["budget"])
        with (
            rounds_of(wide, cluster=alone, **more) as ours,
            rounds_of(wide, cluster=both, **more) as with_cpu,
        ):
            turns({"both": with_cpu}, sizes.secs / 20)  # until the quotas have settled
            secs = turns({"both": with_cpu, "alone": ours}, sizes.secs / 8)
            quotas = with_cpu.line()["quotas"]
        gain = np.median(secs["alone"]) / np.median(secs["both"])
        yield Row(f"{model.name}: {title}", "> 1", f"{gain:.2f}", len(secs["both"]))
        yield from _against(wide, secs, "alone", workers=num_devices + 1)
        yield f"Both: the CPU is one more worker, adaptive; its last quotas: {quotas}."
