"""How fast are rounds that close early: throughput, wall clock, quotas and gate, overhead."""

import contextlib
import statistics
import time
from typing import Any

import hetjax
from experiments.benchmarks.rows import Row


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


def wall_rows() -> list[Row]:
    """`first` on the wall clock, against the simulator's throughput for the same delays."""
    rows = [_wall_row(*case) for case in ((8, 0.05), (4, 0.1), (8, 0.1))]
    speeds = (0.05,) * 7 + (0.2,)
    steady = {
        trigger: _tiny(
            8,
            cluster={"secs_per_microbatch": speeds},
            local="stepped",
            num_rounds=12,
            gate={"trigger": trigger},
        )["throughput"]
        for trigger in ("none", "first")
    }
    return [
        *rows,
        Row(
            "n = 8, one worker 4x slower, constant speeds: first over blocking; share of 3.625",
            "none (≥ 97 % on the virtual clock)",
            f"{steady['first'] / steady['none']:.2f}; "
            f"{steady['first'] / steady['none'] / 3.625:.1%}",
        ),
    ]


def _wall_row(num_workers: int, secs: float) -> Row:
    cluster = _delayed(num_workers, secs)
    real, simulated = {}, {}
    for trigger in ("none", "first"):
        gate = {"trigger": trigger}
        run = _tiny(num_workers, cluster=cluster, local="stepped", num_rounds=30, gate=gate)
        real[trigger] = run["throughput"]
        simulated[trigger] = _simulated(cluster, trigger, run["full_rounds"])
    gain, expected = (found["first"] / found["none"] for found in (real, simulated))
    shares = [f"{name} {real[name] / simulated[name]:.1%}" for name in real]
    return Row(
        f"n = {num_workers}, delays Exp(mean one round's compute), rounds of {secs * 8:.1f} s and "
        "delay, emulated on the wall clock: microbatches a second over the simulator's for the "
        "same delays; first over blocking",
        "≥ 95 %",
        f"{', '.join(shares)}; {gain:.2f} (simulator {expected:.2f})",
    )


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


def stream_rows(num_examples: int = 1 << 20, num_rounds: int = 520) -> list[Row]:
    """Host time of plan and commit: the order's placement, the ledger, the return to the head.

    Where all is done a pass has 512 rounds, so one of those measured ends a pass.
    """
    import numpy as np

    from hetjax.data import stream as stream_lib
    from hetjax.ordering import orders

    num_workers, budget, size = 4, 64, 32
    rng = np.random.default_rng(0)
    quotas = np.full(num_workers, budget // num_workers)
    draws = rng.choice([1, -1], (budget, size)).astype(np.int8)
    rows = []
    for sharing, kind in (
        ("shared", stream_lib.SharedStream),
        ("private", stream_lib.PrivateStream),
    ):
        reached = []
        for returns in (False, True):
            stream = kind(
                num_examples, num_workers, microbatch_size=size, ordering=orders.balanced(), seed=0
            )
            state, secs = stream.init(), []
            for _ in range(num_rounds):
                done = rng.integers(0, quotas + 1) if returns else quotas
                signs = [draws[:count] for count in done]
                began = time.perf_counter()
                plan = stream.plan(state, quotas)
                state = stream.commit(state, plan, done, signs)
                secs.append(time.perf_counter() - began)
            name = "a random part returns" if returns else "all is done"
            millis = np.percentile(secs, (50, 90)) * 1e3
            reached.append(f"{name} {millis[0]:.3f}, {millis[1]:.3f} ms")
            if not returns:
                last = secs[num_examples // (budget * size) - 1] * 1e3
        rows.append(
            Row(
                f"plan and commit of a round, {sharing} data, {num_examples:,} examples, balanced "
                f"order, {num_workers} workers, {budget} microbatches of {size}: median and 90th "
                f"percentile of {num_rounds} rounds; the round that ends the pass",
                "≤ 0.5 ms; none",
                f"{'; '.join(reached)}; {last:.0f} ms",
            )
        )
    return rows
