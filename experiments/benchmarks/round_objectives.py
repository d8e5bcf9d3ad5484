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
from experiments.benchmarks.rows import Row
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
        result = hetjax.fit(
            _loss,
            np.zeros(1),
            optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5)),
            data,
            microbatch_size=_SIZE,
            budget=_BUDGET,
            epochs=1,
            callbacks=[lambda report: report.round == _ROUNDS - 2],  # ends one round later
            progress=False,
            **{**asked, **fields},
        )
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


def objective_rows() -> list[Row]:
    """Where each combination's minimum is and where a run ends, worst over reducers and gates."""
    rows, groups = [], {}
    for line in lines():
        kind = SUMS if line.reducer in SUMS else GOSSIPS
        groups.setdefault((line.sharing, line.weighting, kind), []).append(line)
    for (sharing, weighting, reducers), members in groups.items():
        expected = {line: closed_form(line) for line in members}
        gaps = [abs(reached(line) - expected[line]) for line in members]
        of_gate = {line.gate: f"{expected[line]:.6f}" for line in members}
        forms = ", ".join(of_gate.values()) if len(set(of_gate.values())) > 1 else of_gate["none"]
        gates = ", ".join(of_gate)
        rows.append(
            Row(
                f"{sharing} data, weighting={weighting}; {', '.join(reducers)}; gates {gates}: "
                f"closed form; greatest gap of {len(members)} runs",
                "≤ 1e-6",
                f"{forms}; {max(gaps):.1e}",
            )
        )
    return rows


def random_rows(num_seeds: int = 3) -> list[Row]:
    """As users have it: examples in random order, in small rounds that differ in weight.

    A round's gradient is a ratio, and rounds count alike: what is left is the mean of such ratios,
    which tends to the minimum as rounds grow. `scaled` are losses times weights over the mean
    weight of the data set, without weights: a mean, and no ratio.
    """
    c = np.random.default_rng(0).normal(size=800)
    data = {"c": c, "w": np.exp(-c).round(2)}  # much weight where c is low
    pooled = float(data["w"] @ c / data["w"].sum())
    rows = []
    for sharing, reducer in itertools.product(("shared", "private"), ("all_reduce", "d_psgd")):
        has_parts = sharing == "private" or reducer in GOSSIPS
        arms = ("shard", "shard_mean", "scaled") if has_parts else ("shard", "scaled")
        ends = {
            arm: [_random_end(data, num_seeds, sharing, reducer, arm, size) for size in (2, 16)]
            for arm in arms
        }
        rows.append(
            Row(
                f"800 examples in random order, weights {data['w'].min():g} to "
                f"{data['w'].max():g}, {sharing} data, {reducer}: minimum over all the weight; "
                f"ends of {num_seeds} seeds and their standard error, 16 and 128 examples a round",
                "none",
                f"{pooled:.3f}; {'; '.join(f'{arm} {e[0]}, {e[1]}' for arm, e in ends.items())}",
            )
        )
    return rows


def _random_end(data: Any, num_seeds: int, sharing: str, reducer: str, arm: str, size: int) -> str:
    """Mean and standard error over seeds of where runs of 200 rounds end, step 0.05."""
    mean_weight = data["w"].mean()

    def scaled(params: Any, batch: Any, rng: Any) -> Any:
        losses, weights = _loss(params, batch, rng)
        return losses * weights / mean_weight

    ends = []
    for seed in range(num_seeds):
        with float64():
            result = hetjax.fit(
                scaled if arm == "scaled" else _loss,
                np.zeros(1),
                optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.05)),
                data,
                seed=seed,
                microbatch_size=size,
                budget=_BUDGET,
                epochs=200 * _BUDGET * size // 800,
                data={"sharing": sharing, "weighting": "shard" if arm == "scaled" else arm},
                reducer={"name": reducer},
                quota={"policy": "static", "proportions": (4, 2, 1, 1)},
                cluster={"num_workers": _WORKERS},
                local="virtual",
                progress=False,
            )
        ends.append(float(result.params[0]))
    return f"{np.mean(ends):.3f} ± {np.std(ends, ddof=1) / num_seeds**0.5:.3f}"
