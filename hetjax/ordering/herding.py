"""How good is an order of the examples? The herding bound.

With z = g − mean over all examples, H is the largest norm that a prefix sum of the z reaches in
an epoch, all workers together. A balancing order makes it small. Its ratio to that of random
reshuffling can be compared between tasks. For vectors that are all at hand, on the host, in
float64.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

_CHUNK_NUMBERS = 1 << 19  # gathered at once; 4 MiB of float64


def parallel_herding_bound(vectors: ArrayLike, orders: ArrayLike) -> tuple[float, float]:
    """Returns H(π) = max_l ‖Σ_{t≤l} Σ_j z_{j,π_j(t)}‖ in the ∞-norm and in the 2-norm.

    Args:
      vectors: f[n, m, d], for each of n workers a vector for each of its m examples.
      orders: i[n, m], for each worker a permutation of 0 .. m−1: the examples by timestep.

    Returns:
      (inf_norm, two_norm), in the unit of the vectors. Each is the largest over l of its own norm.

    Raises:
      ValueError: a shape does not fit, or a row of `orders` is not a permutation.

    Example:
      >>> vectors = np.array([[[1.0], [2.0], [-1.0], [-2.0]]])
      >>> parallel_herding_bound(vectors, [[0, 1, 2, 3]])
      (3.0, 3.0)
      >>> parallel_herding_bound(vectors, [[0, 2, 1, 3]])
      (2.0, 2.0)

    References:
      Guo, Cooper, Li, De Sa et al., "CD-GraB: Coordinating Distributed Example Orders for
      Provably Accelerated Training", 2023, arXiv 2302.00845, which bounds the ∞-norm; the
      2-norm is not from there.
    """
    vectors, orders = np.asarray(vectors), np.asarray(orders)
    _check(vectors, orders)
    num_workers, _, dim = vectors.shape
    mean = np.zeros(dim)
    for part in _chunks(vectors, orders):
        mean += part.sum(axis=0)
    mean /= orders.size
    prefix = np.zeros(dim)
    inf_norm = two_norm = 0.0
    for part in _chunks(vectors, orders):
        part -= num_workers * mean
        part[0] += prefix
        sums = np.cumsum(part, axis=0, out=part)
        prefix = sums[-1].copy()
        # np.maximum keeps a NaN, which max() would drop.
        inf_norm = float(np.maximum(inf_norm, np.abs(sums).max()))
        two_norm = float(np.maximum(two_norm, np.sqrt(np.einsum("td,td->t", sums, sums).max())))
    return inf_norm, two_norm


def _check(vectors: np.ndarray, orders: np.ndarray) -> None:
    if vectors.ndim != 3 or not vectors.size:
        raise ValueError(f"vectors has shape {vectors.shape}; it must be f[n, m, d], all ≥ 1")
    if orders.shape != vectors.shape[:2] or not np.issubdtype(orders.dtype, np.integer):
        raise ValueError(
            f"orders is {orders.dtype}{list(orders.shape)}; it must be i{list(vectors.shape[:2])}"
        )
    wrong = (np.sort(orders, axis=1) != np.arange(vectors.shape[1])).any(axis=1)
    if wrong.any():
        raise ValueError(f"the order of worker {np.argmax(wrong)} is not a permutation")


def _chunks(vectors: np.ndarray, orders: np.ndarray) -> Iterator[np.ndarray]:
    """Σ_j g_{j,π_j(t)} as f64[c, d], for c consecutive timesteps t at a time."""
    num_workers, num_examples, dim = vectors.shape
    size = max(1, _CHUNK_NUMBERS // (num_workers * dim))
    workers = np.arange(num_workers)[:, None]
    for start in range(0, num_examples, size):
        yield vectors[workers, orders[:, start : start + size]].sum(axis=0, dtype=np.float64)
