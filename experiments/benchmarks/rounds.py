"""How fast are rounds that close early?

    python -m experiments.benchmarks.rounds [--only=throughput,together,overhead]

experiments/results/rounds/README.md keeps the tables; its rows of training are those of
`experiments.compare`.
"""

import contextlib
import statistics
from typing import Any

from absl import flags, logging

import hetjax
from experiments import command_line
from experiments.benchmarks.rows import Found, Row, print_tables

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


def throughput_rows() -> Found:
    """`first` over blocking rounds on the virtual clock, and against the simulator."""
    for num_workers in (4, 8):
        speeds = (0.01,) * (num_workers - 1) + (0.04,)
        cluster = {"secs_per_microbatch": speeds, "clock": "virtual"}
        plain = _tiny(num_workers, cluster=cluster)
        first = _tiny(num_workers, cluster=cluster, gate={"trigger": "first"})
        ratio = first["throughput"] / plain["throughput"]
        bound = ((num_workers - 1) * 4 + 1) / num_workers
        yield Row(f"first over blocking, n = {num_workers}", "none", f"{ratio:.3f}")
        name = f"of ((n-1)s+1)/n = {bound:.3f}, n = {num_workers}"
        yield Row(name, "≥ 97 %", f"{ratio / bound:.1%}")
    yield "One worker 4x slower, constant speeds, M = 8, virtual clock: microbatches a second."
    for delay in ("shifted_exponential", "exponential"):
        gains = []
        for num_workers in (4, 8, 16, 32, 64):
            cluster = {**_delayed(num_workers, 0.01), "delay": delay}
            plain, first = (_simulated(cluster, name, 2000) for name in ("none", "first"))
            gains.append(f"{first / plain:.2f}")
        yield Row(f"{delay}: n = 4, 8, 16, 32, 64", "none", ", ".join(gains))
    yield "By delays: first over blocking in the simulator, a delay a round; published is 2x."


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


def together_rows() -> Found:
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
    for name, values in found.items():
        over = [a / b for a, b in zip(values, found["neither"], strict=True)]
        reached = f"{statistics.mean(over):.2f} ({min(over):.2f} to {max(over):.2f})"
        target = "above each alone" if name == "both" else "none"
        yield Row(f"{name}: over blocking equal split", target, reached, len(seeds))
    yield "Microbatches a second: n = 8, speeds 1 to 4, delays Exp(mean one round's compute)."
    yield "Virtual clock; mean over seeds."


def overhead_rows(num_rounds: int = 150) -> Found:
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
    with contextlib.ExitStack() as stack:
        loops = {
            name: stack.enter_context(
                quota_overhead.Rounds(loss_fn, params, optax.sgd(0.01), data, **fields, **gate)
            )
            for name, gate in gates.items()
        }
        secs = quota_overhead.in_turn(loops, num_rounds)
    for name in ("quorum", "deadline", "none again"):
        ratio, low, high = quota_overhead.ratio_of(secs[name], secs["none"])
        reached = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        yield Row(f"{name}: round over one without", "≤ 1.02", reached, num_rounds)
    reached = f"{statistics.median(secs['none']) * 1e3:.1f} ms"
    yield Row("a round without a gate", "none", reached, num_rounds)
    yield "LeNet, 4 workers of 4 microbatches of 32, nothing slow; in turn, 95 % interval."


GROUPS = {"throughput": throughput_rows, "together": together_rows, "overhead": overhead_rows}


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    hetjax.use_cpu_workers(8)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
