import functools

import numpy as np
import pytest

from hetjax.topology import graphs
from tests.launcher import launches

UNDIRECTED = [name for name, make in graphs.GRAPHS.items() if isinstance(make(4), graphs.Graph)]
make = graphs.make_graph
Graph, Periodic = (functools.partial(g, "any") for g in (graphs.Graph, graphs.PeriodicGraph))
SIZES = [1, 2, 3, 4, 6, 8, 9, 12, 16, 25, 30]


def test_edges_are_turned_sorted_and_merged():
    graph = graphs.Graph("any", 4, [(3, 1), (0, 2), (1, 3), (1, 0)])
    assert graph.edges.tolist() == [[0, 1], [0, 2], [1, 3]]
    assert graph.edges.dtype == np.int64
    assert graph.degrees.tolist() == [2, 2, 1, 1]
    assert [graph.neighbours(i).tolist() for i in range(4)] == [[1, 2], [0, 3], [0], [1]]


@pytest.mark.parametrize("num_workers", SIZES)
@pytest.mark.parametrize("name", UNDIRECTED)
def test_neighbours_are_those_of_the_definition(name, num_workers):
    n = num_workers
    wanted = {
        "ring": lambda i: {(i + 1) % n, (i - 1) % n},
        "star": lambda i: set(range(1, n)) if i == 0 else {0},
        "complete": lambda i: set(range(n)),
        "exponential": lambda i: {
            (i + s * 2**k) % n for k in range(8) for s in (1, -1) if 2**k < n
        },
    }
    graph = graphs.make_graph(name, n)
    if name in wanted:
        for i in range(n):
            assert set(graph.neighbours(i).tolist()) == wanted[name](i) - {i}
    elif name == "random":
        assert (graph.degrees <= 4).all()
        assert graph.degrees.sum() >= min(4, n - 1) * n - 4


@pytest.mark.parametrize(
    ("num_workers", "rows", "columns"), [(4, 2, 2), (6, 2, 3), (9, 3, 3), (12, 3, 4), (10, 2, 5)]
)
def test_a_torus_links_each_place_with_those_beside_and_below(num_workers, rows, columns):
    graph = graphs.torus(num_workers)
    for row in range(rows):
        for column in range(columns):
            wanted = {(row, (column + step) % columns) for step in (1, -1)}
            wanted |= {((row + step) % rows, column) for step in (1, -1)}
            places = {r * columns + c for r, c in wanted} - {row * columns + column}
            assert set(graph.neighbours(row * columns + column).tolist()) == places


def test_a_random_graph_depends_on_its_seed_only():
    first, again, other = (graphs.random_graph(50, degree=5, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.edges, again.edges)
    assert first.edges.tolist() != other.edges.tolist()
    assert np.mean(first.degrees) > 4.9


@pytest.mark.parametrize("num_workers", SIZES)
def test_one_peer_exponential_receives_from_powers_of_two(num_workers):
    graph = graphs.one_peer_exponential(num_workers)
    assert len(graph.phases) == max(1, int(np.ceil(np.log2(num_workers))))
    for t, phase in enumerate(graph.phases):
        np.testing.assert_array_equal(phase, (np.arange(num_workers) - 2**t) % num_workers)


@pytest.mark.parametrize("text", ["0-1,1-2,2-3", "0-1 1-2 2-3", "2-1, 0-1 , 3-2"])
def test_edges_are_read_with_commas_or_blanks(text):
    assert graphs.make_graph(text, 4).edges.tolist() == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (Graph, (4, [(0, 1), (1, 2)]), "^reducer.graph: worker 3 is not reachable .* 0; .* 0-3"),
        (Graph, (4, [(0, 4)]), "edge 0-4 names a worker that is not one of 0 to 3"),
        (Graph, (4, [(0, 1), (2, 2)]), "edge 2-2 joins worker 2 to itself; leave it out"),
        (Periodic, (4, ([1, 2, 3, 3],)), "phase 0 is .* exactly once"),
        (Periodic, (4, ([1, 0, 3, 2], [1, 0, 2, 3])), "in phase 1 worker 2 receives from itself"),
        (make, ("rng", 4), r"'rng' is no graph. Did you mean 'ring'\? Allowed are ring, star"),
        (make, ("0-1,1:2", 4), "'0-1,1:2' is no graph"),
        (make, ("torus", 7), "a torus of 7 workers is not possible"),
        (functools.partial(make, degree=1), ("random", 8), "degree: got 1, must be"),
    ],
)
def test_what_is_no_graph_is_named_and_what_is_allowed(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(*given)


def test_planning_a_topology_loads_no_jax():
    code = (
        "import sys, hetjax.topology as t\n"
        "assert not {'jax', 'scipy'} & set(sys.modules)\n"
        "graph = t.make_graph('ring', 6)\n"
        "t.matcha_schedule(t.decompose_matchings(graph.edges, 6), 6, 0.5)\n"
        "assert 'jax' not in sys.modules\n"
    )
    launches.python(code).check_returncode()
