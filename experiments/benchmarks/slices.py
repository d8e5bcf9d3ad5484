"""What do workers of several devices cost beside plain JAX, what has each device, what is sent?

    python -m experiments.benchmarks.slices [--only=step,runs] [--turns=5] [--rounds=20]

`step`: one worker, whose four CPU devices hold a transformer of 3.3 million parameters by FSDP, and
Adam's state. Plain JAX makes one program of the same step, on the same examples, with the same
shardings. Rounds of both in turn; the medians of each turn are compared.

`runs`: a smaller one, trained in float64 for 50 rounds, on slices of several shapes, with unequal
quotas, in one process, in two, and apart. How far are the parameters from those of one device?
"""

import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hetjax
from experiments import command_line
from experiments.benchmarks import launched_runs, rows

_ONLY = flags.DEFINE_list("only", [], "Groups; by default all.")
_RUN = flags.DEFINE_string("run", None, "Of a process of `runs`: which of them.")
_LEAVES = flags.DEFINE_string("leaves", None, "The directory in which it leaves its files.")
_TURNS = flags.DEFINE_integer("turns", 5, "Pairs that are compared.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Of each turn.", 2)

_WAYS, _EXAMPLES, _LENGTH, _HEADS, _VOCABULARY = 4, 16, 64, 4, 256
_CUT = hetjax.slices.fsdp(min_size=1024)
_OPTIMIZER = optax.adam(1e-3)


def parameters(width: int = 256, blocks: int = 4) -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    def block() -> dict[str, np.ndarray]:
        dense = {name: normal(width, width) for name in ("q", "k", "v", "o")}
        return dense | {"up": normal(width, 4 * width), "down": normal(4 * width, width)}

    ends = {"embed": normal(_VOCABULARY, width), "out": normal(width, _VOCABULARY)}
    return ends | {"blocks": [block() for _ in range(blocks)]}


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    tokens = batch["tokens"]
    h = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool))
    for block in params["blocks"]:
        norm = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        heads = ((norm @ block[name]).reshape(*h.shape[:2], _HEADS, -1) for name in "qkv")
        q, k, v = heads
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        h = h + jnp.einsum("bhlm,bmhk->blhk", weights, v).reshape(h.shape) @ block["o"]
        h = h + jax.nn.gelu(h @ block["up"]) @ block["down"]
    log_chances = jax.nn.log_softmax(h @ params["out"])
    return -jnp.take_along_axis(log_chances, tokens[:, 1:, None], -1)[..., 0].mean(-1)


def examples(count: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(1).integers(_VOCABULARY, size=(count, _LENGTH + 1))
    return {"tokens": tokens.astype(np.int32)}


def plain(data: dict[str, np.ndarray]) -> Callable[[], Any]:
    """A step of plain JAX; what it returns is to be waited for."""
    mesh = jax.make_mesh((_WAYS,), ("data",), (AxisType.Auto,))

    def laid(tree: Any) -> Any:
        sizes = {"data": _WAYS}
        return jax.tree.map(lambda x: NamedSharding(mesh, _CUT("", np.shape(x), sizes)), tree)

    params = parameters()
    params = jax.device_put(params, laid(params))
    shapes = jax.eval_shape(_OPTIMIZER.init, params)
    state = jax.jit(_OPTIMIZER.init, out_shardings=laid(shapes))(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(loss_fn(p, batch, None)))(params)
        updates, state = _OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    places = laid(params), laid(state), NamedSharding(mesh, P())
    program = jax.jit(step, donate_argnums=(0, 1), out_shardings=places)
    held, done = [params, state], [0]

    def one() -> Any:
        start = done[0] * _EXAMPLES % len(data["tokens"])
        batch = {"tokens": data["tokens"][start : start + _EXAMPLES]}
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        *held[:], loss = program(*held, batch)
        done[0] += 1
        return loss

    return one


def timed(step: Callable[[], Any]) -> float:
    """The median of a turn's rounds, in seconds."""
    found = []
    for _ in range(_ROUNDS.value):
        began = time.perf_counter()
        jax.block_until_ready(step())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def step() -> rows.Found:
    count = _EXAMPLES * (_ROUNDS.value + 1) * (_TURNS.value + 2)
    data, fields = examples(count), {"shard": _CUT, "budget": 1, "microbatch_size": _EXAMPLES}
    given = loss_fn, parameters(), _OPTIMIZER, data
    with hetjax.Run(*given, slices={"data": _WAYS}, workers=1, **fields) as run:
        held = [run.init()]

        def ours() -> Any:
            held[0], _ = run.round(held[0])
            return held[0].train.params

        beside, over, of_plain = plain(data), [], []
        timed(ours), timed(beside)
        for _ in range(_TURNS.value):
            of_ours = timed(ours)
            of_plain.append(timed(beside))
            over.append(of_ours / of_plain[-1])
        yield rows.Row("a round over plain JAX's step", "≤ 1.15", rows.middle(over), _TURNS.value)
        yield rows.Row(f"bytes a device, {_WAYS} ways", "≤ .28", of_device(held[0].train))
    with hetjax.Run(*given, slices={"data": 2}, workers=2, **fields) as run:
        yield rows.Row("bytes a device, 2 ways", "≤ .55", of_device(run.init().train))
    size = sum(leaf.size for leaf in jax.tree.leaves(given[1])) / 1e6
    step_ms = 1e3 * statistics.median(of_plain)
    yield f"{size:.1f} million parameters; a step of plain JAX takes {step_ms:.0f} ms."
    yield "Bytes are of parameters and Adam's state, over those of a worker of one device."


def of_device(train: Any) -> str:
    """The share of parameters and optimiser's state that one device of a worker has."""
    leaves = jax.tree.leaves((train.params, train.opt_state))
    on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return f"{on_device / sum(leaf.nbytes // len(leaf) for leaf in leaves):.3f}"


def by_heads(path: str, shape: tuple[int, ...]) -> P:
    """Tensor parallel: whole heads, and what belongs to them."""
    columns, rows_ = P(None, "model"), P("model")
    kinds = dict.fromkeys(("q", "k", "v", "up", "out"), columns) | dict.fromkeys("o", rows_)
    return (kinds | {"down": rows_}).get(path.split(".")[-1], P())


def both(path: str, shape: tuple[int, ...]) -> P:
    """Tensor parallel, and the other axis of each matrix over `data`."""
    spec = [*by_heads(path, shape), None, None][: len(shape)]
    spec[spec.index(None)] = "data"
    return P(*spec)


class Arm(NamedTuple):
    """One of `runs`."""

    devices: tuple[int, ...] = (8,)  # of each process
    quotas: tuple[int, ...] = ()  # of each worker; (): adaptive
    slices: dict[str, int] = {}  # noqa: RUF012
    shard: Any = None
    runtime: str = "joined"


_FSDP, _TP, _BOTH = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
_RUNS = {
    "one device": Arm((1,), (9,)),
    "FSDP 2": Arm(quotas=(5, 1, 3, 0), slices=_FSDP, shard=_CUT),
    "FSDP 2, adaptive": Arm(slices=_FSDP, shard=_CUT),
    "TP 2": Arm(quotas=(5, 1, 3, 0), slices=_TP, shard=by_heads),
    "TP 2, adaptive": Arm(slices=_TP, shard=by_heads),
    "FSDP 2 x TP 2": Arm(quotas=(6, 3), slices=_BOTH, shard=both),
    "FSDP 2 x TP 2, adaptive": Arm(slices=_BOTH, shard=both),
    "FSDP 2, two processes": Arm((4, 4), (5, 1, 3, 0), _FSDP, _CUT),
    "TP 2, two processes": Arm((4, 4), (5, 1, 3, 0), _TP, by_heads),
    "apart, 1, 2 and 4 devices": Arm((1, 2, 4), (5, 1, 3), {"data": 0}, _CUT, "apart"),
}


def runs() -> rows.Found:
    directory = launched_runs.directory()
    variables = launched_runs.environment() | {"JAX_ENABLE_X64": "1"}
    found: dict[str, list[Any]] = {}
    for name, arm in _RUNS.items():
        count = len(arm.devices)
        launch = launched_runs.launch_command(count, (), f"--runtime={arm.runtime}")
        program = [sys.executable, "-m", "experiments.benchmarks.slices"]
        given = [f"--run={name}", f"--leaves={directory}"]
        subprocess.run([*launch, *program, *given], env=variables, check=True, stdout=sys.stderr)
        paths = [directory / f"{name}-{process}.npz" for process in range(count)]
        found[name] = [list(np.load(path).values()) for path in paths]
        (alone,) = found["one device"]
        if name != "one device":
            pairs = [(a, b) for own in found[name] for a, b in zip(own, alone, strict=True)]
            most = max(np.abs(a - b).max() for a, b in pairs)
            yield rows.Row(f"{name}: most", "≤ 1e-12", f"{most:.1e}")
    line = json.loads((directory / f"{name}-0.json").read_text())
    sent = line["bytes_sent"] / count / sum(leaf.nbytes for leaf in alone)
    yield rows.Row("apart: bytes a worker, over the parameters'", "≤ 2", f"{sent:.2f}")
    yield "The greatest difference of a number from that of one device, after 50 rounds of Adam."


def run_one(name: str, directory: str) -> None:
    """Of a process of `runs`: trains, and leaves the parameters and the last round's record."""
    arm, process = _RUNS[name], int(os.environ["HETJAX_PROCESS_ID"])
    hetjax.use_cpu_workers(arm.devices[process])
    hetjax.join_processes()
    params = jax.tree.map(np.float64, parameters(64, 2))
    fields: dict[str, Any] = {"budget": 9, "microbatch_size": 4, "epochs": 5}
    if arm.quotas:
        fields["quota"] = {"policy": "static", "proportions": arm.quotas}
    else:
        secs = (0.01, 0.02, 0.04, 0.08)[: 8 // math.prod(arm.slices.values())]
        fields["cluster"] = {"secs_per_microbatch": secs, "clock": "virtual"}
    if arm.slices:
        fields |= {"slices": arm.slices, "shard": arm.shard}
    result = hetjax.fit(
        loss_fn, params, _OPTIMIZER, examples(360), max_rounds=50, progress=False, **fields
    )
    path = f"{directory}/{name}-{process}"
    np.savez(path, *jax.tree.leaves(result.params))
    pathlib.Path(f"{path}.json").write_text(json.dumps(result.history[-1]))


def main() -> None:
    if _RUN.value:
        run_one(_RUN.value, _LEAVES.value)
    else:
        hetjax.use_cpu_workers(_WAYS)
        rows.print_tables({"step": step, "runs": runs}, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
