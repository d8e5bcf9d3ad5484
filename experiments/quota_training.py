"""What do quotas cost and give in real training? Figures of whole runs, with JAX.

Emulated workers sleep to their times on the wall clock; the overhead of the loop is compared
with a bare loop of the same compiled programs, in interleaved pairs.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import hetjax
import hetjax.types
from experiments import problems
from experiments.rows import Row
from hetjax import mesh as mesh_lib
from hetjax.training import local, record, rules

_MICROBATCH = 32


def emulated_rows(round_secs: float = 0.2, num_rounds: int = 12, skipped: int = 3) -> list[Row]:
    """Mean round on the wall clock in steady state over the exact optimum for the true speeds."""
    rows = []
    loss_fn, params = problems.classifier("logistic", (8, 8, 1), input_max=16.0)
    for num_workers in (2, 4, 8):
        reached = []
        for ratio in (1, 2, 4, 8):
            secs = ratio ** (np.arange(num_workers) / (num_workers - 1))
            budget = 8 * num_workers
            secs *= round_secs / budget * (1 / secs).sum()
            result = hetjax.fit(
                loss_fn,
                params,
                optax.sgd(0.1),
                problems.images(16 * budget * num_rounds, (8, 8, 1)),
                epochs=1,
                microbatch_size=16,
                budget=budget,
                cluster={"num_workers": num_workers, "secs_per_microbatch": tuple(secs)},
                progress=False,
            )
            lines = result.history[skipped:]
            optimum = sum(line["optimal_round_secs"] for line in lines)
            reached.append(optimum / sum(line["round_secs"] for line in lines))
            assert result.summary["overrun_fraction"] <= 0.01
        rows.append(
            Row(
                f"steady state on the wall clock, training, rounds of {round_secs * 1e3:.0f} ms, "
                f"emulated, n = {num_workers}: least, and at 1:1, 2:1, 4:1, 8:1",
                "≥ 97 %",
                f"{min(reached):.1%} ({', '.join(f'{r:.1%}' for r in reached)})",
            )
        )
    return rows


class Rounds:
    """The rounds of a run, one at a time, whose reports go into files as any run's do.

    Arguments as `hetjax.Run`'s.
    """

    def __init__(self, loss_fn: Any, params: Any, optimizer: Any, data: Any, **fields: Any) -> None:
        self.run = hetjax.Run(loss_fn, params, optimizer, data, **fields)
        self._directory = tempfile.TemporaryDirectory()
        self._recorder = record.Recorder(
            self._directory.name, self.run.recorded, num_examples=1, progress=False
        )
        self._state, self._last = self.run.init(), None

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.close()
        self.run.close()
        self._directory.cleanup()

    def __call__(self) -> None:
        """One round, to the end of its update; reports the one before meanwhile."""
        self._state, self._last = self.run.round(self._state, meanwhile=self._report)
        jax.block_until_ready(self._state.train)

    def _report(self) -> None:
        if self._last is not None:
            self._recorder.add(self._last.read())


def _bare_loop(parts: Any, optimizer: Any, rows: np.ndarray) -> Callable[[], None]:
    """The same compiled microbatch calls in the same threads, one jitted psum and update."""
    axis, num_workers = mesh_lib.WORKER_AXIS, len(parts.devices)
    mesh = mesh_lib.make_worker_mesh(num_workers)
    add = local.jit_add(rules.with_observer(parts.main.rule))
    threads = local.worker_threads(num_workers)

    def update(state: Any, sums: Any) -> tuple[Any, Any]:
        one, mine = jax.tree.map(lambda x: x[0], (state, sums))
        grad_sum, weight = jax.lax.psum((mine.sums.grad_sum, mine.sums.weight_sum), axis)
        grads = jax.tree.map(lambda g: g / weight, grad_sum)
        updates, opt_state = optimizer.update(grads, one.opt_state, one.params)
        params = optax.apply_updates(one.params, updates)
        new = one._replace(params=params, opt_state=opt_state)
        zeros = jax.tree.map(jnp.zeros_like, sums)
        return jax.tree.map(lambda x: x[None], new), zeros

    spec = P(axis)
    body = jax.shard_map(update, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    step = jax.jit(body, donate_argnums=(1,))
    carry = {"state": parts.state, "sums": parts.main.begin(parts.state)}
    keys = [jax.device_put(parts.rng, device) for device in parts.devices]

    def work(worker: int, state: Any, sums: Any) -> Any:
        for example_ids in rows[worker]:
            microbatch = parts.feed.load(worker, example_ids)
            sums, _ = add(state, sums, microbatch, keys[worker])
            jax.block_until_ready(sums.tally)
        return sums

    def bare_round() -> None:
        state = carry["state"]
        states = mesh_lib.worker_rows(hetjax.types.Shared(state.params))
        sums = mesh_lib.worker_rows(carry["sums"])
        tasks = [threads.submit(work, w, states[w], sums[w]) for w in range(num_workers)]
        joined = mesh_lib.join_rows([task.result() for task in tasks], mesh)
        carry["state"], carry["sums"] = step(state, joined)
        jax.block_until_ready(carry["state"])

    return bare_round


def overhead_rows(pairs: int = 150, quota: int = 4) -> list[Row]:
    """A round of the loop against the bare loop, and the bare loop against itself."""
    loss_fn, params = problems.classifier("lenet", (32, 32, 3), input_max=255.0)
    optimizer = optax.sgd(0.01, momentum=0.9)
    num_workers, budget = 4, 4 * quota
    data = problems.images(_MICROBATCH * budget * 20, (32, 32, 3))
    fields = {
        "epochs": 1_000_000,
        "microbatch_size": _MICROBATCH,
        "budget": budget,
        "cluster": {"num_workers": num_workers},
        "quota": {"policy": "equal"},
    }
    ids = np.arange(num_workers * quota * _MICROBATCH, dtype=np.int32)
    rows = []
    for policy in ("equal", "adaptive"):
        fields["quota"] = {"policy": policy}
        with Rounds(loss_fn, params, optimizer, data, **fields) as ours:
            bare = _bare_loop(
                ours.run.parts, optimizer, ids.reshape(num_workers, quota, _MICROBATCH)
            )
            programs = {"loop": ours, "bare": bare, "bare again": bare}
            secs: dict[str, list[float]] = {name: [] for name in programs}
            for turn in range(pairs + 5):
                names = list(programs)
                for name in names[turn % 3 :] + names[: turn % 3]:
                    began = time.perf_counter()
                    programs[name]()
                    if turn >= 5:
                        secs[name].append(time.perf_counter() - began)
        ratio, low, high = ratio_of(secs["loop"], secs["bare"])
        own, own_low, own_high = ratio_of(secs["bare again"], secs["bare"])
        rows.append(
            Row(
                f"LeNet, 4 workers of {quota} microbatches of {_MICROBATCH}, policy {policy}: "
                f"round / bare loop's, ratio of medians of {pairs} interleaved rounds, 95 % "
                "interval",
                "≤ 1.03",
                f"{ratio:.3f} ({low:.3f} to {high:.3f}); bare / itself {own:.3f} "
                f"({own_low:.3f} to {own_high:.3f}); bare {np.median(secs['bare']) * 1e3:.1f} ms",
            )
        )
    return rows


def ratio_of(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval, by resampling the interleaved rounds."""
    pairs = np.array([ours, theirs])
    rng = np.random.default_rng(0)
    picks = rng.integers(pairs.shape[1], size=(2000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    ratio = np.median(pairs[0]) / np.median(pairs[1])
    return float(ratio), float(low), float(high)


def compilation_rows() -> list[Row]:
    """Programs compiled after the first round while quotas, workers and speeds change."""
    loss_fn, params = problems.classifier("logistic", (8, 8, 1), input_max=16.0)
    counts: list[str] = []

    def on_event(name: str, duration: float, **kwargs: Any) -> None:
        del duration, kwargs
        if name == "/jax/core/compile/backend_compile_duration":
            counts.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        rows = []
        for local in ("stepped", "fused", "virtual"):
            began: list[int] = []

            def note(line: Any, began: list[int] = began) -> None:
                if line.round == 0:
                    began.append(len(counts))

            result = hetjax.fit(
                loss_fn,
                params,
                optax.sgd(0.1),
                problems.images(1000, (8, 8, 1)),
                epochs=4,
                microbatch_size=8,
                budget=16,
                local=local,
                cluster={
                    "num_workers": 4,
                    "secs_per_microbatch": (1.0, 2.0, 3.0, 4.0),
                    "clock": "virtual",
                    "changes": (
                        {"round": 6, "worker": 0, "secs_per_microbatch": 50.0},
                        {"round": 12, "worker": 1, "present": False},
                        {"round": 18, "worker": 1, "present": True},
                    ),
                },
                callbacks=[note],
                progress=False,
            )
            quotas = {tuple(line["quotas"]) for line in result.history}
            rows.append(
                Row(
                    f"compilations after the first round, {local}, {len(quotas)} different quotas",
                    "0",
                    str(len(counts) - began[0]),
                )
            )
        return rows
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
