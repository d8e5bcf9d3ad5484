"""What do the signs cost? Figures of `hetjax.ordering.balance` alone.

Exactness against a loop, the speed of the kernel on the default backend, and the bytes that the
compiled programs send. Needs eight CPU devices, see `hetjax.use_cpu_workers`.
"""

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from experiments.benchmarks.rows import Row
from hetjax import mesh as mesh_lib
from hetjax.ordering import balance

_AXIS = mesh_lib.WORKER_AXIS


def _loop(diffs: np.ndarray, running_sum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    signs = np.zeros(len(diffs), np.int8)
    for k, diff in enumerate(diffs):
        signs[k] = 1 if running_sum @ diff <= 0 else -1
        running_sum = running_sum + signs[k] * diff
    return signs, running_sum


def _diffs(kind: str, num_diffs: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Differences and a running sum; ties, zeros and low rank on integers, so exact."""
    rng = np.random.default_rng(seed)
    if kind == "random float64":
        return rng.standard_normal((num_diffs, size)), rng.standard_normal(size)
    rank = 3 if kind == "low rank" else size
    basis = np.eye(size) if rank == size else rng.integers(-2, 3, (rank, size)).astype(float)
    diffs = rng.integers(-1, 2, (num_diffs, rank)) @ basis
    if kind == "zeros":
        diffs[rng.random(num_diffs) < 0.5] = 0
    return diffs, np.zeros(size)


def _over_workers(body: Callable, num_workers: int) -> Callable:
    """`body` on rows of arguments `[W, ...]`, one a device."""

    def one(*args: Any) -> Any:
        outputs = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], outputs)

    mesh = mesh_lib.make_worker_mesh(num_workers, jax.devices("cpu"))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS)))


def _sharded(num_workers: int) -> Callable:
    """The sharded form on a whole sequence: the differences are dealt out and collected."""
    run = _over_workers(lambda x, r: balance.balance_sharded(x, r, _AXIS), num_workers)

    def signs_of(diffs: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shard = balance.shard_size(r.size, num_workers)
        shards = np.pad(r, (0, shard * num_workers - r.size)).reshape(num_workers, shard)
        dealt = np.swapaxes(diffs.reshape(-1, num_workers, r.size), 0, 1)
        signs, shards = run(dealt, shards)
        return np.asarray(signs).T.reshape(-1), np.asarray(shards).reshape(-1)[: r.size]

    return signs_of


def exactness_rows(num_cases: int = 20) -> list[Row]:
    """Signs that differ from the loop's, over all forms, in float64."""
    rows = []
    with jax.enable_x64(True):
        forms: dict[str, Callable] = {
            "chosen": jax.jit(balance.balance_signs),
            "scan": jax.jit(balance.balance_scan),
            "Gram": jax.jit(lambda x, r: balance.balance_gram(x, r, 16)),
        } | {f"n = {n}": _sharded(n) for n in (1, 2, 4, 8)}
        for kind in ("random float64", "ties", "zeros", "low rank"):
            wrong = dict.fromkeys(forms, 0)
            for seed in range(num_cases):
                diffs, r = _diffs(kind, 64, 1001, seed)
                expected, _ = _loop(diffs, r)
                for name, form in forms.items():
                    wrong[name] += int((np.asarray(form(diffs, r)[0]) != expected).sum())
            rows.append(
                Row(
                    f"signs that differ from the loop's, {kind}, {num_cases} cases of 64 "
                    f"differences, d = 1001: {', '.join(forms)} (n = 1 is PairBalance)",
                    "0",
                    ", ".join(map(str, wrong.values())),
                )
            )
    return rows


def _interleaved_secs(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each call, in turns; the first of each is left out."""
    secs: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:
                secs[name].append(time.perf_counter() - began)
    return {name: np.array(values) for name, values in secs.items()}


def _copy_in_place(size_bytes: int) -> Callable[[], jax.Array]:
    """Reads and writes an array; into the same memory, so that no page is new."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.zeros(size_bytes // 4, jnp.float32)]

    def call() -> jax.Array:
        held[0] = step(held[0])
        return held[0]

    return call


def kernel_rows(repeats: int = 9) -> list[Row]:
    """The chosen form on the default backend: bandwidth, and against each form alone."""
    device = jax.devices()[0].device_kind
    block = 4 if jax.default_backend() == "cpu" else 64
    rows = [
        bandwidth_row(repeats),
        Row(
            f"{device}: what the same moves and computes at least, scan; Gram, blocks of {block}",
            "",
            f"{_roofline(64, 10**6, 1)}; {_roofline(64, 10**6, block)}",
        ),
    ]
    for size, num_diffs in itertools.product((10**4, 6 * 10**4, 10**6, 5 * 10**6), (2, 16, 64)):
        if num_diffs * size <= 10**8:
            rows.append(_against_forms(device, num_diffs, size, repeats))
    return rows


def bandwidth_row(repeats: int, size: int = 10**6) -> Row:
    """The chosen form against copies of the same bytes, on the default backend."""
    device = jax.devices()[0].device_kind
    diffs, r = _on_device(64, size)
    chosen = jax.jit(balance.balance_signs)
    fresh_copy = jax.jit(lambda x: x + 1)
    secs = _interleaved_secs(
        {
            "chosen": lambda: chosen(diffs, r),
            "in place": _copy_in_place(diffs.nbytes),
            "to new memory": lambda: fresh_copy(diffs),
        },
        repeats,
    )
    reached = []
    for copy in ("in place", "to new memory"):
        ratio = np.median(secs[copy] / secs["chosen"]) / 2  # a copy moves each byte twice
        rate = 2 * diffs.nbytes / np.median(secs[copy]) / 1e9
        reached.append(f"{ratio:.0%} of a copy {copy} ({rate:.1f} GB/s)")
    chosen_secs = np.median(secs["chosen"])
    return Row(
        f"{device}: bytes of differences (each counted once) a second / bytes read and "
        f"written by a copy a second, d = {size:,}, K = 64, float32",
        "≥ 50 %",
        f"{', '.join(reached)}; kernel {diffs.nbytes / chosen_secs / 1e9:.1f} GB/s, "
        f"{chosen_secs * 1e3:.1f} ms",
    )


def _on_device(num_diffs: int, size: int) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(0), (num_diffs, size)), jnp.zeros(size)


def _roofline(num_diffs: int, size: int, block: int) -> str:
    """Least traffic and operations: a block reads its rows twice, and the sum twice."""
    num_blocks = num_diffs // block
    moved = 4 * size * (2 * num_diffs + 3 * num_blocks)
    # Gram matrix, inner products with the sum, and its update.
    operations = size * (2 * num_diffs * block * (block > 1) + 4 * num_diffs)
    return f"{moved / 1e9:.2f} GB, {operations / 1e9:.2f} G operations"


def _against_forms(device: str, num_diffs: int, size: int, repeats: int) -> Row:
    diffs, r = _on_device(num_diffs, size)
    forms: dict[str, Callable] = {
        "chosen": balance.balance_signs,
        "scan": balance.balance_scan,
        "Gram": balance.balance_gram,
        "Gram in one block": lambda x, r: balance.balance_gram(x, r, num_diffs),
    }
    if num_diffs * size > 10**7 and jax.default_backend() == "cpu":
        del forms["Gram in one block"]  # seconds
    if num_diffs * size < 10**7:
        repeats *= 10  # short ones, that anything else on the machine disturbs
    compiled = {name: jax.jit(form) for name, form in forms.items()}
    secs = _interleaved_secs(
        {name: lambda form=form: form(diffs, r) for name, form in compiled.items()}, repeats
    )
    others = [name for name in forms if name != "chosen"]
    ratios = {name: np.median(secs["chosen"] / secs[name]) for name in others}
    return Row(
        f"{device}: chosen form / each form alone, time, d = {size:,}, K = {num_diffs}: greatest",
        "≤ 1",
        f"{max(ratios.values()):.2f} ({np.median(secs['chosen']) * 1e3:.2f} ms; "
        + ", ".join(f"{name} {np.median(secs[name]) * 1e3:.2f} ms" for name in others)
        + ")",
    )


# Bytes that a worker sends for one byte of the operation's result, in a ring of n.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
}
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_SENT)})\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def bytes_sent(compiled_text: str, num_workers: int) -> float:
    """Bytes a worker sends in one call, by the ring model, read from a compiled program."""
    total = 0.0
    for result, operation in _COLLECTIVE.findall(compiled_text):
        for bits, shape in _ARRAY.findall(result):
            size = math.prod(int(length) for length in shape.split(",") if length)
            total += size * int(bits) / 8 * _SENT[operation](num_workers)
    return total


def wire_rows(size: int = 100_000) -> list[Row]:
    """Bytes of a round that balances over those of its gradients' all-reduce alone."""

    def reduce(grads: jax.Array) -> jax.Array:
        return jax.lax.psum(grads, _AXIS)

    def two_level(grads: jax.Array, r: jax.Array, u: jax.Array) -> tuple:
        return reduce(grads), balance.coordinate(r, u, _AXIS)

    def exact(grads: jax.Array, r: jax.Array, diffs: jax.Array) -> tuple:
        return reduce(grads), balance.balance_sharded(diffs, r, _AXIS)

    rows = []
    for n in (4, 8):

        def sent(body: Callable, *shapes: tuple, n: int = n) -> float:
            args = [jax.ShapeDtypeStruct((n, *shape), jnp.float32) for shape in shapes]
            return bytes_sent(_over_workers(body, n).lower(*args).compile().as_text(), n)

        alone = sent(reduce, (size,))
        assert alone == 8 * size * (n - 1) / n
        ratio = sent(two_level, (size,), (size,), (size,)) / alone
        rows.append(
            Row(
                f"two-level balancing and all-reduce / all-reduce alone, bytes, n = {n}, "
                f"d = {size:,}",
                f"≤ {2 + (n * n + n) / size:.5f}",
                f"{ratio:.5f}",
            )
        )
        for pairs in (1, 2, 4):
            shard = balance.shard_size(size, n)
            ratio = sent(exact, (size,), (shard,), (pairs, size)) / alone
            # The inner products of all pairs travel too.
            target = 1 + pairs / 2 + ((pairs * n) ** 2 + pairs * n) / size
            rows.append(
                Row(
                    f"exact balancing, {pairs} pairs a worker and round, and all-reduce / "
                    f"all-reduce alone, bytes, n = {n}, d = {size:,}",
                    f"≤ {target:.5f}",
                    f"{ratio:.5f}",
                )
            )
    return rows
