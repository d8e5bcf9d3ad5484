"""What do frozen parameters cost? LoRA on 419 MB that are not trained, over plain Flax NNX.

    python -m experiments.benchmarks.frozen [--repeats=3]

Each figure is of processes of their own, started in turn: a step of plain JAX on a batch, and a run
whose rounds have the same examples, one microbatch a worker. Seconds are those from the model on to
the end of the first step or round; imports are not in them. Memory is the highest resident size.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from experiments import command_line
from experiments.benchmarks.rows import Row, print_tables

_REPEATS = flags.DEFINE_integer("repeats", 3, "Processes of each kind.", 1)
_CHILD = flags.DEFINE_string("child", None, "What this process measures; set by the program.")

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


def _plain() -> dict[str, float]:
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


def _run(arm: str) -> dict[str, float]:
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


def _measured(child: str) -> dict[str, float]:
    command = [sys.executable, "-m", "experiments.benchmarks.frozen", f"--child={child}"]
    with tempfile.TemporaryDirectory() as cache:  # of compiled programs, empty
        environ = {**os.environ, "XDG_CACHE_HOME": cache}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{child} failed:\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def _rows() -> list[Row]:
    kinds = ["plain", *_ARMS]
    found = [{kind: _measured(kind) for kind in kinds} for _ in range(_REPEATS.value)]
    rows = []
    for arm, devices in _ARMS.items():
        ratios = {
            name: statistics.median(each[arm][name] / each["plain"][name] for each in found)
            for name in ("first", "step")
        }
        over = [(each[arm]["memory"] - each["plain"]["memory"]) / _GB for each in found]
        what = f"{_GB * 1e3:.0f} MB frozen, two workers, {arm}"
        halves = statistics.median(each[arm]["step"] / each["plain"]["halves"] for each in found)
        first = statistics.median(each["plain"]["first"] for each in found)
        step = statistics.median(each["plain"]["step"] for each in found)
        rows += [
            Row(f"{what}: first round", "≤ 2", f"{ratios['first']:.2f} of plain's {first:.2f} s"),
            Row(f"{what}: steady round", "≤ 1.05", f"{ratios['step']:.2f} of {step:.3f} s"),
            Row(
                f"{what}: steady round, of plain's steps of its microbatches",
                "none",
                f"{halves:.2f}",
            ),
            Row(
                f"{what}: memory beyond plain's",
                "≤ 1.3",
                f"{statistics.median(over) / devices:.2f} of the frozen bytes a device",
            ),
        ]
    return rows


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    if _CHILD.value:
        print(json.dumps(_plain() if _CHILD.value == "plain" else _run(_CHILD.value)))
        return
    print_tables({"frozen": _rows}, [])


if __name__ == "__main__":
    command_line.run(main)
