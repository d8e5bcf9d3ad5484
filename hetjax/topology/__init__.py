"""Which workers exchange what in a synchronisation.

- `reducer` says what a reducer is; `methods` are the factories, by name in `REDUCERS`.
- `reducers` computes on the devices.
- `graphs` has graphs of workers, `named` makes them by name, and `shown` shows them.
- `matchings` divides the links into matchings.
- `mixing` has fixed weights; `schedules` has MATCHA's random ones.
- `activation` and `spectra` solve for these schedules.
- `gossip` says which exchanges a round has; `links` says how long they take.

A graph and MATCHA's communication budget go in; the exchanges of each round, and what is sent, come
out. Imports `parts`, `values` and, to show itself, `report`. Only NumPy but for `reducers`,
which a run imports.
"""

from collections.abc import Callable

from hetjax.topology.graphs import Graph, PeriodicGraph
from hetjax.topology.matchings import decompose_matchings
from hetjax.topology.methods import all_reduce, d_psgd, gossiping, matcha, ring
from hetjax.topology.mixing import metropolis_weights, mixing_matrices, spectral_gap
from hetjax.topology.named import GRAPHS, make_graph
from hetjax.topology.reducer import Mixing, Reducer, Reduction, RunFacts
from hetjax.topology.schedules import Schedule, matcha_schedule

REDUCERS: dict[str, Callable[..., Reducer]] = {
    "all_reduce": all_reduce,
    "ring": ring,
    "d_psgd": d_psgd,
    "matcha": matcha,
}

__all__ = [
    "GRAPHS",
    "REDUCERS",
    "Graph",
    "Mixing",
    "PeriodicGraph",
    "Reducer",
    "Reduction",
    "RunFacts",
    "Schedule",
    "all_reduce",
    "d_psgd",
    "decompose_matchings",
    "gossiping",
    "make_graph",
    "matcha",
    "matcha_schedule",
    "metropolis_weights",
    "mixing_matrices",
    "ring",
    "spectral_gap",
]
