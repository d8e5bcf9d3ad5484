"""Which workers exchange parameters with which?

A `Graph` holds the undirected links of one pattern for all rounds. A `PeriodicGraph` holds a
cycle of patterns in which each worker receives from one other. Both know nothing of weights
(`mixing`), nor of rounds that use some links only (`matchings`, `schedules`). No JAX here: a
launcher can plan a topology without it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from hetjax.parts import options
from hetjax.topology import shown

PLACE = "reducer.graph: "  # with which messages begin


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Graph(shown.Shown):
    """Undirected connected graph of workers.

    Attributes:
      name: for records and messages.
      num_workers: n ≥ 1.
      edges: i64[num_edges, 2], each link once with i < j, in lexicographic order. The constructor
        brings them into this form: it turns and sorts links, and merges equal ones.

    Raises:
      ValueError: an edge names a worker that is not there or joins one to itself, or the graph
        is not connected.

    Example:
      >>> graph = Graph("path", 3, [(2, 1), (0, 1), (1, 2)])
      >>> graph.edges.tolist(), graph.degrees.tolist(), graph.neighbours(1).tolist()
      ([[0, 1], [1, 2]], [1, 2, 1], [0, 2])
    """

    name: str
    num_workers: int
    edges: np.ndarray

    def __post_init__(self) -> None:
        options.integer(at_least=1).check(f"{PLACE}num_workers", self.num_workers)
        edges = checked_edges(self.edges, self.num_workers)
        check_connected(edges, self.num_workers)
        edges.flags.writeable = False
        object.__setattr__(self, "edges", edges)

    @property
    def degrees(self) -> np.ndarray:
        """The number of neighbours of each worker, i64[num_workers]."""
        return np.bincount(self.edges.ravel(), minlength=self.num_workers)

    def neighbours(self, worker: int) -> np.ndarray:
        """The workers linked to `worker`, i64[k], ascending."""
        low, high = self.edges.T
        return np.concatenate([low[high == worker], high[low == worker]])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PeriodicGraph(shown.Shown):
    """Directed one-peer patterns that take turns: round k uses phase k mod len(phases).

    Attributes:
      name: for records and messages.
      num_workers: n ≥ 1.
      phases: each i64[num_workers], `receives_from`: in that phase worker i averages its own
        parameters with those that worker receives_from[i] sends. It is a permutation, so each
        worker also sends exactly once.

    Raises:
      ValueError: a phase is no permutation or lets a worker receive from itself, or the phases
        together do not connect the workers.

    Example:
      >>> graph = PeriodicGraph("shift", 3, ([2, 0, 1],))
      >>> graph.phases[0].tolist()
      [2, 0, 1]
    """

    name: str
    num_workers: int
    phases: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        options.integer(at_least=1).check(f"{PLACE}num_workers", self.num_workers)
        workers = np.arange(self.num_workers)
        phases = tuple(np.array(phase) for phase in self.phases)
        for number, phase in enumerate(phases):
            if phase.dtype.kind not in "iu" or not np.array_equal(np.sort(phase), workers):
                raise ValueError(
                    f"{PLACE}phase {number} is {phase.tolist()}, must be each worker exactly once"
                )
            still = np.flatnonzero(phase == workers)
            if self.num_workers > 1 and still.size:
                raise ValueError(f"{PLACE}in phase {number} worker {still[0]} receives from itself")
            phase.flags.writeable = False
        # As many arcs enter a worker as leave it, so connected implies strongly connected.
        pairs = np.concatenate([np.stack([workers, phase], axis=1) for phase in phases])
        check_connected(pairs, self.num_workers)
        object.__setattr__(self, "phases", phases)


def ring(num_workers: int) -> Graph:
    """Worker i and its neighbours i ± 1 mod n.

    Example:
      >>> ring(4).edges.tolist()
      [[0, 1], [0, 3], [1, 2], [2, 3]]
    """
    return _linked("ring", num_workers, [np.roll(np.arange(num_workers), -1)])


def star(num_workers: int) -> Graph:
    """Worker 0 and each of the others.

    Example:
      >>> star(4).edges.tolist()
      [[0, 1], [0, 2], [0, 3]]
    """
    others = np.arange(1, num_workers)
    return Graph("star", num_workers, np.stack([np.zeros_like(others), others], axis=1))


def complete(num_workers: int) -> Graph:
    """Each worker and each other: n(n − 1)/2 links.

    Example:
      >>> complete(3).edges.tolist()
      [[0, 1], [0, 2], [1, 2]]
    """
    return Graph("complete", num_workers, np.stack(np.triu_indices(num_workers, 1), axis=1))


def torus(num_workers: int) -> Graph:
    """A rows × columns grid that wraps around, rows · columns = n, as near to a square as can be.

    Worker i is at row i // columns and column i mod columns. A side of 2 has one link, not two.

    Raises:
      ValueError: n is a prime above 3, for which the grid would be a ring.

    Example:
      >>> torus(6).edges.tolist()  # 2 × 3
      [[0, 1], [0, 2], [0, 3], [1, 2], [1, 4], [2, 5], [3, 4], [3, 5], [4, 5]]
    """
    options.integer(at_least=1).check(f"{PLACE}num_workers", num_workers)
    # The largest divisor of n that is at most √n.
    rows = next(rows for rows in range(int(num_workers**0.5), 0, -1) if num_workers % rows == 0)
    if rows == 1 and num_workers > 3:
        raise ValueError(
            f"{PLACE}a torus of {num_workers} workers is not possible, since it is prime; add or "
            "leave out one"
        )
    grid = np.arange(num_workers).reshape(rows, -1)
    return _linked("torus", num_workers, [np.roll(grid, -1, axis).ravel() for axis in (0, 1)])


def exponential(num_workers: int) -> Graph:
    """Worker i and i ± 2^k mod n for all 2^k < n: about 2·log₂ n neighbours each.

    Example:
      >>> exponential(8).neighbours(0).tolist()
      [1, 2, 4, 6, 7]

    References:
      Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential graph is provably efficient for
      decentralized deep training", 2021, arXiv 2110.13363. Its graph is directed (i receives
      from i − 2^k only). This one has the links in both directions, so W is symmetric.
    """
    return _linked("exponential", num_workers, _powers_away(num_workers))


def random_graph(num_workers: int, *, degree: int = 4, seed: int = 0) -> Graph:
    """A random cycle through all workers, and random matchings until degrees are about `degree`.

    The cycle connects it. A worker has at most `degree` neighbours. A few may have fewer, such as
    one if n·degree is odd, or two that are linked already. With degree ≥ n − 1 it is the complete
    graph.

    Args:
      num_workers: n.
      degree: neighbours of each worker, ≥ 2.
      seed: the same seed gives the same graph.

    Raises:
      ValueError: degree is below 2.

    Example:
      >>> random_graph(10, degree=3).neighbours(0).size
      3
    """
    options.integer(at_least=2).check(f"{PLACE}degree", degree)
    if degree >= num_workers - 1:
        return dataclasses.replace(complete(num_workers), name="random")
    rng = np.random.default_rng(seed)
    cycle = rng.permutation(num_workers)
    codes = _codes(cycle, np.roll(cycle, -1))
    degrees = np.full(num_workers, 2)
    # Pairs that are linked already are left out, so the last few links may take some draws.
    for _ in range(int(degree) + 30):
        short = rng.permutation(np.flatnonzero(degrees < degree))
        half = short.size // 2
        if not half:
            break
        codes = _distinct(np.append(codes, _codes(short[:half], short[half : 2 * half])))
        degrees = np.bincount(np.concatenate(_ends(codes)), minlength=num_workers)
    return Graph("random", num_workers, np.stack(_ends(codes), axis=1))


def one_peer_exponential(num_workers: int) -> PeriodicGraph:
    """In phase t worker i receives from (i − 2^t) mod n, for t = 0 … ⌈log₂ n⌉ − 1.

    Each worker sends and receives once a round. With n a power of two, the averages over one
    period are exactly those over all workers.

    Example:
      >>> [phase.tolist() for phase in one_peer_exponential(4).phases]
      [[3, 0, 1, 2], [2, 3, 0, 1]]

    References:
      Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential graph is provably efficient for
      decentralized deep training", 2021, arXiv 2110.13363.
    """
    return PeriodicGraph("one_peer_exponential", num_workers, tuple(_powers_away(num_workers)))


GRAPHS: dict[str, Callable[..., Graph | PeriodicGraph]] = {
    "ring": ring,
    "star": star,
    "complete": complete,
    "torus": torus,
    "exponential": exponential,
    "random": random_graph,
    "one_peer_exponential": one_peer_exponential,
}


def make_graph(
    text: str, num_workers: int, *, degree: int = 4, seed: int = 0
) -> Graph | PeriodicGraph:
    """Returns the graph that a line of configuration describes.

    Args:
      text: a name of `GRAPHS`, or the edges, such as "0-1,1-2,2-3" (commas or blanks between).
      num_workers: n.
      degree: neighbours of each worker in a random graph; the others ignore it.
      seed: of a random graph; the others ignore it.

    Raises:
      ValueError: the text is neither, or the graph is not possible with this many workers.

    Example:
      >>> make_graph("0-1 1-2", 3).degrees.tolist()
      [1, 2, 1]
    """
    if text == "random":
        return random_graph(num_workers, degree=degree, seed=seed)
    if text in GRAPHS:
        return GRAPHS[text](num_workers)
    items = text.replace(",", " ").split()
    if not items or not all(re.fullmatch(r"[0-9]+-[0-9]+", item) for item in items):
        raise ValueError(
            f"{PLACE}{text!r} is no graph.{options.nearest(text, list(GRAPHS))} Allowed are "
            f"{', '.join(GRAPHS)}, or edges such as '0-1,1-2'."
        )
    return Graph("edges", num_workers, np.array([item.split("-") for item in items], np.int64))


def checked_edges(edges: ArrayLike, num_workers: int) -> np.ndarray:
    """Returns the edges as i64[E, 2] with i < j, each once, sorted; names the first wrong one."""
    pairs = np.asarray(edges)
    if not pairs.size:
        return np.zeros((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(
            f"{PLACE}edges are {pairs.dtype}{list(pairs.shape)}, must be integers [num_edges, 2]"
        )
    outside = np.flatnonzero(((pairs < 0) | (pairs >= num_workers)).any(axis=1))
    if outside.size:
        i, j = pairs[outside[0]]
        raise ValueError(
            f"{PLACE}edge {i}-{j} names a worker that is not one of 0 to {num_workers - 1}"
        )
    loops = np.flatnonzero(pairs[:, 0] == pairs[:, 1])
    if loops.size:
        i = pairs[loops[0], 0]
        raise ValueError(f"{PLACE}edge {i}-{i} joins worker {i} to itself; leave it out")
    codes = _distinct(_codes(*pairs.astype(np.int64).T))
    return np.stack(_ends(codes), axis=1)


def check_connected(edges: np.ndarray, num_workers: int) -> None:
    """Raises a ValueError that names a worker which no path of `edges` joins to worker 0."""
    from scipy import sparse

    links = sparse.coo_matrix((np.ones(len(edges)), tuple(edges.T)), (num_workers, num_workers))
    _, part = sparse.csgraph.connected_components(links, directed=False)
    apart = np.flatnonzero(part != part[0])
    if apart.size:
        raise ValueError(
            f"{PLACE}worker {apart[0]} is not reachable from worker 0; add an edge, such as "
            f"0-{apart[0]}"
        )


def _linked(name: str, num_workers: int, others: Sequence[np.ndarray]) -> Graph:
    """The graph that links worker i with `each[i]` of the others, but not with itself."""
    edges = np.stack([np.tile(np.arange(num_workers), len(others)), np.concatenate(others)], axis=1)
    return Graph(name, num_workers, edges[edges[:, 0] != edges[:, 1]])


def _powers_away(num_workers: int) -> list[np.ndarray]:
    """(i − 2^t) mod n of each worker i, for all 2^t < n; of one worker itself."""
    powers = range(max((num_workers - 1).bit_length(), 1))
    return [np.roll(np.arange(num_workers), 1 << power) for power in powers]


def _codes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Edges as single numbers low · 2³¹ + high, whose order is the lexicographic one."""
    return (np.minimum(first, second) << 31) | np.maximum(first, second)


def _distinct(codes: np.ndarray) -> np.ndarray:
    """np.unique, by sorting: hashing 1.7 million codes took 1.4 s, sorting 0.02 s."""
    codes = np.sort(codes)
    return codes[np.append(True, codes[1:] != codes[:-1])]


def _ends(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return codes >> 31, codes & ((1 << 31) - 1)
