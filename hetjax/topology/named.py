"""The graphs by name: which does a line of configuration describe?"""

import re
from collections.abc import Callable

import numpy as np

from hetjax.parts import options
from hetjax.topology import graphs

GRAPHS: dict[str, Callable[..., graphs.Graph | graphs.PeriodicGraph]] = {
    "ring": graphs.ring,
    "star": graphs.star,
    "complete": graphs.complete,
    "torus": graphs.torus,
    "exponential": graphs.exponential,
    "random": graphs.random_graph,
    "one_peer_exponential": graphs.one_peer_exponential,
}


def make_graph(
    text: str, num_workers: int, *, degree: int = 4, seed: int = 0
) -> graphs.Graph | graphs.PeriodicGraph:
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
        return graphs.random_graph(num_workers, degree=degree, seed=seed)
    if text in GRAPHS:
        return GRAPHS[text](num_workers)
    items = text.replace(",", " ").split()
    if not items or not all(re.fullmatch(r"[0-9]+-[0-9]+", item) for item in items):
        raise ValueError(
            f"{graphs.PLACE}{text!r} is no graph.{options.nearest(text, list(GRAPHS))} Allowed are "
            f"{', '.join(GRAPHS)}, or edges such as '0-1,1-2'."
        )
    return graphs.Graph(
        "edges", num_workers, np.array([item.split("-") for item in items], np.int64)
    )
