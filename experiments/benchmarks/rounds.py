"""How fast are rounds that close early? Prints their table.

    python -m experiments.benchmarks.rounds [--only=throughput,together,overhead]

experiments/results/rounds/README.md keeps the table; its rows of training are those of
`experiments.compare`.
"""

import contextlib
import statistics
import time
from typing import Any

from absl import app, flags, logging

import hetjax
from experiments import command_line
from experiments.benchmarks.rows import Row, print_tables

_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.")


def _tiny(num_workers: int, **fields: Any) -> dict[str, Any]:
    """Summary of a run of a logistic regression with 8 microbatches a worker and round."""
    import optax

    from experiments import problems

    num_rounds, size = fields.pop("num_rounds", 24), 4
    loss_fn, params = problems.classifier("logistic", (8, 8, 1), input_max=16.0)
    budget = 8 * num_workers
    result = hetjax.fit(
        loss_fn,
        params,
        optax.sgd(0.01),
        problems.images(budget * size * num_rounds, (8, 8, 1)),
        epochs=1,
        microbatch_size=size,
        budget=budget,
        progress=False,
        **{"quota": {"policy": "equal"}, "local": "virtual", **fields},
    )
    # The last rounds of the epoch are smaller: their time and work are left out.
    full = [line for line in result.history if sum(line["quotas"]) == budget]
    if sum(result.history[-1]["quotas"]) == budget:  # no gate closes the last one
        full = full[:-1]
    done = sum(sum(line["microbatches_done"]) for line in full)
    secs = sum(line["round_secs"] for line in full)
    return {"throughput": done / secs, "full_rounds": len(full), **result.summary}


def throughput_rows() -> list[Row]:
    """`first` over blocking rounds on the virtual clock, and against the simulator."""
    rows = []
    for num_workers in (4, 8):
        speeds = (0.01,) * (num_workers - 1) + (0.04,)
        cluster = {"secs_per_microbatch": speeds, "clock": "virtual"}
        plain = _tiny(num_workers, cluster=cluster)
        first = _tiny(num_workers, cluster=cluster, gate={"trigger": "first"})
        ratio = first["throughput"] / plain["throughput"]
        bound = ((num_workers - 1) * 4 + 1) / num_workers
        rows.append(
            Row(
                f"one worker 4x slower, constant speeds, M = 8, n = {num_workers}, virtual clock: "
                "throughput with first over blocking; share of ((n-1)s+1)/n",
                "≥ 97 %",
                f"{ratio:.3f}; {ratio / bound:.1%} of {bound:.3f}",
            )
        )
    for delay in ("shifted_exponential", "exponential"):
        gains = []
        for num_workers in (4, 8, 16, 32, 64):
            cluster = {**_delayed(num_workers, 0.01), "delay": delay}
            plain, first = (_simulated(cluster, name, 2000) for name in ("none", "first"))
            gains.append(f"{first / plain:.2f}")
        rows.append(
            Row(
                "where 2x is reached: first over blocking in the simulator, delays "
                f"{delay} a round, "
                "M = 8, n = 4, 8, 16, 32, 64",
                "none (published: 2x)",
                ", ".join(gains),
            )
        )
    return rows


def _delayed(num_workers: int, secs: float, **fields: Any) -> dict[str, Any]:
    return {
        "secs_per_microbatch": (secs,) * num_workers,
        "delay": "shifted_exponential",
        "delay_per": "round",
        **fields,
    }


def _simulated(cluster: dict[str, Any], trigger: str, num_rounds: int) -> float:
    """Microbatches a second of the simulator, the same delays, no communication."""
    from hetjax import simulate
    from hetjax.cluster import emulate

    emulated = emulate.EmulatedCluster(**cluster)
    budget = 8 * emulated.num_workers
    found = simulate.simulate("equal", emulated, budget=budget, num_rounds=num_rounds, gate=trigger)
    return found.microbatches_per_sec


def together_rows() -> list[Row]:
    """Quotas and gate together, on unequal workers that are held up at random."""
    speeds = tuple(0.01 * s for s in (1, 1, 1.5, 1.5, 2, 2, 4, 4))
    cluster = {**_delayed(8, 0.01), "secs_per_microbatch": speeds, "clock": "virtual"}
    arms = {
        "neither": {},
        "quotas": {"quota": {"policy": "adaptive"}},
        "gate": {"gate": {"trigger": "first"}},
        "both": {"quota": {"policy": "adaptive"}, "gate": {"trigger": "first"}},
    }
    seeds = range(3)
    found = {
        name: [
            _tiny(8, cluster=cluster, num_rounds=120, seed=seed, **fields)["throughput"]
            for seed in seeds
        ]
        for name, fields in arms.items()
    }
    over = {
        name: [a / b for a, b in zip(v, found["neither"], strict=True)] for name, v in found.items()
    }
    texts = [
        f"{name} {statistics.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})"
        for name, v in over.items()
    ]
    return [
        Row(
            "n = 8, speeds 1 to 4 and delays Exp(mean one round's compute), virtual clock, three "
            "seeds: throughput over blocking equal split",
            "both above each alone",
            "; ".join(texts),
        )
    ]


def overhead_rows(num_rounds: int = 150) -> list[Row]:
    """A round with a gate that has nothing to close, against one without; LeNet, in turn."""
    import optax

    from experiments import problems
    from experiments.benchmarks import quota_overhead

    loss_fn, params = problems.classifier("lenet", (32, 32, 3), input_max=255.0)
    data = problems.images(32 * 16 * 20, (32, 32, 3))
    fields = {
        "epochs": 1_000_000,
        "microbatch_size": 32,
        "budget": 16,
        "cluster": {"num_workers": 4},
        "quota": {"policy": "equal"},
    }
    gates = {
        "none": {},
        "quorum": {"gate": {"trigger": "quorum", "quorum": 16}},
        "deadline": {"gate": {"trigger": "deadline", "deadline_secs": 60.0}},
        "none again": {},
    }
    secs: dict[str, list[float]] = {name: [] for name in gates}
    with contextlib.ExitStack() as stack:
        loops = {
            name: stack.enter_context(
                quota_overhead.Rounds(loss_fn, params, optax.sgd(0.01), data, **fields, **gate)
            )
            for name, gate in gates.items()
        }
        for turn in range(num_rounds + 5):
            names = list(loops)
            for name in names[turn % 4 :] + names[: turn % 4]:
                began = time.perf_counter()
                loops[name]()
                if turn >= 5:
                    secs[name].append(time.perf_counter() - began)
    texts = []
    for name in ("quorum", "deadline", "none again"):
        ratio, low, high = quota_overhead.ratio_of(secs[name], secs["none"])
        texts.append(f"{name} {ratio:.3f} ({low:.3f} to {high:.3f})")
    return [
        Row(
            "LeNet, 4 workers of 4 microbatches of 32, nothing slow: round with a gate over one "
            f"without, medians of {num_rounds} interleaved rounds, 95 % interval",
            "≤ 1.02",
            f"{'; '.join(texts)}; without {statistics.median(secs['none']) * 1e3:.1f} ms",
        )
    ]


GROUPS = {"throughput": throughput_rows, "together": together_rows, "overhead": overhead_rows}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, but {argv[1:]} were given.")
    logging.set_verbosity(logging.WARNING)
    hetjax.use_cpu_workers(8)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
