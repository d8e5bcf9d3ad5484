"""What do rounds cost on the device that JAX finds? hetjax's ways to run them, against each other.

All workers are of one process, one on each device. Programs take turns, so that what the machine
does beside hits all of them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import accelerator_models, quota_overhead
from experiments.benchmarks.accelerator_models import Model, Sizes
from experiments.benchmarks.rows import Row
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


def _titled(model: Model, workers: int = 0) -> str:
    workers = workers or min(4, jax.device_count())
    return (
        f"{model.name}, {model.budget} microbatches of {model.microbatch_size} over "
        f"{workers} worker{'s' * (workers > 1)}"
    )


def _against(secs: dict[str, np.ndarray], first: str) -> str:
    """The median of each arm, and its ratio to the first one's with the interval."""
    median = np.median(secs[first]) * 1e3
    texts = [f"{first} {median:.2f} ms"]
    for name in [name for name in secs if name != first]:
        block = min(10, len(secs[first]) // 4)
        ratio, low, high = quota_overhead.ratio_of(secs[name], secs[first], block=block)
        texts.append(f"{name} {ratio:.3f}x ({low:.3f} to {high:.3f})")
    return f"{'; '.join(texts)}; {len(secs[first])} turns"


def loop_rows(sizes: Sizes) -> Iterator[Row]:
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
        yield Row(
            f"a round over the bare loop of the same calls, {_titled(model)}",
            "≤ 1.02",
            _against(secs, "bare loop"),
        )


def form_rows(sizes: Sizes) -> Iterator[Row]:
    """The three local forms."""
    for model in models(sizes):
        secs = _in_turn(model, {form: {"local": form} for form in _FORMS}, sizes.secs / 8)
        yield Row(f"local forms, a round, {_titled(model)}", "none", _against(secs, "stepped"))


def depth_rows(sizes: Sizes) -> Iterator[Row]:
    """More microbatches in flight than one."""
    for model in models(sizes):
        arms = {f"depth {depth}": {"dispatch_depth": depth} for depth in DEPTHS}
        secs = _in_turn(model, arms, sizes.secs / 8)
        yield Row(
            f"microbatches in flight (dispatch_depth), a round, {_titled(model)}",
            "none",
            _against(secs, "depth 1"),
        )


def host_rows(sizes: Sizes) -> Iterator[Row]:
    """What the host adds where the device has next to nothing to do."""
    num_workers = min(4, jax.device_count())
    yield from quota_overhead.host_rows(20 if sizes.tiny else 500, num_workers)


def order_rows(sizes: Sizes) -> Iterator[Row]:
    """A step with balanced orders over one without."""
    for model in models(sizes):
        one_each = model._replace(budget=min(4, jax.device_count()))
        arms = {"random order": {}, "d_grab": {"ordering": "d_grab"}}
        secs = _in_turn(one_each, arms, sizes.secs / 8)
        yield Row(
            f"a step with d_grab over one without, {_titled(one_each)}",
            "none",
            _against(secs, "random order"),
        )


def _copy_in_place(size_bytes: int) -> Callable[[], jax.Array]:
    """Reads and writes an array; into the same memory, so that no page is new."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.zeros(size_bytes // 4, jnp.float32)]

    def call() -> jax.Array:
        held[0] = step(held[0])
        return held[0]

    return call


def kernel_rows(sizes: Sizes) -> Iterator[Row]:
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
    reached = []
    for copy in ("in place", "to new memory"):
        ratio = np.median(secs[copy] / secs["chosen"]) / 2  # a copy moves each byte twice
        rate = 2 * diffs.nbytes / np.median(secs[copy]) / 1e9
        reached.append(f"{ratio:.0%} of a copy {copy} ({rate:.1f} GB/s)")
    chosen_secs = np.median(secs["chosen"])
    yield Row(
        f"{device}: bytes of differences (each counted once) a second / bytes read and "
        f"written by a copy a second, d = {size:,}, K = 64, float32",
        "≥ 50 %",
        f"{', '.join(reached)}; kernel {diffs.nbytes / chosen_secs / 1e9:.1f} GB/s, "
        f"{chosen_secs * 1e3:.1f} ms",
    )


def beside_rows(sizes: Sizes) -> Iterator[Row]:
    """The CPU as one more worker beside the accelerators, in one process."""
    title = "the CPU as one more worker: a round of the devices alone over one of both, adaptive"
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
        yield Row(
            f"{title}, {_titled(wide, num_devices + 1)}",
            "> 1",
            f"{gain:.2f}; {_against(secs, 'alone')}; quotas {quotas}",
        )
