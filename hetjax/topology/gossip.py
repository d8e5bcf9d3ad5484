"""Gossip: which workers average with each other in a round, and by how much. Only NumPy.

A round mixes the workers' parameters by a doubly stochastic matrix

    W = I + sum of (diag(weights_m) (P_m - I)) over the exchanges m that are active,

P_m is a permutation: in exchange m worker i receives from `partners[m, i]`. The exchanges of an
undirected graph are the matchings of a decomposition, those of a periodic graph its phases. Mixing
keeps the mean of the parameters.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetjax.topology import graphs, matchings, mixing, schedules

SolveOnce = Callable[[str, Callable[[], list[float]]], list[float]]
"""`(problem, solve) -> solve()`, or what was found for the same problem by another process, or by
this one before a restart."""


def solve_here(problem: str, solve: Callable[[], list[float]]) -> list[float]:
    """The `SolveOnce` of a process that is alone."""
    return solve()


class Gossip(NamedTuple):
    """The exchanges of a reducer, and which of them are active in a round."""

    partners: np.ndarray  # i64[M, n]: from which each worker receives; itself: from none
    weights: np.ndarray  # f64[M, n]: what the difference from the partner is multiplied by
    active: Callable[[int], np.ndarray]  # round -> bool[M], the same for all that ask
    always: bool  # all exchanges are active in every round
    spectral_gap: float  # 1 - the factor by which a round shrinks the consensus distance, at worst

    def matrix(self, active: np.ndarray) -> np.ndarray:
        """f64[n, n]: W of the active exchanges, bool[M]."""
        workers = np.arange(self.partners.shape[1])
        matrix = np.eye(len(workers))
        for index in np.flatnonzero(active):
            np.add.at(matrix, (workers, self.partners[index]), self.weights[index])
            matrix[workers, workers] -= self.weights[index]
        return matrix

    def sends(self, active: np.ndarray) -> np.ndarray:
        """i64[n]: how many copies of its parameters each worker sends."""
        exchanging = self.partners != np.arange(self.partners.shape[1])
        return (exchanging & np.asarray(active)[:, None]).sum(axis=0)


def ring_copies(num_workers: int) -> float:
    """The least copies of a vector that each worker sends in an all-reduce; a ring attains it."""
    return 2 * (num_workers - 1) / num_workers


def d_psgd(graph: graphs.Graph | graphs.PeriodicGraph) -> Gossip:
    """All edges of the graph in every round, with Metropolis weights; or its phases in turn.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017,
        arXiv 1705.09056. Ying et al., "Exponential graph is provably efficient for decentralized
        deep training", 2021, arXiv 2110.13363: one peer a round.
    """
    matrices = mixing.mixing_matrices(graph)
    gap = mixing.spectral_gap(matrices)
    if isinstance(graph, graphs.PeriodicGraph):
        partners = np.array(graph.phases, int).reshape(-1, graph.num_workers)
        period = max(len(partners), 1)
        weights = np.full(partners.shape, 0.5)
        return Gossip(partners, weights, lambda r: np.arange(period) == r % period, False, gap)
    partners = _partners(matchings.decompose_matchings(graph.edges, graph.num_workers), graph)
    workers = np.arange(graph.num_workers)
    weights = np.where(partners == workers, 0.0, matrices[0][workers, partners])
    ones = np.ones(len(partners), bool)
    return Gossip(partners, weights, lambda round: ones, True, gap)


def matcha(
    graph: graphs.Graph, budget: float, *, seed: int, solve_once: SolveOnce = solve_here
) -> Gossip:
    """Each matching of the graph in a share of the rounds, drawn from the seed.

    Args:
        graph: undirected.
        budget: MATCHA's communication budget, in (0, 1]: the mean share of the matchings that is
            active.
        seed: of the draws.
        solve_once: gives the solution. All processes of a run must have the same, to the bit,
            because the draws of a round are compared with it.

    References:
        Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding up decentralized SGD via matching
        decomposition sampling", 2019, arXiv 1905.09435.
    """
    pieces = matchings.decompose_matchings(graph.edges, graph.num_workers)

    def solved() -> list[float]:
        found = schedules.matcha_schedule(pieces, graph.num_workers, budget)
        return [found.alpha, found.lambda2, found.rho, *found.probabilities.tolist()]

    about = repr((graph.num_workers, budget, [piece.tolist() for piece in pieces]))
    problem = f"matcha-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    alpha, lambda2, rho, *probabilities = solve_once(problem, solved)
    schedule = schedules.Schedule(pieces, np.array(probabilities), alpha, lambda2, rho)
    partners = _partners(pieces, graph)
    weights = np.where(partners == np.arange(graph.num_workers), 0.0, schedule.alpha)
    gap = 1.0 - float(np.sqrt(max(schedule.rho, 0.0)))
    return Gossip(partners, weights, lambda round: schedule.flags(round, seed), False, gap)


def _partners(pieces: tuple[np.ndarray, ...], graph: graphs.Graph) -> np.ndarray:
    """i64[M, n] of matchings."""
    partners = np.tile(np.arange(graph.num_workers), (len(pieces), 1))
    for of_one, edges in zip(partners, pieces, strict=True):
        of_one[edges[:, 0]], of_one[edges[:, 1]] = edges[:, 1], edges[:, 0]
    return partners
