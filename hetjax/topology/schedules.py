"""MATCHA: which matchings of a graph exchange in a round, how often, and with which weight?

Each matching is active with a probability of its own, so a round uses a share of the links:
MATCHA's communication budget. In expectation the squared distance to the mean shrinks at least by
the factor ρ = ‖E[WᵀW] − 11ᵀ/n‖₂. `activation` has the problem.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hetjax.report import words
from hetjax.topology import activation, spectra

_MOST_SHOWN = 12  # probabilities
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
        """The active matchings of a round, bool[M]: the same for all that ask, in any order."""
        rng = np.random.default_rng((seed, round, _FLAG_STREAM))
        return rng.random(len(self.probabilities)) < self.probabilities

    def __repr__(self) -> str:
        return f"Schedule\n{words.aligned(self._rows())}"

    def _repr_html_(self) -> str:
        """What a notebook shows: each link as strong as it is used often."""
        from hetjax.report import cards

        links = [(int(i), int(j)) for matching in self.matchings for i, j in matching]
        weights = np.repeat(self.probabilities, list(map(len, self.matchings))).tolist()
        num_workers = max((max(link) + 1 for link in links), default=1)
        return cards.of_links("Schedule", self._rows(), num_workers, [(links, weights)])

    def _rows(self) -> list[tuple[str, str]]:
        counts = np.array([len(matching) for matching in self.matchings])
        used, links = float(self.probabilities @ counts), int(counts.sum())
        shown = " ".join(f"{p:.2f}" for p in self.probabilities[:_MOST_SHOWN])
        more = " …" if len(self.probabilities) > _MOST_SHOWN else ""
        return [
            ("matchings", str(len(self.matchings))),
            ("their probabilities", shown + more),
            ("links used a round", f"{used:.1f} of {links}, in the mean"),
            ("alpha", f"{self.alpha:.4g}"),
            ("rho", f"{self.rho:.4g}: a round leaves at most so much of the squared distance"),
            ("lambda2 of the mean graph", f"{self.lambda2:.4g}"),
        ]


def matcha_schedule(
    matchings: Sequence[ArrayLike],
    num_workers: int,
    budget: float,
    link_secs: ArrayLike | None = None,
) -> Schedule:
    """MATCHA: the probabilities that connect the mean graph best, within a communication budget.

    Maximises λ₂(Σ p_j L_j) with Σ p_j τ_j ≤ budget · Σ τ_j, 0 ≤ p ≤ 1. Then it chooses the α with
    the least ρ. λ₂ is a minimum of linear functions of p, one for each direction v ⟂ 1. So linear
    programs over more and more of them close in on it. ρ is convex in α.

    Args:
      matchings: M sets of disjoint edges, i64[k, 2] each, that together connect the workers.
      num_workers: n.
      budget: MATCHA's communication budget: mean seconds of communication a round, as a part of
        those of all matchings.
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
    problem = activation.Problem(matchings, num_workers, budget, link_secs)
    if problem.num_workers == 1:
        return Schedule((), np.zeros(0), 0.0, 0.0, 0.0)
    probabilities = problem.most_connected()
    alpha, rho = problem.best_alpha(probabilities)
    lambda2 = float(spectra.eigh(problem.mean_laplacian(probabilities))[0][1])
    return Schedule(problem.matchings, probabilities, alpha, lambda2, rho)
