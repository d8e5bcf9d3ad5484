"""How long the exchanges of a round take between workers, over links of a given speed.

Only NumPy. Assumes that links are equal and do not disturb each other.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetjax import parts
from hetjax.topology import gossip as gossip_lib
from hetjax.topology import graphs


@dataclasses.dataclass(frozen=True)
class LinkModel:
    """Seconds of a message: latency_secs + bytes / bytes_per_sec; the default takes no time.

    Args:
      latency_secs: of every message, ≥ 0.
      bytes_per_sec: of each worker's link, > 0, possibly infinite.

    Raises:
      ValueError: a number is out of range.

    Example:
      >>> LinkModel(0.5, 100.0).secs(200)
      2.5
    """

    latency_secs: float = 0.0
    bytes_per_sec: float = math.inf

    def __post_init__(self) -> None:
        parts.number(at_least=0.0).check("latency_secs", self.latency_secs)
        if not self.bytes_per_sec > 0:
            raise ValueError(f"bytes_per_sec is {self.bytes_per_sec}, must be above 0")

    def secs(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency_secs + num_bytes / self.bytes_per_sec


class Exchange(NamedTuple):
    """The communication of a round, between n workers."""

    copies_sent: np.ndarray  # f64[n]
    secs: float  # if all workers wait for all
    own_secs: np.ndarray  # f64[n], of each worker's own messages
    latest: Callable[[np.ndarray], np.ndarray]
    """f64[n] -> f64[n]: the latest time of each worker and those that it receives from."""


Network = Callable[[int], Exchange]


def of_sum(num_workers: int, param_bytes: float, link: LinkModel) -> Network:
    """The sum over all workers, round a ring: the same in every round."""
    copies = gossip_lib.ring_copies(num_workers)
    secs = 2 * (num_workers - 1) * link.latency_secs + copies * param_bytes / link.bytes_per_sec
    everybody = Exchange(
        np.full(num_workers, copies),
        secs,
        np.full(num_workers, secs),
        lambda ends: np.full_like(ends, ends.max()),
    )
    return lambda round: everybody


def of_graph(graph: graphs.Graph | graphs.PeriodicGraph, copy_secs: float) -> Network:
    """All links of a graph in every round, or its phases in turn; a copy takes `copy_secs`."""
    if isinstance(graph, graphs.PeriodicGraph):
        turns = [_in_turn(phase[None], copy_secs) for phase in graph.phases]
        return lambda round: turns[round % len(turns)]
    degrees, (low, high) = graph.degrees, graph.edges.T

    def latest(ends: np.ndarray) -> np.ndarray:
        out = ends.copy()
        np.maximum.at(out, low, ends[high])
        np.maximum.at(out, high, ends[low])
        return out

    copies = degrees.astype(np.float64)
    neighbours = Exchange(copies, float(degrees.max()) * copy_secs, degrees * copy_secs, latest)
    return lambda round: neighbours


def of_gossip(gossip: gossip_lib.Gossip, num_workers: int, copy_secs: float) -> Network:
    """The exchanges of a plan that are active in a round, one after another.

    Raises:
      ValueError: the plan has another number of workers.
    """
    check_size("the schedule", gossip.partners.shape[1], num_workers)
    return lambda round: _in_turn(gossip.partners[gossip.active(round)], copy_secs)


def _in_turn(partners: np.ndarray, copy_secs: float) -> Exchange:
    """Exchanges one after another: i64[k, n], from which each worker receives; itself: none."""
    receives = partners != np.arange(partners.shape[1])
    copies = receives.sum(axis=0).astype(np.float64)
    return Exchange(
        copies,
        float(receives.any(axis=1).sum()) * copy_secs,
        copies * copy_secs,
        lambda ends: np.maximum(ends, np.max(ends[partners], axis=0, initial=-np.inf)),
    )


def check_size(what: str, found: int, num_workers: int) -> None:
    """Refuses what was made for another number of workers than the run or cluster has."""
    if found != num_workers:
        raise ValueError(f"{what} has {found} workers and the cluster {num_workers}: unequal")
