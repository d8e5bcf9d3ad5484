"""The figures of bilevel problems in rounds, gates and gossip.

    python -m experiments.benchmarks.bilevel [--only=gates,gossip]

The cleaning of labels is that of the digits, on the virtual clock. The tables are kept
in experiments/results/bilevel/rounds.md.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from absl import flags

import hetjax
import hetjax.quota
from experiments import command_line
from experiments.benchmarks.rows import Found, Row, around, middle, print_tables
from experiments.bilevel import cleaning, models, settings
from experiments.bilevel import data as data_lib
from hetjax import bilevel, simulate
from hetjax.bilevel import PerExample
from hetjax.cluster import emulate

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def _cleaning(seed: int) -> tuple[settings.CleaningConfig, data_lib.Data]:
    config = settings.CleaningConfig(seed=seed)
    return config, data_lib.make(config.data, seed)


def _fit(seed: int, outer_steps: int = 60, **fields: Any) -> hetjax.BilevelResult:
    config, data = _cleaning(seed)
    y = models.init(config.model, data.train.images.shape[1], data.num_classes, seed)
    options: dict[str, Any] = {
        "local": "virtual",
        "microbatch_size": 10,
        "loss_over": "microbatch",
        "progress": False,
        "eval_every": outer_steps,
        "seed": seed,
        **fields,
    }
    return hetjax.fit_bilevel(
        cleaning.make_problem_of_rows(config.lower.ridge),
        PerExample(np.zeros(len(data.train.labels), np.float32)),
        y,
        bilevel.value_gap(bilevel.descent(optax.sgd(0.5)), 5, multiplier=1.0),
        optax.adam(0.1),
        upper_source=data.validation,
        lower_source=data.train,
        outer_steps=outer_steps,
        eval_source=data.validation,
        **options,
    )


def _smooth(result: hetjax.BilevelResult, width: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, F) at the end of each step, F as a mean of the last few."""
    losses = np.array([line["upper_loss"] for line in result.history])
    kernel = np.ones(width) / width
    means = np.convolve(np.pad(losses, (width - 1, 0), mode="edge"), kernel, mode="valid")
    secs = np.array([line["start_secs"] + line["step_secs"] for line in result.history])
    return secs, means


def _secs_to(result: hetjax.BilevelResult, loss: float) -> float:
    secs, losses = _smooth(result)
    return float(secs[losses <= loss][0]) if np.any(losses <= loss) else float("nan")


def gate_rows(num_workers: int = 8, budget: int = 32) -> Found:
    """Eight workers with exponential times, drawn each round: requests wait, or close.

    No gate closes a round that ends a pass over the data: the fewer of them, the more it is worth.
    """
    delays = {"delay": "exponential", "delay_per": "round"}
    cluster = emulate.EmulatedCluster((0.01,) * num_workers, 0.0, seed=0, **delays)
    simulated = {
        gate: simulate.simulate("equal", cluster, budget=budget, num_rounds=2000, gate=gate)
        for gate in ("none", "first")
    }
    told = simulated["first"].microbatches_per_sec / simulated["none"].microbatches_per_sec
    fields: dict[str, Any] = {
        "cluster": {
            "num_workers": num_workers,
            "secs_per_microbatch": (0.01,) * num_workers,
            **delays,
            "clock": "virtual",
        },
        "quota": "equal",
        "budget": budget,
    }
    for size in (2, 4, 10):
        yield from _gate_rows(size, told, budget * size, {**fields, "microbatch_size": size})
    yield "Value gap with gate `first`, 8 workers whose times are exponential, drawn each round."
    yield "Requests of so many of 600 or 400 examples. Faster: time to the same F without the gate."
    yield f"Of the simulator's gain: of its ratio of examples a second, {told:.2f}."
    yield "No gate closes a round that ends a pass."
    yield "Bias: the weights' mean distance from those of whole batches, after 120 outer steps."


def _gate_rows(size: int, told: float, num_examples: int, fields: dict[str, Any]) -> Iterator[Row]:
    ratios, biases, waited = [], [], []  # of each seed
    for seed in range(3):
        waits = _fit(seed, 120, **fields)
        closes = _fit(seed, 240, gate={"trigger": "first"}, **fields)
        target = 1.02 * _smooth(waits)[1][-1]
        ratios.append(_secs_to(waits, target) / _secs_to(closes, target))
        new = [line for line in closes.rounds if line["is_new"]]
        waited.append(np.mean([line["microbatches_done"] == line["quotas"] for line in new]))
        exact = _weights(_fit(seed, 120, workers=8, quota="equal", microbatch_size=size))
        both = waits, _fit(seed, 120, gate={"trigger": "first"}, **fields)
        biases.append([float(np.mean(abs(_weights(r) - exact))) for r in both])
    name = f"requests of {num_examples}"
    yield Row(f"{name}: faster with the gate", "none", middle(ratios), len(ratios))
    part = f"{statistics.median(ratios) / told:.0%}"
    yield Row(f"{name}: of the simulator's gain", "≥ 90 %", part, len(ratios))
    part = f"{statistics.median(waited):.0%}"
    yield Row(f"{name}: rounds that no gate closed", "none", part, len(ratios))
    reached = "; ".join(f"{a:.3f}, {b:.3f}" for a, b in biases)
    yield Row(f"{name}: bias without, with a gate", "none", reached, len(biases))


def _weights(result: hetjax.BilevelResult) -> np.ndarray:
    return np.asarray(jax.nn.sigmoid(result.x))


def gossip_rows() -> Found:
    """F of the mean replica at equal examples, against all-reduce's, three seeds."""
    reducers: dict[str, Any] = {
        "all_reduce": "all_reduce",
        "d_psgd": {"name": "d_psgd", "graph": "ring"},
        "matcha": {"name": "matcha", "graph": "ring", "budget": 0.5},
    }
    found: dict[str, list[float]] = {}
    for name, reducer in reducers.items():
        for seed in range(3):
            result = _fit(seed, 60, reducer=reducer, workers=4, quota="equal", budget=20)
            found.setdefault(name, []).append(result.summary["test_loss"])
    base = found.pop("all_reduce")
    spread = statistics.stdev(base)
    for name, losses in found.items():
        gap = statistics.mean(losses) - statistics.mean(base)
        reached = f"{around(losses)} against {around(base)}"
        yield Row(f"{name}: F, against all-reduce's", "none", reached, len(losses))
        yield Row(f"{name}: difference over the spread", "within 1", f"{gap / spread:+.2f}")
    yield "Value gap, 4 workers on a ring, F at equal examples; matcha has half of the links."
    yield "The spread is the standard deviation of all-reduce's."


def main() -> None:
    hetjax.use_cpu_workers(8)
    print_tables({"gates": gate_rows, "gossip": gossip_rows}, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
