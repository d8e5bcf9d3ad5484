"""The reducers: their options, and what they plan.

Only NumPy. `reducers.py` has what runs on the devices; it is imported when a run makes that.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any

from hetjax import parts
from hetjax.parts import options
from hetjax.topology import gossip as gossip_lib
from hetjax.topology import graphs, links
from hetjax.topology.reducer import Reducer, RunFacts
from hetjax.wires import FLOAT32, WIRES

_MATCHA_WORKERS = 1000  # its schedule takes eigenvalues of n x n matrices
_COMPLETE_WORKERS = 4096  # 8 million links in the simulator

GraphOption = Annotated[
    str | graphs.Graph | graphs.PeriodicGraph,
    options.text_or_object(
        "a graph's name, an edge list such as '0-1,1-2,2-0', or a Graph",
        graphs.Graph,
        graphs.PeriodicGraph,
        says=f"the graph of neighbours: {', '.join(graphs.GRAPHS)}, or edges such as '0-1,1-2,2-0'",
    ),
]
Degree = Annotated[
    int, parts.integer(at_least=2, unit="neighbours", says="of each worker, of graph='random'")
]
GraphSeed = Annotated[int, parts.integer(says="of graph='random'")]
Budget = Annotated[
    float,
    parts.number(
        above=0.0,
        at_most=1.0,
        says="the paper's communication budget: share of the links used, in the mean",
    ),
]


def _on_devices() -> Any:
    """The module that needs JAX."""
    return importlib.import_module("hetjax.topology.reducers")


@parts.factory
def all_reduce(
    wire: Annotated[
        str, parts.choice(*WIRES, says="of a contribution's numbers, where the host adds them up")
    ] = FLOAT32,
) -> Reducer:
    """The sum over all workers, by `psum`: one global gradient, replicas stay equal.

    With a `wire` of fewer bytes a worker hands in rounded numbers, and what is left the next time.
    The sum is of float32. It is for workers that come and go, and `local="virtual"`.

    References:
        Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
        2019, arXiv 1901.09847.
    """
    return Reducer(
        lambda facts: _on_devices().all_reduce(),
        keeps_replicas_equal=True,
        is_plain_sum=True,
        network=_sum_network,
        wire=wire,
    )


@parts.factory
def ring() -> Reducer:
    """The same sum, passed round a ring by reduce-scatter and all-gather, to study the ring."""
    return Reducer(
        lambda facts: _on_devices().ring(facts.num_workers),
        keeps_replicas_equal=True,
        network=_sum_network,
    )


def _sum_network(facts: RunFacts, param_bytes: float, link: links.LinkModel) -> links.Network:
    return links.of_sum(facts.num_workers, param_bytes, link)


@parts.factory
def d_psgd(
    *, graph: GraphOption = "ring", degree: Degree = 4, graph_seed: GraphSeed = 0
) -> Reducer:
    """x_i <- sum_j W_ij x_j + update_i, over all edges of the graph, or over one phase a round.

    `update_i` is the optimiser's, from the worker's own gradients at its parameters before they
    are mixed. So update and mixing do not wait for each other. A worker that finished nothing is
    mixed and not updated.

    Args:
        graph: a name, an edge list, or a graph of as many workers as the run has.
        degree: neighbours of each worker, of graph='random'.
        graph_seed: of graph='random'.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms? A case study
        for decentralized parallel stochastic gradient descent", 2017, arXiv 1705.09056.
    """
    made = functools.partial(_graph, graph, degree=degree, seed=graph_seed)

    def network(facts: RunFacts, param_bytes: float, link: links.LinkModel) -> links.Network:
        n = facts.num_workers
        if graph == "complete" and n > _COMPLETE_WORKERS:
            raise ValueError(
                f"reducer.graph: 'complete' is of at most {_COMPLETE_WORKERS} workers, got {n}; "
                "take all_reduce, the same mean"
            )
        return links.of_graph(made(n), link.secs(param_bytes))

    return gossiping(
        lambda facts: gossip_lib.d_psgd(made(facts.num_workers)), before_update=True
    )._replace(network=network)


@parts.factory
def matcha(
    *,
    graph: GraphOption = "ring",
    budget: Budget = 0.5,
    degree: Degree = 4,
    graph_seed: GraphSeed = 0,
) -> Reducer:
    """x_i <- sum_j W_ij (x_j + update_j), over the matchings that are active in the round.

    A matching that is not active costs nothing: it is a branch that no worker takes.

    Args:
        graph: a name, an edge list, or an undirected graph of as many workers as the run has.
        budget: the paper's communication budget: the mean share of the links that a round uses. It
            is not the budget of a round, which counts microbatches.
        degree: neighbours of each worker, of graph='random'.
        graph_seed: of graph='random'.

    References:
        Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding up decentralized SGD via matching
        decomposition sampling", 2019, arXiv 1905.09435.
    """

    def plan(facts: RunFacts) -> gossip_lib.Gossip:
        found = _graph(graph, facts.num_workers, degree=degree, seed=graph_seed)
        if isinstance(found, graphs.PeriodicGraph):
            raise ValueError(
                f"reducer.graph: got {found.name!r}, whose links go one way; matcha needs an "
                "undirected graph, such as 'ring'"
            )
        return gossip_lib.matcha(found, budget, seed=facts.seed, solve_once=facts.solve_once)

    return gossiping(plan, before_update=False)._replace(most_workers=_MATCHA_WORKERS)


def gossiping(plan: Callable[[RunFacts], gossip_lib.Gossip], *, before_update: bool) -> Reducer:
    """A reducer whose workers exchange parameters by a plan.

    Args:
        plan: `facts -> Gossip`; called once for each run.
        before_update: True: the update, computed at the parameters as they were, is added to the
            mixed ones (D-PSGD). False: the updated parameters are mixed (MATCHA).
    """
    kept = functools.lru_cache(4)(plan)

    def network(facts: RunFacts, param_bytes: float, link: links.LinkModel) -> links.Network:
        return links.of_gossip(kept(facts), facts.num_workers, link.secs(param_bytes))

    return Reducer(
        lambda facts: _on_devices().gossiping(kept(facts), before_update=before_update),
        keeps_replicas_equal=False,
        gossips=True,
        network=network,
    )


def _graph(
    graph: str | graphs.Graph | graphs.PeriodicGraph, num_workers: int, *, degree: int, seed: int
) -> graphs.Graph | graphs.PeriodicGraph:
    if isinstance(graph, str):
        return graphs.make_graph(graph, num_workers, degree=degree, seed=seed)
    links.check_size(f"reducer.graph: {graph.name!r}", graph.num_workers, num_workers)
    return graph
