"""How good are rounds that close early, and gossip? Prints their table.

    python -m experiments.benchmarks.rounds [--only=GROUP,…] [--data_dir=DIR] [--jobs=2]

Groups: matcha, reductions, objective, random_order, interleavings, throughput, together,
overhead, wall, stream, simulator, training.
`training` needs Fashion-MNIST in DIR; its runs leave lines in experiments/results/rounds/runs.jsonl
and are not done again. experiments/results/rounds/README.md keeps the table.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags, logging

import hetjax
from experiments.benchmarks import round_objectives, round_speeds
from experiments.benchmarks.rows import Row, print_tables

_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of the data sets.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Training runs at a time.", 1)
_DIRECTORY = flags.DEFINE_string("directory", "experiments/results/rounds", "Of the training runs.")

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
    from hetjax.topology import activation, contraction, graphs, mixing

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
        problem = activation.Problem(matchings, size, 1.0, None)
        search = contraction.Search(problem)  # matcha_direct's; asked again it need not begin anew
        for budget in budgets:
            plain = topology.matcha_schedule(matchings, size, budget)
            direct = problem.best_alpha(search.at(budget)).rho
            worse += direct > plain.rho + 1e-12
            gains.append(1 - direct / plain.rho)
            if index == 0 and budget == 0.5:
                at_half = direct
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
    from hetjax.topology import graphs

    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(8, 100_000)).astype(np.float32)}
    mean = tree["w"].astype(np.float64).mean(axis=0)
    drift, rows = 0.0, []
    for name in ("d_psgd", "matcha", "matcha_direct"):
        for graph in graphs.GRAPHS:
            if name != "d_psgd" and graph == "one_peer_exponential":
                continue
            reducer = topology.REDUCERS[name](graph=graph)
            mixing = reducer.for_run(topology.Facts(8)).mixing
            mixed = tree
            for index in range(20):
                before = np.asarray(mixed["w"], np.float64).mean(axis=0)
                mixed = mixing.array(mixed, mixing.gossip.active(index))
                after = np.asarray(mixed["w"], np.float64).mean(axis=0)
                drift = max(drift, float(np.abs(after - before).max()))
    complete = topology.d_psgd(graph="complete").for_run(topology.Facts(8))
    all_equal = complete.mixing.array(tree, complete.mixing.gossip.active(0))["w"]
    matcha = topology.matcha(graph="torus").for_run(topology.Facts(8))
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
    from experiments.benchmarks import round_interleavings

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


RATES = (0.05, 0.07, 0.1, 0.14, 0.2)
TARGET_LOSS = 0.42


def training_rows() -> list[Row]:
    """Time to a training loss with and without a gate, for each reducer."""
    from experiments.comparisons import comparison

    file = "configs/fashion_mnist_delays.py"
    data = [f"data.dir={_DATA_DIR.value}"] if _DATA_DIR.value else []
    rows = []
    for reducer in ("all_reduce", "d_psgd", "matcha"):
        texts = [f"{file} reducer.name={reducer} gate.trigger={g}" for g in ("none", "first")]
        arms = comparison.read_arms(texts, data)
        found, best = (
            comparison.compare(
                arms,
                (0, 1, 2),
                pathlib.Path(_DIRECTORY.value),
                rates=RATES,
                target=TARGET_LOSS,
                tune_for_last_loss=for_loss,
                jobs=_JOBS.value,
            )
            for for_loss in (False, True)
        )
        plain, gated = (arm.label for arm in arms)
        ratios = found.speedups(gated, plain)
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
        for lasts, which in ((found, "those learning rates"), (best, "rates tuned for it")):
            losses = [lasts.final_losses(label) for label in (plain, gated)]
            spread = max((max(v) - min(v)) / 2 for v in losses)
            means = [statistics.mean(v) for v in losses]
            rows.append(
                Row(
                    f"the same, {reducer}: last training loss at equal examples, first against "
                    f"none, {which} ({lasts.rates[gated]:g}, {lasts.rates[plain]:g})",
                    "not above by more than the spread",
                    f"{means[1]:.4f} against {means[0]:.4f}, spread {spread:.4f}",
                )
            )
    return rows


GROUPS = {
    "matcha": matcha_rows,
    "reductions": reduction_rows,
    "objective": round_objectives.objective_rows,
    "random_order": round_objectives.random_rows,
    "interleavings": interleaving_rows,
    "throughput": round_speeds.throughput_rows,
    "together": round_speeds.together_rows,
    "overhead": round_speeds.overhead_rows,
    "wall": round_speeds.wall_rows,
    "stream": round_speeds.stream_rows,
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
