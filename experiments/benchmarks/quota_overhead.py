"""What does the host add to a round? The loop against a bare loop, and rounds without compute.

The bare loop makes the same compiled calls in threads of its own, and takes turns with the loop.
"""

import concurrent.futures
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import hetjax
import hetjax.types
from experiments import problems
from experiments.benchmarks.rows import Found, Row
from hetjax import mesh as mesh_lib
from hetjax.local import calls, packing, rules, stepped
from hetjax.records import workdir

_MICROBATCH, _NUM_WORKERS = 32, 4
_WARM_UP = 5  # rounds that are not counted
_BLOCK = 30  # consecutive turns: what disturbs a machine lasts longer than a round
_POLICIES = ("equal", "adaptive")


class Rounds:
    """The rounds of a run, one at a time, whose reports go into files as any run's do.

    Arguments as `hetjax.Run`'s.
    """

    def __init__(self, loss_fn: Any, params: Any, optimizer: Any, data: Any, **fields: Any) -> None:
        self.run = hetjax.Run(loss_fn, params, optimizer, data, **fields)
        self._directory = tempfile.TemporaryDirectory()
        self._recorder = workdir.Recorder(
            self._directory.name,
            self.run.recorded,
            files={"metrics": workdir.METRICS},
            lines={"metrics": []},
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

    def line(self) -> dict[str, Any]:
        """Of the last round that is reported."""
        return self._recorder.history[-1]

    def _report(self) -> None:
        if self._last is not None:
            self._recorder.add([("metrics", self._last.read().to_plain())], "", 0)


def bare_loop(
    setup: Any, optimizer: Any, rows: np.ndarray, threads: concurrent.futures.Executor
) -> Callable[[], None]:
    """The same compiled microbatch calls in threads of its own, one jitted psum and update."""
    axis, num_workers, mesh = mesh_lib.WORKER_AXIS, len(setup.where.devices), setup.where.mesh
    steps = rules.with_observer(setup.programs.main.rule)
    (add, *_) = calls.jit_adds(steps, setup.where, marked=False)

    def update(state: Any, sums: Any) -> tuple[Any, Any]:
        one, mine = jax.tree.map(lambda x: x[0], (state, packing.unpack(sums)))
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
    carry = {
        "state": setup.begun,
        "sums": setup.programs.main.begin(setup.begun.params, setup.begun.kept, ()),
    }
    keys = [jax.device_put(setup.rng, device) for device in setup.where.devices]

    def work(worker: int, state: Any, sums: Any) -> Any:
        for example_ids in rows[worker]:
            microbatch = setup.feed.lend(worker, example_ids)
            sums, _ = add(state, sums, microbatch, keys[worker])
            jax.tree.leaves(sums)[-1].block_until_ready()
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


def in_turn(
    programs: Mapping[str, Callable[[], None]], num_rounds: int, *, warm_up: int = _WARM_UP
) -> dict[str, np.ndarray]:
    """Seconds of each round of each program, f64[rounds]; who begins rotates with each turn."""
    names = list(programs)
    secs: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + num_rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            programs[name]()
            secs[name].append(time.perf_counter() - began)
    return {name: np.array(values[warm_up:]) for name, values in secs.items()}


def ratio_of(ours: np.ndarray, theirs: np.ndarray, *, block: int = 1) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval, by resampling blocks of consecutive turns.

    Args:
        ours: seconds, f64[turns].
        theirs: of the same turns.
        block: turns that are drawn together; the last is followed by the first.
    """
    pairs = np.array([ours, theirs])
    turns, rng = pairs.shape[1], np.random.default_rng(0)
    starts = rng.integers(turns, size=(2000, -(-turns // block)))
    picks = (starts[..., None] + np.arange(block)).reshape(len(starts), -1)[:, :turns] % turns
    medians = np.stack([np.median(secs[picks], axis=1) for secs in pairs])
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    ratio = np.median(pairs[0]) / np.median(pairs[1])
    return float(ratio), float(low), float(high)


def overhead_rows(num_rounds: int = 1500, quota: int = 4) -> Found:
    """A round of the loop against the bare loop, and the bare loop against itself."""
    loss_fn, params = problems.classifier("lenet", (32, 32, 3), input_max=255.0)
    optimizer, budget = optax.sgd(0.01, momentum=0.9), _NUM_WORKERS * quota
    data = problems.images(_MICROBATCH * budget * 20, (32, 32, 3))
    ids = np.arange(budget * _MICROBATCH, dtype=np.int32)
    ids = ids.reshape(_NUM_WORKERS, quota, _MICROBATCH)
    for policy in _POLICIES:
        fields = _fields(policy, microbatch_size=_MICROBATCH, budget=budget)
        with (
            stepped.worker_threads(_NUM_WORKERS) as threads,
            Rounds(loss_fn, params, optimizer, data, **fields) as ours,
        ):
            bare = bare_loop(ours.run.setup, optimizer, ids, threads)
            secs = in_turn({"loop": ours, "bare": bare, "bare again": bare}, num_rounds)
        target = "≤ 1.02 (± 0.005)"
        reached = _ratio_text(secs["loop"], secs["bare"])
        yield Row(f"{policy}: round over the bare loop", target, reached, num_rounds)
        reached = _ratio_text(secs["bare again"], secs["bare"])
        yield Row(f"{policy}: bare loop over itself", "none", reached, num_rounds)
        reached = f"{np.median(secs['bare']) * 1e3:.1f} ms"
        yield Row(f"{policy}: bare loop", "none", reached, num_rounds)
    yield f"LeNet, {_NUM_WORKERS} workers of {quota} microbatches of {_MICROBATCH}, in turn."
    yield f"Ratios of medians, half of the 95 % interval (blocks of {_BLOCK} turns)."
    yield f"Load at the end: {os.getloadavg()[0]:.1f}."


def _ratio_text(ours: np.ndarray, theirs: np.ndarray) -> str:
    ratio, low, high = ratio_of(ours, theirs, block=_BLOCK)
    return f"{ratio:.4f} ± {(high - low) / 2:.4f}"


def _fields(policy: str, **fields: Any) -> dict[str, Any]:
    """Of a run that is never done."""
    cluster, quota = {"num_workers": _NUM_WORKERS}, {"policy": policy}
    return {"epochs": 1_000_000, "cluster": cluster, "quota": quota, **fields}


def host_rows(num_rounds: int = 3000, num_workers: int = _NUM_WORKERS) -> Found:
    """Rounds of a model whose compute takes no time: what is left is the host's."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(8_000, 2)).astype(np.float32)
    data = {"x": inputs, "y": inputs @ np.array([1.0, -2.0], np.float32)}
    for policy in _POLICIES:
        fields = _fields(policy, microbatch_size=2, budget=num_workers)
        fields["cluster"] = {"num_workers": num_workers}
        optimizer, ids = optax.sgd(0.1), np.arange(2 * num_workers, dtype=np.int32)
        with (
            stepped.worker_threads(num_workers) as threads,
            Rounds(_squares, np.zeros(2, np.float32), optimizer, data, **fields) as ours,
        ):
            began = time.process_time()
            secs = in_turn({"loop": ours}, num_rounds)["loop"]
            cpu_secs = (time.process_time() - began) / (_WARM_UP + num_rounds)
            bare = bare_loop(ours.run.setup, optimizer, ids.reshape(num_workers, 1, 2), threads)
            bare_secs = in_turn({"bare": bare}, num_rounds)["bare"]
        low, median, high = np.percentile(secs, [25, 50, 75]) * 1e3
        reached = f"{median:.2f} ms ({low:.2f} to {high:.2f})"
        yield Row(f"{policy}: host of a round", "≤ 1.0 ms", reached, num_rounds)
        yield Row(f"{policy}: of all cores", "none", f"{cpu_secs * 1e3:.2f} ms", num_rounds)
        reached = f"{np.median(bare_secs) * 1e3:.2f} ms"
        yield Row(f"{policy}: bare loop right after it", "none", reached, num_rounds)
    yield f"A model of negligible compute, workers: {num_workers}, of 1 microbatch of 2, `stepped`."
    yield "A round with its records, median and quartiles. Of all cores: the mean of their times."
    yield "The bare loop has no report, quotas or order."
    yield f"Load at the end: {os.getloadavg()[0]:.1f}."


def _squares(params: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    del rng
    return (batch["x"] @ params - batch["y"]) ** 2
