"""Is an array form of its own faster on one device than `jax.vmap` of the collective one?"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.rows import Row
from hetjax import mesh as mesh_lib
from hetjax import topology, trees
from hetjax.ordering import balance

_AXIS, _SIZE, _WORKERS = mesh_lib.WORKER_AXIS, 50_000, (4, 16, 64)
_LONG = 330_000  # numbers a worker, where a sum has another form


def _times(array: Callable, mapped: Callable, *arguments: Any) -> str:
    """Processor time of a call of either, in turn, medians; and whether the results are equal."""
    calls = [jax.jit(call) for call in (array, mapped)]
    results = [jax.device_get(call(*arguments)) for call in calls]
    same = all(jax.tree.leaves(jax.tree.map(np.array_equal, *results)))
    secs: list[list[float]] = [[], []]
    for _ in range(9):
        for call, values in zip(calls, secs, strict=True):
            began = time.process_time()
            jax.block_until_ready(call(*arguments))
            values.append(time.process_time() - began)
    own, other = (1e3 * statistics.median(values) for values in secs)
    return f"{own:.2f} against {other:.2f}{', bit-equal' if same else ''}"


def array_form_rows() -> list[Row]:
    """Sums, the mixing of gossip, and the coordination of orders, by number of workers."""
    found: dict[str, list[str]] = {}
    for num_workers in _WORKERS:
        noise, facts = np.random.default_rng(0), topology.Facts(num_workers)
        rows = jnp.asarray(noise.standard_normal((num_workers, _SIZE)), jnp.float32)
        for name in ("all_reduce", "ring"):
            if name == "ring" and num_workers > 16:  # its program takes minutes to compile
                continue
            reducer = topology.REDUCERS[name]().for_run(facts)
            mapped = jax.vmap(lambda x, r=reducer: r.collective(x, _AXIS), axis_name=_AXIS)
            found.setdefault(f"sum, {name}, {_SIZE}", []).append(
                _times(reducer.array, mapped, rows)
            )
            if name == "all_reduce":
                long = jnp.tile(rows, -(-_LONG // _SIZE))[:, :_LONG]
                found.setdefault(f"sum, {name}, {_LONG}", []).append(
                    _times(reducer.array, mapped, long)
                )
        for graph in ("ring", "complete"):
            if graph == "complete" and num_workers > 16:
                continue
            mixing = topology.d_psgd(graph=graph).for_run(facts).mixing
            active = jnp.asarray(mixing.gossip.active(0))
            mapped = jax.vmap(
                lambda x, a, m=mixing: m.collective(x, a, _AXIS), (0, None), axis_name=_AXIS
            )
            mixed = _times(mixing.array, mapped, rows, active)
            found.setdefault(f"mixing, d_psgd, {graph}, {_SIZE}", []).append(mixed)
        common = jnp.broadcast_to(rows[:1], rows.shape)
        mapped = jax.vmap(lambda r, u: balance.coordinate(r, u, _AXIS), axis_name=_AXIS)
        coordinated = _times(_coordinate, mapped, common, rows)
        found.setdefault(f"coordination of an order, {_SIZE}", []).append(coordinated)
    return [
        Row(
            f"{name} numbers a worker, {', '.join(map(str, _WORKERS[: len(texts)]))} "
            "workers: own array form against `vmap` of the collective one, ms of processor time",
            "none",
            "; ".join(texts),
        )
        for name, texts in found.items()
    ]


def _coordinate(running_sum: jax.Array, signed_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    one, flips = balance.coordinate_array(trees.first_row(running_sum), signed_sum)
    return jnp.broadcast_to(one, running_sum.shape), flips
