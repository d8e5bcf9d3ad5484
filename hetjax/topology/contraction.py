"""Which probabilities of matchings bring the workers together fastest?

The search for the least ρ = ‖E[WᵀW] − 11ᵀ/n‖₂ itself, over (p, α). It is not convex: the variance
of the flags counts, so on dense graphs many choices of matchings are minima of their own. So the
search has many starts, cheap at first, and improves the best of them. It keeps one solution for
each of a few communication budgets. It makes those of all budgets from these, such that a larger
budget never has a larger ρ.

Two facts make that so. Along a ray ρ never rises: for p → s·p, s > 1, take α → α/s; then E[WᵀW]
loses 2α²(1 − 1/s) Σ p_j L_j ⪰ 0 and keeps the rest. And the candidates at a budget are rays
through points that the budget does not choose.
"""

from typing import NamedTuple

import numpy as np

from hetjax.topology import activation, spectra

_BUDGETS = tuple(k / 10 for k in range(1, 11))  # MATCHA's, that have solutions of their own
_BETWEEN = 10  # points on the line from one of these solutions to the next
_MOST_STEPS = 60  # in a trust region from one start
_MOST_STARTS, _STARTS_OF_MATCHING = 32, 8  # random ones at each budget
_MOST_WORK = 32 * 32**3  # starts times workers³: fewer starts above 32 workers, none above 101
_KEPT = 6  # descended starts that are also starts at the next budget
_IMPROVED = 3  # of them are improved by linear programs
_DESCENT_STEPS = 120


class Found(NamedTuple):
    probabilities: np.ndarray
    rho: float


class Search:
    """The least ρ that is found for some matchings, at any communication budget.

    What it returns at a budget has no greater ρ than what it returns at any smaller one. It is the
    best on rays through points of a line, which joins the solutions at the two `_BUDGETS` around
    it. At the upper one the solution is at least as good as each of these rays.

    Args:
        problem: its own budget does not matter.
    """

    def __init__(self, problem: activation.Problem) -> None:
        self._problem = problem
        self._before = problem.with_budget(_BUDGETS[0] / 10).most_connected()
        self._kept = np.zeros((0, problem.num_matchings))
        self._lines: list[list[np.ndarray]] = []  # one up to each of `_BUDGETS` solved so far

    def at(self, budget: float) -> np.ndarray:
        """p, f64[M]. Solves at all `_BUDGETS` up to the first that is no smaller."""
        number = next(k for k, b in enumerate(_BUDGETS) if b >= budget * (1 - 1e-12))
        while len(self._lines) <= number:
            self._solve_next()
        return _best_on_rays(self._problem.with_budget(budget), self._lines[number])

    def _solve_next(self) -> None:
        number, before = len(self._lines), self._before
        problem = self._problem.with_budget(_BUDGETS[number])
        after, self._kept = _solved(problem, before, self._kept, number)
        parts = np.arange(_BETWEEN + 1) / _BETWEEN
        self._lines.append([before + (after - before) * part for part in parts])
        self._before = _best_on_rays(problem, self._lines[number])


def _best_on_rays(problem: activation.Problem, points: list[np.ndarray]) -> np.ndarray:
    """The best s·p over the points p, with s as large as the budget and s·p ≤ 1 allow."""
    found = []
    for point in points:
        most = min(problem.budget / (problem.secs @ point), 1 / point.max())
        found.append(np.minimum(point * most, 1))
    return min(found, key=lambda p: problem.best_alpha(p).rho)


def _solved(
    problem: activation.Problem, before: np.ndarray, kept: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best p at this budget, and the starts that the next one gets."""
    connected = problem.most_connected()
    known = [connected, problem.scaled(np.ones(problem.num_matchings)), problem.scaled(before)]
    known += [problem.scaled(start) for start in kept]
    count = min(_MOST_STARTS, _STARTS_OF_MATCHING * problem.num_matchings)
    count = min(count, _MOST_WORK // problem.num_workers**3)
    starts = np.array([*known, *random_starts(problem, count, seed=number)])
    ends, rhos = descended(problem, starts) if count else (starts, np.zeros(len(starts)))
    kept = ends[_apart(ends, rhos, _KEPT)]
    found = [improved(problem, p, tolerance=1e-2) for p in (connected, *kept[:_IMPROVED])]
    best = min(found, key=lambda one: one.rho)
    return improved(problem, best.probabilities, tolerance=1e-5).probabilities, kept


def _apart(points: np.ndarray, values: np.ndarray, count: int) -> list[int]:
    """The `count` points of the least values that are not next to each other, best first."""
    chosen: list[int] = []
    for index in np.argsort(values, kind="stable"):
        near = [np.abs(points[index] - points[other]).max() < 0.02 for other in chosen]
        if not any(near):
            chosen.append(int(index))
        if len(chosen) == count:
            break
    return chosen


def random_starts(problem: activation.Problem, count: int, *, seed: int) -> np.ndarray:
    """f64[count, M]: whole matchings in random order until the budget is spent, or shares."""
    rng = np.random.default_rng(seed)
    starts = []
    for index in range(count):
        shares = problem.scaled(rng.dirichlet(np.full(problem.num_matchings, 0.5)) + 1e-6)
        if index % 2:
            order = rng.permutation(problem.num_matchings)
            left = problem.budget - np.cumsum(problem.secs[order]) + problem.secs[order]
            shares = 0.1 * problem.scaled(np.ones(problem.num_matchings))
            shares[order] += 0.9 * np.clip(left / problem.secs[order], 0, 1)
        starts.append(shares)
    return np.array(starts).reshape(count, problem.num_matchings)


def descended(problem: activation.Problem, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points to which gradient steps lead from many starts, f64[k, M], and their ρ, f64[k].

    All starts descend at once. The gradient is that of a smooth maximum over the eigenvalues, which
    becomes sharper from step to step; α follows p. Good to about 1 %.
    """
    first, second = problem.edges.T
    rest = np.eye(problem.num_workers) - 1 / problem.num_workers
    best, least = p, np.full(len(p), np.inf)
    alpha = 1 / np.maximum(_degrees(problem, p).max(axis=1), 1e-12)
    speed = np.zeros_like(p)
    for done in np.linspace(0, 1, _DESCENT_STEPS):
        mean = _laplacians(problem, p)
        square = mean @ mean + 2 * _laplacians(problem, p * (1 - p))
        scale = alpha[:, None, None]
        values, vectors = spectra.eigh(rest - 2 * scale * mean + scale**2 * square)
        top = values[:, -1]
        best = np.where((top < least)[:, None], p, best)
        least = np.minimum(least, top)
        sharpness = np.full(len(p), 3.0 * (2000 / 3) ** done)
        sharpness[::2] = (8.0 * 50**done / np.clip(1 - top, 0.02, None))[::2]
        weights = np.exp(sharpness[:, None] * (values - top[:, None]))
        weights /= weights.sum(axis=1, keepdims=True)
        density = (vectors * weights[:, None, :]) @ vectors.transpose(0, 2, 1)
        image = mean @ density
        image += image.transpose(0, 2, 1)

        def forms(matrices: np.ndarray) -> np.ndarray:
            """tr(L_j X) of each matching, f64[k, M]."""
            diagonal = np.einsum("kii->ki", matrices)
            edges = diagonal[:, first] + diagonal[:, second] - 2 * matrices[:, first, second]
            return np.add.reduceat(edges, problem.offsets, axis=1)

        plain, a = forms(density), alpha[:, None]
        slope = -2 * a * plain + a**2 * (forms(image) + 2 * (1 - 2 * p) * plain)
        slope -= (slope @ problem.secs / (problem.secs @ problem.secs))[:, None] * problem.secs
        slope /= np.maximum(np.abs(slope).max(axis=1, keepdims=True), 1e-12)
        bend = np.einsum("kij,kij->k", density, square)
        alpha = 0.5 * (alpha + (p * plain).sum(axis=1) / np.maximum(bend, 1e-12))
        speed = 0.5 * speed + slope
        step = min(2 * problem.budget, 1) * 0.15 * 0.027**done
        p = _within(p - step * speed, problem.secs, problem.budget)
    return best, least


def _laplacians(problem: activation.Problem, p: np.ndarray) -> np.ndarray:
    """f64[k, n, n] of p, f64[k, M]."""
    (first, second), weights = problem.edges.T, p[:, problem.owner]
    matrices = np.zeros((len(p), problem.num_workers, problem.num_workers))
    matrices[:, first, second] = matrices[:, second, first] = -weights
    np.einsum("kii->ki", matrices)[:] = _degrees(problem, p)
    return matrices


def _degrees(problem: activation.Problem, p: np.ndarray) -> np.ndarray:
    """Mean links of each worker in a round, f64[k, n]."""
    members = np.zeros((problem.num_matchings, problem.num_workers))
    members[problem.owner[:, None], problem.edges] = 1
    return p @ members


def _within(p: np.ndarray, costs: np.ndarray, budget: float) -> np.ndarray:
    """The nearest points with 0 ≤ p ≤ 1, costs·p ≤ budget; f64[k, M] each."""
    low = np.zeros((len(p), 1))
    high = np.maximum(p.max(axis=1, keepdims=True), 0) / costs.min()
    for _ in range(40):
        middle = 0.5 * (low + high)
        over = np.clip(p - middle * costs, 0, 1) @ costs > budget
        low, high = np.where(over[:, None], middle, low), np.where(over[:, None], high, middle)
    inside = np.clip(p, 0, 1)
    return np.where((inside @ costs > budget)[:, None], np.clip(p - high * costs, 0, 1), inside)


def improved(problem: activation.Problem, p: np.ndarray, *, tolerance: float) -> Found:
    """Steps in a trust region from p until they promise less than tolerance · (1 − ρ)."""
    current = problem.best_alpha(p)
    radius = 0.25
    for _ in range(_MOST_STEPS):
        step, predicted = _step(problem, p, current, radius)
        if current.rho - predicted <= tolerance * (1 - current.rho) or radius < 1e-6:
            break
        trial = np.clip(p + step, 0, 1)
        found = problem.best_alpha(trial)
        ratio = (current.rho - found.rho) / (current.rho - predicted)
        if ratio < 0.25:
            radius *= 0.25
        elif ratio > 0.75:
            radius = min(2 * radius, 1.0)
        if found.rho < current.rho:
            p, current = trial, found
    return Found(p, current.rho)


def _step(
    problem: activation.Problem, p: np.ndarray, at: spectra.Alpha, radius: float
) -> tuple[np.ndarray, float]:
    """The change of p that is best by the linear model, and the ρ that it predicts."""
    mean, _ = problem.moments(p)
    forms = problem.forms(at.vectors, at.vectors)
    mixed = problem.forms(at.vectors, mean @ at.vectors)
    slopes = at.alpha**2 * (mixed + mixed.transpose(0, 2, 1))
    slopes += 2 * at.alpha * (at.alpha * (1 - 2 * p) - 1)[:, None, None] * forms
    # Along log α: α dE/dα = −2α L̄ + 2α² S.
    small_mean = np.tensordot(p, forms, 1)
    image = mean @ at.vectors
    small_second = image.T @ image + 2 * np.tensordot(p * (1 - p), forms, 1)
    slope = -2 * at.alpha * small_mean + 2 * at.alpha**2 * small_second
    slopes = np.concatenate([slopes, slope[None]])

    low = np.append(np.maximum(-radius, -p), -radius)
    high = np.append(np.minimum(radius, 1 - p), radius)
    step, _, predicted = spectra.least_top_eigenvalue(
        np.diag(at.values),
        slopes,
        start=np.zeros(len(p) + 1),
        low=low,
        high=high,
        costs=np.append(problem.secs, 0),
        limit=max(problem.budget - problem.secs @ p, 0),
        gain=0.05,
    )
    return step[:-1], predicted
