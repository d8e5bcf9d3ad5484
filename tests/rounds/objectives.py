"""What is minimised, in each combination of data, weighting, reducer and gate, in closed form.

The mean of the replicas has a closed form at any step, graph and draw where all workers have the
same curvature. So example i of weight w_i has the linear loss -c_i x, and the optimiser's weight
decay adds x² / 2: with weights alone the minimum is at `sum_i w_i c_i / sum_i w_i`.
"""

import contextlib
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import hetjax
from hetjax.data import stream as stream_lib
from hetjax.ordering import orders

SUMS = ("all_reduce", "ring")
GOSSIPS = ("d_psgd", "matcha")
WEIGHTINGS = ("shard", "example", "shard_mean")
GATES = ("none", "first", "quorum", "deadline")
_SIZE, _BUDGET, _WORKERS, _ROUNDS = 2, 8, 4, 48

# Of each kind of microbatch the weights and the c of its two examples: the heavy ones lie low.
_WEIGHTS = np.array([[8.0, 4.0], [1.0, 3.0], [2.0, 0.0], [1.0, 0.5]])
_CENTRES = np.array([[-1.0, -0.5], [0.5, 1.0], [0.25, 3.0], [2.0, -1.0]])


class Line(NamedTuple):
    """One combination."""

    sharing: str
    weighting: str
    reducer: str
    gate: str


class Schedule(NamedTuple):
    """Who does how much in each round; the gates close every round in the same way."""

    proportions: tuple[int, ...]
    secs_per_microbatch: tuple[float, ...]
    options: dict[str, dict[str, float]]  # of the gates
    quotas: dict[str, tuple[int, ...]]  # by gate
    done: dict[str, tuple[int, ...]]


# Shared data: workers 0 and 1 together do as much as 2 and 3, so each round can hold two kinds.
_SHARED = Schedule(
    (3, 1, 3, 1),
    (1.0, 2.0, 1.0, 2.0),
    {"quorum": {"quorum": 4}, "deadline": {"deadline_secs": 1.0}},
    dict.fromkeys(GATES, (3, 1, 3, 1)),
    {"none": (3, 1, 3, 1), "first": (2, 1, 2, 1), "quorum": (2, 1, 2, 1), "deadline": (1,) * 4},
)
# Private data: shards 3 : 1 : 2 : 2, of which nobody does as much as it holds.
_PRIVATE = Schedule(
    (3, 1, 2, 2),
    (0.5, 1.0, 2.0, 0.6),
    {"quorum": {"quorum": 3}, "deadline": {"deadline_secs": 1.2}},
    {gate: (1, 3, 1, 3) if gate == "none" else (3, 1, 2, 2) for gate in GATES},
    {
        "none": (1, 3, 1, 3),
        "first": (2, 1, 1, 2),
        "quorum": (2, 1, 1, 2),
        "deadline": (3, 1, 1, 2),
    },
)


def lines() -> Iterator[Line]:
    """All combinations; shared data whose gradients are summed has no parts to weigh."""
    for line in itertools.product(("shared", "private"), WEIGHTINGS, SUMS + GOSSIPS, GATES):
        line = Line(*line)
        if line.sharing == "private" or line.reducer in GOSSIPS or line.weighting == "shard":
            yield line


def closed_form(line: Line) -> float:
    """Where the line's objective has its minimum.

    With gossip and `example` the loss counts in proportion to the examples that a round did, as
    against the weight decay, which does not.
    """
    schedule = _schedule(line)
    done, share = np.array(schedule.done[line.gate], float), _stream(line).shares
    gradients, weights = (_WEIGHTS * _CENTRES).mean(axis=1), _WEIGHTS.mean(axis=1)
    if line.sharing == "shared":  # as many of either kind, and each worker does both
        share, done_of_kind = np.full(2, 0.5), np.full(2, done.sum() / 2)
        gradients, weights = gradients[:2], weights[:2]
    else:
        done_of_kind = done
    if line.weighting == "shard_mean":
        return float(share @ (gradients / weights))
    if line.weighting == "shard":
        return float(share @ gradients / (share @ weights))
    part_of_round = done.sum() / _BUDGET if line.reducer in GOSSIPS else 1.0
    return float(part_of_round * (done_of_kind @ gradients) / (done_of_kind @ weights))


def reached(line: Line, **fields: Any) -> float:
    """Where `hetjax.fit` ends in float64: the mean of the replicas."""
    schedule = _schedule(line)
    kinds = _kinds(line)
    data = {"c": _CENTRES[kinds[:, 0], kinds[:, 1]], "w": _WEIGHTS[kinds[:, 0], kinds[:, 1]]}
    asked = {
        "data": {"sharing": line.sharing, "weighting": line.weighting},
        "reducer": {"name": line.reducer},
        "quota": {"policy": "static", "proportions": schedule.proportions},
        "gate": {"trigger": line.gate, **schedule.options.get(line.gate, {})},
        "cluster": {
            "num_workers": _WORKERS,
            "secs_per_microbatch": schedule.secs_per_microbatch,
            "clock": "virtual",
        },
        "local": "virtual",
    }
    with tempfile.TemporaryDirectory() as directory, float64():
        if line.gate == "none":
            trace = {"quotas": schedule.quotas["none"], "microbatches_done": schedule.done["none"]}
            path = pathlib.Path(directory) / "trace.jsonl"
            path.write_text(f"{json.dumps(trace)}\n" * (_ROUNDS + 1))
            asked["replay"] = str(path)
        asked |= {"microbatch_size": _SIZE, "budget": _BUDGET, "epochs": 1, "progress": False}
        asked["callbacks"] = [lambda report: report.round == _ROUNDS - 2]  # ends one round later
        optimizer = optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5))
        result = hetjax.fit(_loss, np.zeros(1), optimizer, data, **{**asked, **fields})
    for report in result.history:
        expected = [*schedule.quotas[line.gate]], [*schedule.done[line.gate]]
        assert (report["quotas"], report["microbatches_done"]) == expected, report
    return float(result.params[0])


def _loss(params: Any, batch: Any, rng: Any) -> Any:
    del rng
    return -batch["c"] * params[0], batch["w"]


def _schedule(line: Line) -> Schedule:
    return _SHARED if line.sharing == "shared" else _PRIVATE


def _stream(line: Line) -> stream_lib.Stream:
    """As the run will make it: longer than the run."""
    common = {"microbatch_size": _SIZE, "ordering": orders.random_reshuffling(), "seed": 0}
    size = _SIZE * _BUDGET * (_ROUNDS + 2)
    if line.sharing == "shared":
        return stream_lib.SharedStream(size, _WORKERS, **common)
    proportions = _PRIVATE.proportions
    return stream_lib.PrivateStream(4 * size, _WORKERS, proportions=proportions, **common)


def _kinds(line: Line) -> np.ndarray:
    """i64[N, 2]: each example's kind of microbatch, and which of its two examples it is.

    Private data: worker j's shard is of kind j. Shared data: kinds 0 and 1, which workers 0 and 1
    and workers 2 and 3 do in turn, so each round holds as much of either.
    """
    schedule, stream = _schedule(line), _stream(line)
    kinds = np.zeros((stream.num_examples, 2), int)
    quotas, done = (np.array(x[line.gate]) for x in (schedule.quotas, schedule.done))
    state = stream.init()
    for index in range(_ROUNDS + 1):
        plan = stream.plan(state, quotas)
        for worker, count in enumerate(done):
            ids = plan.microbatches(worker, count)
            kinds[ids, 0] = worker if line.sharing == "private" else (worker // 2 + index) % 2
            kinds[ids, 1] = np.arange(_SIZE)
        state = stream.commit(state, plan, done)
    return kinds


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """64-bit numbers, in all threads."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
