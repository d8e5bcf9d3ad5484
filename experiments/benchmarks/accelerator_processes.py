"""What do adaptive quotas give where processes share one device and some have other work, too?

Each process is a worker with its part of the device's memory. Process i computes i large products
beside each of its microbatches, from a thread of its own, so that workers are unequal by load.
Run by `benchmarks.accelerator`; by itself it is one of these processes, started by the launcher.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

import hetjax
from experiments.benchmarks import accelerator_models, accelerator_rounds, launched_runs
from experiments.benchmarks.accelerator_models import Model, Sizes
from experiments.benchmarks.rows import Found, Row, middle

_SKIPPED = 10  # rounds until the quotas have settled
_LEAST = 5  # rounds that count
_MEMORY = 0.9  # of the device's, of all processes
_TINY_MODEL = Model("mlp", {"hidden": (256,)}, (16, 16, 3), microbatch_size=64)


def process_rows(sizes: Sizes) -> Found:
    """Rounds by equal quotas over those by adaptive ones; uses no device itself."""
    num_processes = 2 if sizes.tiny else 4
    share = f"{_MEMORY / num_processes:.2f}"
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": share}
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):  # all on the first one
        environment[name] = os.environ.get(name, "0").split(",")[0]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hetjax-benchmark-") as directory:
        for policy in ("equal", "adaptive"):
            out = pathlib.Path(directory, f"{policy}.json")
            own = [sys.executable, "-m", "experiments.benchmarks.accelerator_processes"]
            own += [f"--policy={policy}", f"--out={out}", f"--secs={sizes.secs / 8}"]
            own += ["--tiny"] if sizes.tiny else []
            launch = launched_runs.launch_command(num_processes, (), "--max_restarts=0")
            ended = subprocess.run(
                [*launch, *own],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=300 if sizes.tiny else sizes.secs,
            )
            if ended.returncode:
                told = (ended.stderr + ended.stdout).strip().splitlines()
                said = [line for line in told if "Error" in line] or told or ["no word"]
                raise RuntimeError(f"policy {policy}: exit code {ended.returncode}: {said[-1]}")
            found[policy] = json.loads(out.read_text())
    secs = {policy: found[policy]["round_secs"] for policy in found}
    ratio = statistics.median(secs["equal"]) / statistics.median(secs["adaptive"])
    yield Row("equal quotas over adaptive: a round", "> 1", f"{ratio:.2f}")
    for policy, own in secs.items():
        millis = middle([1e3 * each for each in own], ".1f", " ms")
        yield Row(f"{policy}: a round", "none", millis, len(own))
    loads = ", ".join(map(str, range(num_processes)))
    yield f"{num_processes} processes on one {found['equal']['device']}, each with {share} of it."
    yield f"Beside a microbatch they have {loads} products."
    yield f"Last quotas: {found['adaptive']['quotas']}."


class Load:
    """Products on the device, as many as `count` at a time, from a thread until it is stopped."""

    def __init__(self, count: int, length: int) -> None:
        matrix = jnp.full((length, length), 0.01)
        multiply, self._stopping = jax.jit(jnp.matmul), threading.Event()

        def work() -> None:
            while not self._stopping.is_set():
                jax.block_until_ready([multiply(matrix, matrix) for _ in range(count)])

        self._thread = threading.Thread(target=work, daemon=True)
        if count:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--policy", required=True, help="of the quotas")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="gets the rounds, JSON")
    parser.add_argument("--secs", type=float, required=True, help="how long rounds are measured")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    flags = parser.parse_args()

    member = hetjax.join_processes()
    model = _TINY_MODEL if flags.tiny else accelerator_rounds.MODELS[-1]
    model = model._replace(budget=(4 if flags.tiny else 8) * member.num_processes)
    loss_fn, params, data = accelerator_models.problem(model)
    load = Load(member.process_id, 512 if flags.tiny else 2048)
    began: list[float] = []

    def is_enough(line: Any) -> bool:
        began.append(time.monotonic())
        return len(began) >= _SKIPPED + _LEAST and began[-1] - began[_SKIPPED - 1] > flags.secs

    result = hetjax.fit(
        loss_fn,
        params,
        accelerator_models.sgd(),
        data,
        epochs=1_000_000,
        microbatch_size=model.microbatch_size,
        budget=model.budget,
        quota=flags.policy,
        callbacks=[is_enough],
        progress=False,
    )
    load.stop()
    if member.process_id == 0:
        lines = result.history[_SKIPPED:]
        told = {
            "device": jax.local_devices()[0].device_kind,
            "round_secs": [line["round_secs"] for line in lines],
            "quotas": lines[-1]["quotas"],
        }
        flags.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
