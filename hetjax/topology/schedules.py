"""MATCHA: which matchings of a graph exchange in a round, how often, and with which weight?

Each matching is active with a probability of its own, so that a round costs a share of the links.
ρ = ‖E[WᵀW] − 11ᵀ/n‖₂ is the factor by which the squared distance to the mean shrinks, in
expectation, at least. No semidefinite solver is needed: linear programs with cutting planes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hetjax.topology import graphs, mixing

_GAP = 1e-7  # of the bounds, relative, at which a search ends
_MOST_CUTS = 300  # rounds of cutting planes; 5 to 80 are usual
_MOST_STEPS = 60  # of matcha_direct from one start
_FLAG_STREAM = 0x6D61  # keeps the flags apart from other draws of (seed, round)


class Schedule(NamedTuple):
    """Which matchings a round uses, W_k = I − α Σ_j B_j L_j with B_j ~ Bernoulli(p_j)."""

    matchings: tuple[np.ndarray, ...]
    """M matchings, each i64[k, 2]."""

    probabilities: np.ndarray
    """p, f64[M]."""

    alpha: float
    """Weight of a link that is used; a worker keeps 1 - alpha · (its links in this round)."""

    lambda2: float
    """λ₂(Σ p_j L_j), the connectivity of the mean graph."""

    rho: float
    """‖E[WᵀW] - 11ᵀ/n‖₂: per round, the squared distance to the mean shrinks by this or more."""

    def flags(self, round: int, seed: int) -> np.ndarray:
        """The matchings of a round, bool[M]: the same for everybody who asks, in any order."""
        rng = np.random.default_rng((seed, round, _FLAG_STREAM))
        return rng.random(len(self.probabilities)) < self.probabilities


def matcha_schedule(
    matchings: Sequence[ArrayLike],
    num_workers: int,
    budget: float,
    link_secs: ArrayLike | None = None,
) -> Schedule:
    """MATCHA: the probabilities that connect the mean graph best, within a budget of time.

    Maximises λ₂(Σ p_j L_j) with Σ p_j τ_j ≤ budget · Σ τ_j, 0 ≤ p ≤ 1, and then chooses the α
    with the least ρ. λ₂ is a minimum of linear functions of p, one for each direction v ⟂ 1, so
    linear programs over more and more of them close in on it; ρ is convex in α.

    Args:
      matchings: M sets of disjoint edges, i64[k, 2] each, that together connect the workers.
      num_workers: n.
      budget: mean seconds of communication a round, as a part of those of all matchings.
      link_secs: τ, f64[M], seconds of each matching, which are those of its slowest link.
        None: all equal.

    Returns:
      A `Schedule`; p is found to a relative gap of 1e-7 in λ₂.

    Raises:
      ValueError: the budget is outside (0, 1], a matching uses a worker twice or has no edge,
        or the workers are not connected.

    Example:
      >>> schedule = matcha_schedule([[(0, 1), (2, 3)], [(1, 2), (0, 3)]], 4, 0.5)
      >>> schedule.probabilities.round(4).tolist(), round(schedule.lambda2, 4)
      ([0.5, 0.5], 1.0)

    References:
      Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding up decentralized SGD via matching
      decomposition sampling", 2019, arXiv 1905.09435. It solves both problems as semidefinite
      programs; the costs τ are not in it.
    """
    problem = _Problem(matchings, num_workers, budget, link_secs)
    if num_workers == 1:
        return Schedule((), np.zeros(0), 0.0, 0.0, 0.0)
    probabilities = problem.most_connected()
    return problem.schedule(probabilities, problem.best_alpha(probabilities))


def matcha_direct(
    matchings: Sequence[ArrayLike],
    num_workers: int,
    budget: float,
    link_secs: ArrayLike | None = None,
) -> Schedule:
    """The probabilities and α with the least ρ itself, within MATCHA's budget.

    MATCHA's p has the largest λ₂, which is not the least ρ: the variance of the flags counts,
    too, and rises and falls with p. ρ is not convex in (p, α), so this improves several starts
    (MATCHA's p, equal ones, MATCHA's at other budgets) by steps in a trust region: E[WᵀW] is
    linearised in (p, α) on its largest eigenvectors, the best step is a convex problem for the
    same cutting planes, and α is then chosen exactly. Never worse than `matcha_schedule`; no
    proof that nothing is better.

    Args, Returns, Raises: as `matcha_schedule`.

    Example:
      >>> pairs = [[(0, 1), (2, 3)], [(1, 2)], [(0, 2)]]
      >>> matcha_direct(pairs, 4, 0.5).rho < matcha_schedule(pairs, 4, 0.5).rho
      True

    References:
      The problem is that of Wang et al., 2019, arXiv 1905.09435; minimising ρ over p is not
      from there.
    """
    problem = _Problem(matchings, num_workers, budget, link_secs)
    if num_workers == 1:
        return Schedule((), np.zeros(0), 0.0, 0.0, 0.0)
    starts = [problem.most_connected(), problem.scaled(np.ones(problem.num_matchings))]
    for other in (0.5 * budget, 0.5 * (1 + budget)):
        starts.append(problem.scaled(problem.with_budget(other).most_connected()))
    ends = [problem.improved(start, tolerance=1e-3) for start in starts]
    best, _ = min(ends, key=lambda end: end[1].rho)
    return problem.schedule(*problem.improved(best, tolerance=1e-6))


class _Alpha(NamedTuple):
    """The best α for some p."""

    alpha: float
    rho: float
    vectors: np.ndarray  # f64[n, k], the largest eigenvectors of E[WᵀW] at this α
    values: np.ndarray  # f64[k], theirs, minus those of 11ᵀ/n


class _Problem:
    """Matchings and budget, checked, and the two searches over them."""

    def __init__(
        self,
        matchings: Sequence[ArrayLike],
        num_workers: int,
        budget: float,
        link_secs: ArrayLike | None,
    ):
        if not 0 < budget <= 1:
            raise ValueError(
                f"budget is {budget!r}; it must be above 0 and at most 1, the part of the "
                "matchings that a round may use on average."
            )
        self.matchings = tuple(
            _checked_matching(j, m, num_workers) for j, m in enumerate(matchings)
        )
        self.num_matchings, self.num_workers = len(self.matchings), num_workers
        self.edges = np.concatenate([np.zeros((0, 2), np.int64), *self.matchings])
        graphs.check_connected(self.edges, num_workers)
        sizes = [len(matching) for matching in self.matchings]
        self.owner = np.repeat(np.arange(self.num_matchings), sizes)
        self.offsets = np.cumsum([0, *sizes[:-1]])
        secs = np.ones(self.num_matchings) if link_secs is None else np.asarray(link_secs, float)
        if secs.shape != (self.num_matchings,) or not (np.isfinite(secs) & (secs > 0)).all():
            raise ValueError(
                f"link_secs is {link_secs!r}; it must be {self.num_matchings} numbers above 0, "
                "the seconds of each matching."
            )
        self.budget = float(budget)
        self.secs = secs / secs.sum() if self.num_matchings else secs

    def with_budget(self, budget: float) -> "_Problem":
        return _Problem(self.matchings, self.num_workers, budget, self.secs)

    def scaled(self, probabilities: np.ndarray) -> np.ndarray:
        """In the same proportions, up to the budget or 1."""
        for _ in range(self.num_matchings):  # what is cut off at 1 is spent on the others
            factor = self.budget / (self.secs @ probabilities)
            probabilities = np.minimum(probabilities * factor, 1)
        return probabilities

    def schedule(self, probabilities: np.ndarray, found: _Alpha) -> Schedule:
        mean = self.mean_laplacian(probabilities)
        lambda2 = float(np.linalg.eigvalsh(mean)[1])
        return Schedule(self.matchings, probabilities, found.alpha, lambda2, found.rho)

    def mean_laplacian(self, probabilities: np.ndarray) -> np.ndarray:
        return mixing.weighted_laplacian(self.edges, probabilities[self.owner], self.num_workers)

    def forms(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """leftᵀ L_j right of each matching, f64[M, k, k], for f64[n, k]."""
        first, second = self.edges.T
        left, right = left[first] - left[second], right[first] - right[second]
        bounds = [*self.offsets, len(self.edges)]
        parts = itertools.pairwise(bounds)
        return np.array([left[a:b].T @ right[a:b] for a, b in parts])

    def most_connected(self) -> np.ndarray:
        """The p with the largest λ₂ of the mean Laplacian."""
        # λ_max ≤ 2 Σ p_j: the shift takes the vector 1 away from the small eigenvalues.
        shift = np.full((self.num_workers,) * 2, 2 * self.num_matchings / self.num_workers)
        probabilities = best = self.scaled(np.ones(self.num_matchings))
        least, lower = np.inf, -np.inf
        basis = np.zeros((self.num_workers, 0))
        # On a basis of few eigenvectors the search is cheap and bounds the one on all of them.
        while True:
            values, vectors = _top_eigenpairs(-self.mean_laplacian(probabilities) - shift)
            if values[0] < least:
                best, least = probabilities, float(values[0])
            wider = _joined(basis, vectors)
            if least - lower <= _GAP * abs(least) or wider.shape[1] == basis.shape[1]:
                return best
            basis = wider
            probabilities, lower, _ = _least_top_eigenvalue(
                np.zeros((basis.shape[1],) * 2),
                -self.forms(basis, basis),
                start=best,
                low=np.zeros(self.num_matchings),
                high=np.ones(self.num_matchings),
                costs=self.secs,
                limit=self.budget,
            )

    def moments(self, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """L̄ and S of E[WᵀW] = I − 2α L̄ + α² S, f64[n, n] each.

        L_j² = 2 L_j for a matching, so S = L̄² + 2 Σ p_j(1 − p_j) L_j.
        """
        mean = self.mean_laplacian(probabilities)
        return mean, mean @ mean + 2 * self.mean_laplacian(probabilities * (1 - probabilities))

    def best_alpha(self, probabilities: np.ndarray, basis: np.ndarray | None = None) -> _Alpha:
        """The α with the least ρ: bounded search on a growing basis of largest eigenvectors.

        On a basis, ρ(α) is a lower bound, and exact where the basis holds the eigenvector.
        """
        from scipy import optimize

        mean, second = self.moments(probabilities)
        ones = np.full_like(mean, 1 / self.num_workers)
        identity = np.eye(self.num_workers)
        most = 2 / mean.diagonal().max()  # λ_max ≥ the diagonal, and ρ < 1 needs α < 2/λ_max

        def expected(alpha: float) -> np.ndarray:
            return identity - ones - 2 * alpha * mean + alpha**2 * second

        alpha, lower, found = 0.5 * most, 0.0, None
        basis = np.zeros((self.num_workers, 0)) if basis is None else basis
        while True:
            if basis.shape[1]:
                result = optimize.minimize_scalar(
                    _quadratic_top,
                    args=(basis.T @ mean @ basis, basis.T @ second @ basis),
                    bounds=(0, most),
                    method="bounded",
                    options={"xatol": 1e-10 * most},
                )
                alpha, lower = float(result.x), float(result.fun)
            values, vectors = _top_eigenpairs(expected(alpha))
            rho = max(float(values[0]), 0.0)
            if found is None or rho < found.rho:
                found = _Alpha(alpha, rho, vectors, values)
            wider = _joined(basis, vectors)
            small = found.rho - lower <= _GAP * (1 - lower) + 1e-13
            if small or wider.shape[1] == basis.shape[1]:
                return found
            basis = wider

    def improved(self, probabilities: np.ndarray, tolerance: float) -> tuple[np.ndarray, _Alpha]:
        """Steps in a trust region from p until they promise less than tolerance · (1 − ρ)."""
        current = self.best_alpha(probabilities)
        radius = 0.25
        for _ in range(_MOST_STEPS):
            step, predicted = self._step(probabilities, current, radius)
            if current.rho - predicted <= tolerance * (1 - current.rho) or radius < 1e-6:
                break
            trial = np.clip(probabilities + step, 0, 1)
            found = self.best_alpha(trial, current.vectors)
            ratio = (current.rho - found.rho) / (current.rho - predicted)
            if ratio < 0.25:
                radius *= 0.25
            elif ratio > 0.75:
                radius = min(2 * radius, 1.0)
            if found.rho < current.rho:
                probabilities, current = trial, found
        return probabilities, current

    def _step(self, p: np.ndarray, at: _Alpha, radius: float) -> tuple[np.ndarray, float]:
        """The change of p that the linear model likes best, and the ρ that it predicts."""
        mean, _ = self.moments(p)
        forms = self.forms(at.vectors, at.vectors)
        mixed = self.forms(at.vectors, mean @ at.vectors)
        slopes = at.alpha**2 * (mixed + mixed.transpose(0, 2, 1))
        slopes += 2 * at.alpha * (at.alpha * (1 - 2 * p) - 1)[:, None, None] * forms
        # Along α, in units of α: α dE/dα = −2α L̄ + 2α² S.
        small_mean = np.tensordot(p, forms, 1)
        image = mean @ at.vectors
        small_second = image.T @ image + 2 * np.tensordot(p * (1 - p), forms, 1)
        slope = -2 * at.alpha * small_mean + 2 * at.alpha**2 * small_second
        slopes = np.concatenate([slopes, slope[None]])

        low = np.append(np.maximum(-radius, -p), -radius)
        high = np.append(np.minimum(radius, 1 - p), radius)
        step, _, predicted = _least_top_eigenvalue(
            np.diag(at.values),
            slopes,
            start=np.zeros(len(p) + 1),
            low=low,
            high=high,
            costs=np.append(self.secs, 0),
            limit=max(self.budget - self.secs @ p, 0),
            gain=0.05,
        )
        return step[:-1], predicted


def _least_top_eigenvalue(
    constant: np.ndarray,
    slopes: np.ndarray,
    *,
    start: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    costs: np.ndarray,
    limit: float,
    gain: float = 0.0,
) -> tuple[np.ndarray, float, float]:
    """Minimises the largest eigenvalue of A(x) = constant + Σ x_j slopes_j, f64[k, k].

    Over low ≤ x ≤ high, costs·x ≤ limit. Each unit vector v gives a cut, vᵀA(x)v ≤ s.
    Eigenvectors alone converge slowly where several eigenvalues meet, as they do at the optimum;
    the sums and differences of two of them bring in the entries off the diagonal.

    Returns the best x, a lower bound of the minimum, and the value at x; they differ by 1e-7 of
    the value, or by `gain` of what was gained from the start.
    """
    from scipy import optimize

    x, best, least, lower, first_value = start, start, np.inf, -np.inf, np.inf
    cuts, ends = np.zeros((0, len(x))), np.zeros(0)
    for _ in range(_MOST_CUTS):
        values, vectors = np.linalg.eigh(constant + np.tensordot(x, slopes, 1))
        if values[-1] < least:
            best, least = x, float(values[-1])
        if first_value == np.inf:
            first_value, scale = least, max(abs(least), 1e-12)  # HiGHS's tolerances are absolute
        if least - lower <= max(_GAP * abs(least), gain * (first_value - least)):
            break
        top = vectors[:, -8:]
        i, j = np.triu_indices(top.shape[1], 1)
        top = np.concatenate(
            [top, (top[:, i] + top[:, j]) / 2**0.5, (top[:, i] - top[:, j]) / 2**0.5], axis=1
        )
        cuts = np.append(cuts, np.sum(top * (slopes @ top), axis=1).T / scale, axis=0)
        ends = np.append(ends, -np.sum(top * (constant @ top), axis=0) / scale)
        result = optimize.linprog(
            np.append(np.zeros(len(x)), 1.0),
            A_ub=np.block([[cuts, -np.ones((len(cuts), 1))], [costs, np.zeros(1)]]),
            b_ub=np.append(ends, limit),
            bounds=[*zip(low, high, strict=True), (None, None)],
            method="highs",
            options={
                "presolve": False,
                "primal_feasibility_tolerance": 1e-10,
                "dual_feasibility_tolerance": 1e-10,
            },
        )
        if result.status != 0:  # numerical trouble: what was found so far is still feasible
            break
        x, lower = np.clip(result.x[:-1], low, high), max(lower, float(result.fun) * scale)
        room, used = limit - costs @ low, costs @ (x - low)
        if used > room:  # by the tolerance of the linear program
            x = low + (x - low) * (room / used)
        # Cuts half-way to the best point so far took half as many rounds as those at the vertex.
        x = 0.5 * (x + best)
        # The tight cuts keep the bound; most of the others never matter again.
        kept = np.argsort(ends - cuts @ x, kind="stable")[: 5 * len(x) + 40]
        cuts, ends = cuts[kept], ends[kept]
    return best, lower, least


def _quadratic_top(alpha: float, mean: np.ndarray, second: np.ndarray) -> float:
    """The largest eigenvalue of I − 2α mean + α² second, f64[k, k] each."""
    matrix = np.eye(len(mean)) - 2 * alpha * mean + alpha**2 * second
    return float(np.linalg.eigvalsh(matrix)[-1])


def _joined(basis: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """An orthonormal basis of both, f64[n, k]; directions that are there already are left out."""
    rest = vectors - basis @ (basis.T @ vectors)
    left, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    new = left[:, sizes > 1e-7]
    new = np.linalg.qr(new - basis @ (basis.T @ new))[0]
    return np.concatenate([basis, new], axis=1)


def _checked_matching(number: int, matching: ArrayLike, num_workers: int) -> np.ndarray:
    edges = graphs.checked_edges(matching, num_workers)
    if not len(edges):
        raise ValueError(f"matching {number} has no edges; leave it out.")
    uses = np.bincount(edges.ravel())
    if uses.max() > 1:
        raise ValueError(
            f"matching {number} is none: worker {uses.argmax()} is in {uses.max()} of its edges; "
            "each worker may be in one. decompose_matchings makes matchings from edges."
        )
    return edges


def _top_eigenpairs(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, f64[k], descending, and their vectors, f64[n, k].

    All but the smallest, k = n − 1, up to n = 64; above it 8.
    """
    from scipy import linalg

    size = len(matrix)
    count = size - 1 if size <= 64 else 8
    values, vectors = linalg.eigh(matrix, subset_by_index=[size - count, size - 1])
    return values[::-1], vectors[:, ::-1]
