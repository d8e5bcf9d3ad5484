"""How often is each matching of a graph used, and what graph is that in the mean?

The problem that MATCHA's schedules solve: probabilities of matchings within MATCHA's communication
budget. Here are its checks, its matrices, and the search for the best connected mean graph.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hetjax import parts
from hetjax.topology import graphs, mixing, spectra


class Problem:
    """Matchings and a communication budget, checked, and the mean graph that they make."""

    def __init__(
        self,
        matchings: Sequence[ArrayLike],
        num_workers: int,
        budget: float,
        link_secs: ArrayLike | None,
    ):
        parts.number(above=0.0, at_most=1.0).check("budget", budget)
        self.matchings = tuple(graphs.checked_edges(edges, num_workers) for edges in matchings)
        for number, edges in enumerate(self.matchings):
            if np.bincount(edges.ravel(), minlength=1).max() != 1:
                raise ValueError(f"matching {number} must have edges, at most one of each worker")
        self.num_matchings, self.num_workers = len(self.matchings), num_workers
        self.edges = np.concatenate([np.zeros((0, 2), np.int64), *self.matchings])
        graphs.check_connected(self.edges, num_workers)
        sizes = [len(matching) for matching in self.matchings]
        self.owner = np.repeat(np.arange(self.num_matchings), sizes)
        secs = np.ones(self.num_matchings) if link_secs is None else np.asarray(link_secs, float)
        if secs.shape != (self.num_matchings,) or not (np.isfinite(secs) & (secs > 0)).all():
            raise ValueError(
                f"link_secs is {link_secs!r}, must be {self.num_matchings} numbers above 0"
            )
        self.budget = float(budget)
        self.secs = secs / secs.sum() if self.num_matchings else secs

    def scaled(self, probabilities: np.ndarray) -> np.ndarray:
        """Probabilities in the same proportions, as large as the budget and 1 allow."""
        for _ in range(self.num_matchings):  # what is cut off at 1 is spent on the others
            factor = self.budget / (self.secs @ probabilities)
            probabilities = np.minimum(probabilities * factor, 1)
        return probabilities

    def mean_laplacian(self, probabilities: np.ndarray) -> np.ndarray:
        return mixing.weighted_laplacian(self.edges, probabilities[self.owner], self.num_workers)

    def forms(self, basis: np.ndarray) -> np.ndarray:
        """basisᵀ L_j basis of each matching, f64[M, k, k]; `basis` is f64[n, k]."""
        differences = (basis[edges[:, 0]] - basis[edges[:, 1]] for edges in self.matchings)
        # Of two arrays, since the product of one with itself rounds otherwise.
        return np.array([each.T @ each.copy() for each in differences])

    def most_connected(self) -> np.ndarray:
        """The p with the largest λ₂ of the mean Laplacian."""
        # λ_max ≤ 2 Σ p_j, so the shift moves the vector 1 away from the small eigenvalues.
        shift = np.full((self.num_workers,) * 2, 2 * self.num_matchings / self.num_workers)
        probabilities = best = self.scaled(np.ones(self.num_matchings))
        least, lower = np.inf, -np.inf
        basis = np.zeros((self.num_workers, 0))
        # On a basis of a few eigenvectors the search is cheap and bounds the one on all of them.
        while True:
            values, vectors = spectra.top_eigenpairs(-self.mean_laplacian(probabilities) - shift)
            if values[0] < least - 1e-12 * abs(values[0]):  # by more than rounding
                best, least = probabilities, float(values[0])
            wider = spectra.joined(basis, vectors)
            if least - lower <= spectra.GAP * abs(least) or wider.shape[1] == basis.shape[1]:
                return best
            basis = wider
            probabilities, lower = spectra.least_top_eigenvalue(
                -self.forms(basis), start=best, costs=self.secs, limit=self.budget
            )

    def best_alpha(self, probabilities: np.ndarray) -> tuple[float, float]:
        """The α with the least ρ, and that, of E[WᵀW] = I − 2α L̄ + α² S.

        L_j² = 2 L_j for a matching, so S = L̄² + 2 Σ p_j(1 − p_j) L_j.
        """
        mean = self.mean_laplacian(probabilities)
        spread = self.mean_laplacian(probabilities * (1 - probabilities))
        return spectra.best_alpha(mean, mean @ mean + 2 * spread)
