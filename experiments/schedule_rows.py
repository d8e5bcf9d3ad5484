"""MATCHA's schedules: an eigensolver that fails, the least ρ over the budget, one for all."""

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from experiments.rows import Row
from hetjax.topology import activation, contraction, graphs, matchings, schedules

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
_NAMED = (("complete", 6), ("complete", 8), ("complete", 9), ("exponential", 9))
_NAMED += (("torus", 6), ("torus", 16))
_RANDOM = ((8, 6, 0), (8, 6, 5), (8, 6, 7), (8, 6, 11), (6, 3, 3), (10, 6, 1))  # n, degree, seed
_RANDOM += ((12, 8, 3), (13, 5, 5), (16, 4, 1))
_STARTS, _IMPROVED = 200, 20


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
            "0; 0",
            f"{rises} of {pairs}; {worst:.2%}",
        ),
        Row(
            f"the same, {counted} problems against the best of {_STARTS} random starts: rho more "
            "than 1 % above it; above it by at most; processor time at budget 0.5, median and most",
            "0",
            f"{above}; {farthest:.2%}; {np.median(secs):.1f}, {max(secs):.1f} s",
        ),
    ]
