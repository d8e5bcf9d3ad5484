"""How good are rounds that close early, and gossip? Prints the tables that BUILD.md keeps.

    python -m experiments.benchmark_rounds [--only=GROUP,…] [--data_dir=DIR] [--jobs=2]

Groups: matcha, reductions, interleavings, throughput, together, overhead, wall, simulator,
training. `training` needs Fashion-MNIST in DIR; its runs leave their results in
experiments/rounds/runs and are not done again.
"""

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags, logging

import hetjax
from experiments.rows import Row, print_tables

_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of the data sets.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Training runs at a time.", 1)
_DIRECTORY = flags.DEFINE_string("directory", "experiments/rounds", "Of the training runs.")

BASE_MATCHINGS = (  # MATCHA's first base graph, 8 workers
    ((1, 5), (6, 7), (0, 4), (2, 3)),
    ((1, 7), (3, 6)),
    ((0, 1), (3, 7), (5, 6)),
    ((1, 2), (0, 7)),
    ((1, 3),),
)


def matcha_rows(num_graphs: int = 20) -> list[Row]:
    """The schedule's values on the base graph, and `matcha_direct` against it."""
    import numpy as np

    from hetjax import topology
    from hetjax.topology import graphs, mixing

    base = [np.array(m) for m in BASE_MATCHINGS]
    half, full = (topology.matcha_schedule(base, 8, b) for b in (0.5, 1.0))
    alpha, rho = mixing.constant_weights(np.concatenate(base), 8)
    rows = [
        Row(
            "MATCHA's base graph: lambda2 and rho at budget 0.5; rho at 1; plain alpha and rho",
            "0.561202, 0.6440; 0.6538; 0.285714, 0.653777",
            f"{half.lambda2:.6f}, {half.rho:.4f}; {full.rho:.4f}; {alpha:.6f}, {rho:.6f}",
        )
    ]
    budgets = [0.1 * k for k in range(1, 11)]
    cases = [(base, 8)]
    for seed in range(num_graphs):
        size = int(np.random.default_rng(seed).integers(6, 17))
        graph = graphs.random_graph(size, degree=4, seed=seed)
        cases.append((list(topology.decompose_matchings(graph.edges, size)), size))
    gains, worse = [], 0
    for index, (matchings, size) in enumerate(cases):
        for budget in budgets:
            plain = topology.matcha_schedule(matchings, size, budget)
            direct = topology.matcha_direct(matchings, size, budget)
            worse += direct.rho > plain.rho + 1e-12
            gains.append(1 - direct.rho / plain.rho)
            if index == 0 and budget == 0.5:
                at_half = direct.rho
    rows.append(
        Row(
            f"matcha_direct: budgets 0.1 to 1 of the base graph and {num_graphs} random ones where "
            "rho is above MATCHA's; rho at 0.5 of the base graph; rho lower by, mean and most",
            "0; 0.6329",
            f"{worse} of {len(gains)}; {at_half:.4f}; {statistics.mean(gains):.2%}, "
            f"{max(gains):.2%}",
        )
    )
    return rows


def reduction_rows() -> list[Row]:
    """Cases that a reducer must reduce to, and the mean that mixing keeps."""
    import numpy as np

    from hetjax import topology
    from hetjax.topology import graphs, reducers

    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(8, 100_000)).astype(np.float32)}
    mean = tree["w"].astype(np.float64).mean(axis=0)
    drift, rows = 0.0, []
    for name in ("d_psgd", "matcha", "matcha_direct"):
        for graph in graphs.GRAPHS:
            if name != "d_psgd" and graph == "one_peer_exponential":
                continue
            options = reducers.Options(num_workers=8, graph=graph)
            mixing = topology.REDUCERS[name](options).mixing
            mixed = tree
            for index in range(20):
                before = np.asarray(mixed["w"], np.float64).mean(axis=0)
                mixed = mixing.array(mixed, mixing.gossip.active(index))
                after = np.asarray(mixed["w"], np.float64).mean(axis=0)
                drift = max(drift, float(np.abs(after - before).max()))
    complete = topology.REDUCERS["d_psgd"](reducers.Options(num_workers=8, graph="complete"))
    all_equal = complete.mixing.array(tree, complete.mixing.gossip.active(0))["w"]
    matcha = topology.REDUCERS["matcha"](reducers.Options(num_workers=8, graph="torus"))
    nothing = np.zeros(len(matcha.mixing.gossip.partners), bool)
    kept = np.array_equal(matcha.mixing.array(tree, nothing)["w"], tree["w"])
    rows.append(
        Row(
            "mean of the parameters before and after a mixing step, float32, 8 workers, every "
            "graph and gossip reducer, 20 rounds: greatest difference",
            "≤ 1e-6",
            f"{drift:.1e}",
        )
    )
    rows.append(
        Row(
            "complete graph, one step: greatest distance from the mean; no exchange active: "
            "parameters as they were",
            "0 up to rounding; yes",
            f"{np.abs(np.asarray(all_equal, np.float64) - mean).max():.1e}; "
            f"{'yes' if kept else 'no'}",
        )
    )
    return rows


def interleaving_rows(count: int = 10_000) -> list[Row]:
    from experiments import round_interleavings

    found = [round_interleavings.random_run(seed) for seed in range(count)]
    rounds, missing, duplicated = (sum(column) for column in zip(*found, strict=True))
    return [
        Row(
            f"{count:,} random interleavings of gates, deaths, presence and quotas, two epochs "
            f"each ({rounds:,} rounds): examples lost, doubled; runs without an end",
            "0, 0; 0",
            f"{missing}, {duplicated}; 0",
        )
    ]


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
    cluster = _delayed(8, 0.05)
    real, simulated = {}, {}
    for trigger in ("none", "first"):
        gate = {"trigger": trigger}
        run = _tiny(8, cluster=cluster, local="stepped", num_rounds=30, gate=gate)
        real[trigger] = run["throughput"]
        simulated[trigger] = _simulated(cluster, trigger, run["full_rounds"])
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
    gain, expected = (found["first"] / found["none"] for found in (real, simulated))
    shares = [f"{name} {real[name] / simulated[name]:.1%}" for name in real]
    return [
        Row(
            "n = 8, delays Exp(mean one round's compute), rounds of 0.2 s and delay, emulated on "
            "the wall clock: microbatches a second over the simulator's for the same delays; "
            "first over blocking",
            "≥ 95 %",
            f"{', '.join(shares)}; {gain:.2f} (simulator {expected:.2f})",
        ),
        Row(
            "the same, one worker 4x slower, constant speeds: first over blocking; share of 3.625",
            "none (≥ 97 % on the virtual clock)",
            f"{steady['first'] / steady['none']:.2f}; "
            f"{steady['first'] / steady['none'] / 3.625:.1%}",
        ),
    ]


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
    import jax
    import optax

    from experiments import problems, quota_training

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
                quota_training.rounds_of(loss_fn, params, optax.sgd(0.01), data, **fields, **gate)
            )[0]
            for name, gate in gates.items()
        }
        for turn in range(num_rounds + 5):
            names = list(loops)
            for name in names[turn % 4 :] + names[: turn % 4]:
                began = time.perf_counter()
                loops[name]._round(turn)
                jax.block_until_ready(loops[name]._state)
                if turn >= 5:
                    secs[name].append(time.perf_counter() - began)
    texts = []
    for name in ("quorum", "deadline", "none again"):
        ratio, low, high = quota_training.ratio_of(secs[name], secs["none"])
        texts.append(f"{name} {ratio:.3f} ({low:.3f} to {high:.3f})")
    return [
        Row(
            "LeNet, 4 workers of 4 microbatches of 32, nothing slow: round with a gate over one "
            f"without, medians of {num_rounds} interleaved rounds, 95 % interval",
            "≤ 1.02",
            f"{'; '.join(texts)}; without {statistics.median(secs['none']) * 1e3:.1f} ms",
        )
    ]


def simulator_rows() -> list[Row]:
    """Seconds and memory of the simulator, each case a process of its own, start included."""
    gates = ("none", "first", "quorum", "deadline")
    policies = ("equal", "static", "proportional", "dead_band", "adaptive")
    cases = [
        *((10_000, policy, gates, "all_reduce", "ring") for policy in policies),
        (100_000, "equal", gates, "ring", "ring"),
        (100_000, "equal", gates, "d_psgd", "one_peer_exponential"),
        (1_000, "equal", ("none", "first"), "matcha", "ring"),
    ]
    rows = []
    for workers, policy, names, reducer, graph in cases:
        secs, peaks = [], []
        for gate in names:
            flags_of_case = {
                "workers": workers,
                "policies": policy,
                "gates": gate,
                "reducers": reducer,
                "graph": graph,
            }
            with tempfile.TemporaryDirectory() as directory:
                command = [sys.executable, "-m", "experiments.simulate", f"--directory={directory}"]
                command += [f"--{name}={value}" for name, value in flags_of_case.items()]
                began = time.monotonic()
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise RuntimeError(f"{' '.join(command)} failed")
            secs.append(time.monotonic() - began)
            peaks.append(usage.ru_maxrss / 1024**2)
        rows.append(
            Row(
                f"simulator, 100 rounds of {workers:,} workers (and 100 blocking ones to compare), "
                f"{policy}, {reducer}, {graph}; gates {', '.join(names)}",
                "< 60 s, < 4 GiB",
                f"{', '.join(f'{s:.1f}' for s in secs)} s; at most {max(peaks):.2f} GiB",
            )
        )
    return rows


RATES = (0.05, 0.1, 0.2)
TARGET_LOSS = 0.42


def training_rows() -> list[Row]:
    """Time to a training loss with and without a gate, for each reducer."""
    from experiments import comparison

    file = "configs/fashion_mnist_delays.py"
    data = [f"data.dir={_DATA_DIR.value}"] if _DATA_DIR.value else []
    rows = []
    for reducer in ("all_reduce", "d_psgd", "matcha"):
        texts = [f"{file} reducer.name={reducer} gate.trigger={g}" for g in ("none", "first")]
        arms = comparison.read_arms(texts, data)
        found = comparison.compare(
            arms,
            (0, 1, 2),
            pathlib.Path(_DIRECTORY.value),
            rates=RATES,
            target=TARGET_LOSS,
            jobs=_JOBS.value,
        )
        plain, gated = (arm.label for arm in arms)
        ratios = found.speedups(gated, plain)
        losses = [found.final_losses(label) for label in (plain, gated)]
        spread = max((max(v) - min(v)) / 2 for v in losses)
        means = [statistics.mean(v) for v in losses]
        comparison.draw(pathlib.Path(_DIRECTORY.value) / f"{reducer}.png", found)
        rows.append(
            Row(
                f"Fashion-MNIST, 12,000 images, MLP, n = 8, delays Exp(mean one round's compute), "
                f"{reducer}: time to training loss {TARGET_LOSS}, blocking over first, three seeds "
                f"(learning rates {found.rates[plain]:g}, {found.rates[gated]:g})",
                "≥ 1.8",
                f"{statistics.mean(ratios):.2f} ± {(max(ratios) - min(ratios)) / 2:.2f}",
            )
        )
        rows.append(
            Row(
                f"the same, {reducer}: last training loss at equal examples, first against none",
                "not above by more than the spread",
                f"{means[1]:.4f} against {means[0]:.4f}, spread {spread:.4f}",
            )
        )
    return rows


GROUPS = {
    "matcha": matcha_rows,
    "reductions": reduction_rows,
    "interleavings": interleaving_rows,
    "throughput": throughput_rows,
    "together": together_rows,
    "overhead": overhead_rows,
    "wall": wall_rows,
    "simulator": simulator_rows,
    "training": training_rows,
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, but {argv[1:]} were given.")
    logging.set_verbosity(logging.WARNING)
    hetjax.use_cpu_workers(8)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
