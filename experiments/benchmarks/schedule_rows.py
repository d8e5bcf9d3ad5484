"""MATCHA's schedules: an eigensolver that fails, the least ρ over the budget, one for all."""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from experiments.benchmarks import agreed_schedules, launched_runs
from experiments.benchmarks.rows import Row
from hetjax.topology import activation, contraction, graphs, matchings, schedules

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
_NAMED = (("complete", 6), ("complete", 8), ("complete", 9), ("exponential", 9))
_NAMED += (("torus", 6), ("torus", 16))
_RANDOM = ((8, 6, 0), (8, 6, 5), (8, 6, 7), (8, 6, 11), (6, 3, 3), (10, 6, 1))  # n, degree, seed
_RANDOM += ((12, 8, 3), (13, 5, 5), (16, 4, 1))
_STARTS, _IMPROVED = 200, 20
_MOST_SECS = 1800.0


def eigensolver_rows() -> list[Row]:
    """Complete graphs, whose eigenvalues are nearly all equal, with each of the solvers."""

    def fails(*args: Any) -> None:
        raise np.linalg.LinAlgError("Internal Error.")

    farthest, crashes, count = 0.0, 0, 0
    for size in (*range(2, 17), 24, 32, 48, 64):
        pieces = matchings.decompose_matchings(graphs.complete(size).edges, size)
        for budget in (*BUDGETS, 1.0):
            count += 1
            try:
                found = schedules.matcha_schedule(pieces, size, budget)
                with mock.patch.object(np.linalg, "eigh", fails):
                    other = schedules.matcha_schedule(pieces, size, budget)
                farthest = max(farthest, abs(found.rho - other.rho))
            except np.linalg.LinAlgError:
                crashes += 1
    return [
        Row(
            f"MATCHA on complete graphs of 2 to 64 workers, {count} problems, with the first "
            "eigensolver made to fail: crashes; greatest difference of rho",
            "0; ≤ 1e-9",
            f"{crashes}; {farthest:.0e}",
        )
    ]


def _problems() -> Iterator[activation.Problem]:
    drawn = [graphs.random_graph(n, degree=degree, seed=seed) for n, degree, seed in _RANDOM]
    for graph in (*[graphs.make_graph(name, n) for name, n in _NAMED], *drawn):
        pieces = matchings.decompose_matchings(graph.edges, graph.num_workers)
        yield activation.Problem(pieces, graph.num_workers, 1.0, None)


def budget_rows() -> list[Row]:
    """The least ρ at many budgets, and against many starts that know nothing of each other."""
    rises, above, farthest, worst, secs, pairs, counted = 0, 0, 0.0, -1.0, [], 0, 0
    for number, problem in enumerate(_problems()):
        search, rng = contraction.Search(problem), np.random.default_rng(number)
        budgets = np.sort([*BUDGETS, *rng.uniform(0.02, 1, 20)])
        rhos = [problem.best_alpha(search.at(budget)).rho for budget in budgets]
        rises += int((np.diff(rhos) > 1e-12).sum())
        pairs += len(budgets) - 1
        for budget, rho in zip(budgets, rhos, strict=True):
            at = problem.with_budget(budget)
            plain = at.best_alpha(at.most_connected()).rho
            worst = max(worst, rho / plain - 1)
            if budget not in BUDGETS:
                continue
            counted += 1
            ends, reached = contraction.descended(
                at, contraction.random_starts(at, _STARTS, seed=1000 + number)
            )
            best = min(
                contraction.improved(at, ends[index], tolerance=1e-3).rho
                for index in np.argsort(reached)[:_IMPROVED]
            )
            farthest = max(farthest, rho / best - 1)
            above += rho > 1.01 * best
        began = time.process_time()
        schedules.matcha_direct(problem.matchings, problem.num_workers, 0.5)
        secs.append(time.process_time() - began)
    return [
        Row(
            f"matcha_direct, {number + 1} graphs of 6 to 16 workers, {len(BUDGETS)} budgets and 20 "
            "random ones: rises of rho from one budget to the next; rho above MATCHA's by at most",
            "0; none",
            f"{rises} of {pairs}; {worst:.2%}",
        ),
        Row(
            f"the same, {counted} problems against the best of {_STARTS} random starts: rho more "
            "than 1 % above it; above it by at most; processor time at budget 0.5, median and most",
            "0",
            f"{above}; {farthest:.2%}; {np.median(secs):.1f}, {max(secs):.1f} s",
        ),
    ]


def agreement_rows() -> list[Row]:
    """Two real processes, of which one solves in another order of the same sums."""
    with tempfile.TemporaryDirectory() as directory:
        command = launched_runs.launch_command(2, (), "--max_restarts=0")
        command += [sys.executable, "-m", "experiments.benchmarks.agreed_schedules", directory]
        try:
            done = subprocess.run(
                command,
                env=launched_runs.environment() | {"OPENBLAS_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=_MOST_SECS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [Row("two processes with solutions of their own", "0 hangs", "hung")]
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-4000:])
        told = [
            json.loads((pathlib.Path(directory) / f"{index}.json").read_text())
            for index in range(2)
        ]
    first, second = told
    num = len(first["plans"])
    planned = sum(a != b for a, b in zip(first["plans"], second["plans"], strict=True))
    own_bits = sum(a != b for a, b in zip(first["bits"], second["own_bits"], strict=True))
    own_plans = sum(a != b for a, b in zip(first["plans"], second["own_plans"], strict=True))
    runs = sum(a != b for a, b in zip(first["runs"], second["runs"], strict=True))
    unfinished = agreed_schedules.RUNS - len(first["runs"])
    return [
        Row(
            f"two processes whose own solutions differ in the last bits, {num} schedules (40 "
            "random graphs, two budgets, MATCHA and direct), 2,000 rounds planned: plans that "
            "differ; of their own solutions: other bits, other plans",
            "0",
            f"{planned}; {own_bits}, {own_plans}",
        ),
        Row(
            f"{agreed_schedules.RUNS} runs of them, 200 rounds each: runs that do not end; "
            "parameters that differ",
            "0; 0",
            f"{unfinished}; {runs}",
        ),
    ]
