"""Which workers exchange what in a synchronisation.

- `reducer` says what a reducer is; `methods` are the factories, by name in `REDUCERS`.
- `reducers` computes on the devices.
- `graphs` has graphs of workers, also by name, and `shown` shows them.
- `matchings` divides the links into matchings.
- `mixing` has fixed weights; `schedules` has MATCHA's random ones.
- `activation` and `spectra` solve for these schedules.
- `gossip` says which exchanges a round has; `links` says how long they take.

A graph and MATCHA's communication budget go in; the exchanges of each round, and what is sent, come
out. Imports `parts`, `values` and, to show itself, `report`. Only NumPy but for `reducers`,
which a run imports.
"""

from collections.abc import Callable

from hetjax import parts
from hetjax.topology.graphs import GRAPHS as GRAPHS
from hetjax.topology.graphs import Graph as Graph
from hetjax.topology.graphs import PeriodicGraph as PeriodicGraph
from hetjax.topology.graphs import make_graph as make_graph
from hetjax.topology.matchings import decompose_matchings as decompose_matchings
from hetjax.topology.methods import all_reduce as all_reduce
from hetjax.topology.methods import d_psgd as d_psgd
from hetjax.topology.methods import gossiping as gossiping
from hetjax.topology.methods import matcha as matcha
from hetjax.topology.methods import ring as ring
from hetjax.topology.mixing import metropolis_weights as metropolis_weights
from hetjax.topology.mixing import mixing_matrices as mixing_matrices
from hetjax.topology.mixing import spectral_gap as spectral_gap
from hetjax.topology.reducer import Mixing as Mixing
from hetjax.topology.reducer import Reducer as Reducer
from hetjax.topology.reducer import Reduction as Reduction
from hetjax.topology.reducer import RunFacts as RunFacts
from hetjax.topology.schedules import Schedule as Schedule
from hetjax.topology.schedules import matcha_schedule as matcha_schedule

REDUCERS: dict[str, Callable[..., Reducer]] = parts.by_name(all_reduce, ring, d_psgd, matcha)
