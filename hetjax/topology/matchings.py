"""How are the links of a graph divided into sets that can all be used at the same time?

In a matching each worker has at most one link. So the exchanges of one matching run in parallel,
and a round takes as long as its matchings one after another. The fewer matchings the better: at
least Δ, the largest degree, are needed, and Δ + 1 are always enough. A matching is a colour of an
edge colouring. Both colourings here use one step: exchanging two colours along a whole path of
these colours.
"""

import itertools

import numpy as np
from numpy.typing import ArrayLike

from hetjax.topology import graphs

_TRIES = 100  # random exchanges before an edge counts as not colourable with Δ colours

Partners = list[list[int]]
"""partners[worker][colour]: the other end of the worker's edge of that colour, or -1."""


def decompose_matchings(edges: ArrayLike, num_workers: int) -> tuple[np.ndarray, ...]:
    """Returns disjoint matchings that together are all edges, Δ or Δ + 1 of them.

    Δ is the largest degree. It first tries Δ colours, which succeeds for all bipartite graphs
    (even rings, stars, even grids) and most others. If that fails it takes Misra and Gries' Δ + 1.
    The same edges always give the same matchings.

    Args:
      edges: i64[num_edges, 2], undirected, in any order; equal ones are merged.
      num_workers: n.

    Returns:
      Tuple of i64[k, 2], each with disjoint edges i < j, sorted.

    Raises:
      ValueError: an edge names a worker that is not there or joins one to itself.

    Example:
      >>> [matching.tolist() for matching in decompose_matchings([(0, 1), (1, 2), (2, 3)], 4)]
      [[[0, 1], [2, 3]], [[1, 2]]]

    References:
      Misra, Gries, "A constructive proof of Vizing's theorem", Information Processing
      Letters 41, 1992. Matchings as the unit of communication: Wang, Sahu, Yang, Joshi, Kar,
      "MATCHA: Speeding up decentralized SGD via matching decomposition sampling", 2019,
      arXiv 1905.09435.
    """
    edges = graphs.checked_edges(edges, num_workers)
    if not len(edges):
        return ()
    pairs = [(int(i), int(j)) for i, j in edges]
    most = int(np.bincount(edges.ravel()).max())
    partners = None
    if len(pairs) <= most * (num_workers // 2):  # no matching is larger than n // 2
        partners = _colour_by_paths(pairs, num_workers, most)
    if partners is None:
        partners = _colour_by_fans(pairs, num_workers, most + 1)
    colours = np.array([partners[i].index(j) for i, j in pairs])
    return tuple(edges[colours == colour] for colour in np.unique(colours))


def _colour_by_paths(
    pairs: list[tuple[int, int]], num_workers: int, num_colours: int
) -> Partners | None:
    """Partners with at most `num_colours` colours, or None if an edge finds no colour."""
    rng = np.random.default_rng(0)
    partners = [[-1] * num_colours for _ in range(num_workers)]
    for i, j in pairs:
        for _ in range(_TRIES):
            colour = _freed_colour(partners, i, j)
            if colour is not None:
                break
            free, other = _free(partners, i)[0], int(rng.integers(num_colours))
            _exchange(partners, _path(partners, i, other, free), other, free)
        else:
            return None
        partners[i][colour], partners[j][colour] = j, i
    return partners


def _freed_colour(partners: Partners, i: int, j: int) -> int | None:
    """A colour free at both ends, after an exchange along a path from j if needed."""
    free_i, free_j = _free(partners, i), _free(partners, j)
    for colour in free_i:
        if partners[j][colour] < 0:
            return colour
    for first in free_i:
        for second in free_j:
            path = _path(partners, j, first, second)
            if path[-1] != i:
                _exchange(partners, path, first, second)
                return first
    return None


def _colour_by_fans(pairs: list[tuple[int, int]], num_workers: int, num_colours: int) -> Partners:
    """Partners by Misra and Gries: `num_colours` = Δ + 1 always suffice."""
    partners = [[-1] * num_colours for _ in range(num_workers)]
    for centre, end in pairs:
        # A fan: the edge to each member has a colour that is free at the member before it.
        fan, grown = [end], True
        while grown:
            members = [partners[centre][colour] for colour in _free(partners, fan[-1])]
            following = [worker for worker in members if worker >= 0 and worker not in fan]
            fan += following[:1]
            grown = bool(following)
        kept, colour = _free(partners, centre)[0], _free(partners, fan[-1])[0]
        _exchange(partners, _path(partners, centre, colour, kept), colour, kept)
        # `colour` is now free at the centre. Up to the first member at which it is free, too, the
        # fan is still valid. Move its colours down by one member; the last gets `colour`.
        last = next(place for place, w in enumerate(fan) if partners[w][colour] < 0)
        for worker, following_worker in itertools.pairwise(fan[: last + 1]):
            moved = partners[centre].index(following_worker)
            partners[following_worker][moved] = -1
            partners[centre][moved], partners[worker][moved] = worker, centre
        partners[centre][colour], partners[fan[last]][colour] = fan[last], centre
    return partners


def _free(partners: Partners, worker: int) -> list[int]:
    return [colour for colour, partner in enumerate(partners[worker]) if partner < 0]


def _path(partners: Partners, worker: int, first: int, second: int) -> list[int]:
    """The path from `worker`, where `second` is free, with the colours first, second, first…"""
    path = [worker]
    while (following := partners[path[-1]][first]) >= 0:
        path.append(following)
        first, second = second, first
    return path


def _exchange(partners: Partners, path: list[int], first: int, second: int) -> None:
    for worker in path:
        own = partners[worker]
        own[first], own[second] = own[second], own[first]
