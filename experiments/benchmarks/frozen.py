"""What do frozen parameters cost? LoRA on 419 MB that are not trained, over plain Flax NNX.

The group `frozen` of `benchmarks.startup`. Each figure is of processes of their own, started in
turn: a step of plain JAX on a batch, and a run whose rounds have the same examples, one microbatch
a worker. Seconds are those from the model on to the end of the first step or round; imports are not
in them. Memory is the highest resident size.
"""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.rows import Found, Row

_WIDTH, _LAYERS, _RANK, _EXAMPLES, _ROUNDS = 5120, 4, 4, 64, 6
_GB = 4 * _LAYERS * _WIDTH**2 / 1e9  # that are frozen
_ARMS = {"stepped": 2, "virtual": 1}  # devices


def _problem() -> tuple[Any, Any, Any]:
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            more = {"lora_rank": _RANK, "rngs": rngs}
            layers = [nnx.LoRALinear(_WIDTH, _WIDTH, **more) for _ in range(_LAYERS)]
            self.layers = nnx.List(layers)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + jnp.tanh(layer(x))
            return x

    x = np.random.default_rng(0).normal(size=(_EXAMPLES, _WIDTH)).astype(np.float32)
    return Net(nnx.Rngs(0)), lambda model, batch: (model(batch["x"]) ** 2).mean(-1), {"x": x}


def plain() -> dict[str, float]:
    import jax
    import optax
    from flax import nnx

    model, loss, data = _problem()
    began = time.perf_counter()
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(trained: Any, state: Any, frozen: Any, batch: Any) -> Any:
        grads = jax.grad(lambda t: loss(nnx.merge(graph, t, frozen), batch).mean())(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    now = jax.block_until_ready(step(trained, optimizer.init(trained), frozen, data))
    first, half = time.perf_counter() - began, {"x": data["x"][: _EXAMPLES // 2]}
    secs: dict[str, list[float]] = {"whole": [], "half": []}
    for batch, found in ((data, secs["whole"]), (half, secs["half"])):
        for _ in range(1 + _ROUNDS):  # the first may compile
            began = time.perf_counter()
            now = jax.block_until_ready(step(*now, frozen, batch))
            found.append(time.perf_counter() - began)
    return _told(first, secs["whole"][1:]) | {"halves": 2 * statistics.median(secs["half"][1:])}


def run(arm: str) -> dict[str, float]:
    import hetjax

    hetjax.use_cpu_workers(_ARMS[arm])
    import jax
    import optax
    from flax import nnx

    model, loss, data = _problem()
    make = hetjax.Run  # imports what it needs
    began = time.perf_counter()
    loss_fn, params = hetjax.nnx_loss(model, loss, wrt=nnx.LoRAParam)
    more = {"microbatch_size": _EXAMPLES // 2, "budget": 2, "local": arm, "quota": "equal"}
    more |= {"workers": 2, "epochs": 2 * _ROUNDS}
    with make(loss_fn, params, optax.adam(1e-3), data, **more) as run:
        state, _ = run.round(run.init())
        jax.block_until_ready(state.train.params)
        first, secs = time.perf_counter() - began, []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            state, _ = run.round(state)
            jax.block_until_ready(state.train.params)
            secs.append(time.perf_counter() - began)
    return _told(first, secs)


def _told(first: float, secs: list[float]) -> dict[str, float]:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"first": first, "step": statistics.median(secs), "memory": memory}


def rows(measured: Callable[[str], dict[str, float]], repeats: int) -> Found:
    """Each run over plain JAX of the same turn.

    Args:
        measured: what a process of its own finds, by the name of its program.
        repeats: processes of each kind.
    """
    kinds = {"plain": "frozen_plain"} | {arm: f"frozen,{arm}" for arm in _ARMS}
    found = [{kind: measured(child) for kind, child in kinds.items()} for _ in range(repeats)]
    first, step = (statistics.median(each["plain"][x] for each in found) for x in ("first", "step"))
    yield Row("plain: first step", "none", f"{first:.2f} s", repeats)
    yield Row("plain: steady step", "none", f"{step:.3f} s", repeats)
    for arm, devices in _ARMS.items():
        for what, own, of, target in (
            ("first round", "first", "first", "≤ 2"),
            ("steady round", "step", "step", "≤ 1.05"),
            ("steady, over plain's two half steps", "step", "halves", "none"),
        ):
            ratio = statistics.median(each[arm][own] / each["plain"][of] for each in found)
            yield Row(f"{arm}: {what}", target, f"{ratio:.2f}", repeats)
        over = [(each[arm]["memory"] - each["plain"]["memory"]) / _GB for each in found]
        reached = f"{statistics.median(over) / devices:.2f}"
        yield Row(f"{arm}: memory beyond plain's", "≤ 1.3", reached, repeats)
    yield f"LoRA, {_GB * 1e3:.0f} MB frozen, two workers; over plain JAX where no unit stands."
    yield "Memory: in frozen bytes, a device."
