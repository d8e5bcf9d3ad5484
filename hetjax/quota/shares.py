"""How are whole things divided in given proportions, so that nothing is lost?

Quotas of a round and shares of a data set both need whole numbers whose sum is exact.
"""

import numpy as np
from numpy.typing import ArrayLike

from hetjax.quota import solver


def largest_remainder(
    proportions: ArrayLike, total: int, *, caps: ArrayLike | None = None
) -> np.ndarray:
    """Returns whole shares in the given proportions, whose sum is exactly `total`.

    Worker i gets ⌊total·p_i/Σp⌋. The things still left go to the largest fractions, ties to the
    lowest rank. A worker whose share is above its cap gets its cap, and the others share the rest
    in their proportions. If only workers of proportion 0 have room, they share equally.

    Args:
      proportions: f64[n], ≥ 0 and not all 0; they need not sum to 1.
      total: number of things to divide, ≥ 0.
      caps: i64[n], the most each may get. None: no limit.

    Returns:
      i64[n], the shares.

    Raises:
      ValueError: a proportion is negative or not finite, all are 0, or the caps hold less.

    Example:
      >>> largest_remainder([4, 3, 2, 1], 16).tolist()
      [6, 5, 3, 2]
      >>> largest_remainder([4, 3, 2, 1], 16, caps=[4, 16, 16, 16]).tolist()
      [4, 6, 4, 2]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272: static allocation in given proportions.
    """
    weights = np.asarray(proportions, np.float64)
    if weights.ndim != 1 or not weights.size:
        raise ValueError(
            f"proportions have shape {weights.shape}; give one number for each worker."
        )
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ValueError(
            f"proportions are {weights.tolist()}; they must be finite, ≥ 0, and not all 0."
        )
    total, limits = solver.checked_counts(weights.size, total, caps)
    shares = np.zeros_like(limits)
    free = limits > 0
    while shares.sum() < total:
        if not weights[free].any():
            weights = np.ones_like(weights)
        open_weights = np.where(free, weights, 0.0)
        ideal = open_weights / open_weights.sum() * (total - shares[~free].sum())
        over = free & (ideal > limits)
        if over.any():
            shares[over] = limits[over]
            free &= ~over
            continue
        shares[free] = np.floor(ideal[free])
        room = np.flatnonzero(free & (shares < limits))
        order = room[np.argsort(shares[room] - ideal[room], kind="stable")]
        shares[order[: total - shares.sum()]] += 1
        free &= shares < limits
    return shares


def equal_split(total: int, caps: np.ndarray) -> np.ndarray:
    """The same share for every worker whose cap is above 0, i64[n]."""
    present = caps > 0
    return largest_remainder(present | ~present.any(), total, caps=caps)


def are_allowed(quotas: np.ndarray, total: int, caps: np.ndarray) -> bool:
    """Whether the quotas have this sum and keep to the caps."""
    return bool(quotas.sum() == total and (quotas <= caps).all())
