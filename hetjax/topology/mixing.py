"""With which fixed weights do workers average, and how fast does that bring them together?

Metropolis weights for a graph, and their rates. A round x ← W x keeps the
mean of the parameters, because W is doubly stochastic. The host plans in float64, once before
training. `gossip` applies the weights; `schedules` has random ones.
"""

from collections.abc import Sequence

import numpy as np

from hetjax.topology import graphs


def weighted_laplacian(edges: np.ndarray, weights: np.ndarray, num_workers: int) -> np.ndarray:
    """L = D − A, f64[n, n], of edges i64[E, 2], each given once, and their weights f64[E]."""
    matrix = np.zeros((num_workers, num_workers))
    first, second = edges.T
    np.subtract.at(matrix, (first, second), weights)
    np.subtract.at(matrix, (second, first), weights)
    matrix[np.diag_indices(num_workers)] = -matrix.sum(axis=1)
    return matrix


def metropolis_weights(graph: graphs.Graph) -> np.ndarray:
    """Returns W, f64[n, n]: W_ij = 1/(1 + max(deg_i, deg_j)) on links, the rest on the diagonal.

    Symmetric, doubly stochastic and without negative entries for every graph.

    Args:
      graph: of n workers.

    Example:
      >>> metropolis_weights(graphs.star(3)).round(3).tolist()
      [[0.333, 0.333, 0.333], [0.333, 0.667, 0.0], [0.333, 0.0, 0.667]]

    References:
      Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform
      centralized algorithms?", 2017, arXiv 1705.09056, asks for such a W and does not choose one.
    """
    weights = 1.0 / (1 + graph.degrees[graph.edges].max(axis=1))
    return np.eye(graph.num_workers) - weighted_laplacian(graph.edges, weights, graph.num_workers)


def mixing_matrices(graph: graphs.Graph | graphs.PeriodicGraph) -> tuple[np.ndarray, ...]:
    """Returns the W of each phase, f64[n, n]; round k uses entry k mod the length.

    One Metropolis matrix for a `Graph`. For a `PeriodicGraph` (I + P)/2 for each phase, where the
    permutation P gives each worker the parameters that it receives.

    Args:
      graph: of n workers.

    Example:
      >>> [w.tolist() for w in mixing_matrices(graphs.one_peer_exponential(2))]
      [[[0.5, 0.5], [0.5, 0.5]]]
    """
    if isinstance(graph, graphs.Graph):
        return (metropolis_weights(graph),)
    identity = np.eye(graph.num_workers)
    return tuple(0.5 * (identity + identity[phase]) for phase in graph.phases)


def spectral_gap(matrices: Sequence[np.ndarray]) -> float:
    """Returns 1 − σ^(1/T), σ = ‖W_T … W_1 − 11ᵀ/n‖₂, for the T matrices of a period.

    For one symmetric W that is `1 − max(|λ₂|, |λ_n|)`. 1: the averages are exact after a period; 0:
    the workers never come together.

    Args:
      matrices: f64[n, n] each, doubly stochastic, in the order of the rounds.

    Example:
      >>> round(spectral_gap(mixing_matrices(graphs.ring(4))), 6)
      0.666667
    """
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    num_workers = len(product)
    norm = float(np.linalg.norm(product - 1 / num_workers, 2))
    # A root would magnify rounding: (1e-16)^(1/10) is 0.025.
    norm = 0.0 if norm < num_workers * np.finfo(np.float64).eps else norm
    return 1 - norm ** (1 / len(matrices))
