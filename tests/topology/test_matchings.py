import numpy as np
import pytest

from hetjax.topology import graphs, matchings


def check(edges, num_workers, pieces):
    """Each piece is a matching, and together they are the edges, each once."""
    for piece in pieces:
        assert piece.dtype == np.int64
        assert len(piece)
        assert np.unique(piece).size == piece.size
    together = np.concatenate(pieces)
    np.testing.assert_array_equal(together[np.lexsort(together.T[::-1])], edges)
    degree = np.bincount(edges.ravel()).max()
    assert degree <= len(pieces) <= degree + 1


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_are_divided_into_matchings(seed):
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(2, 30))
    pairs = np.stack(np.triu_indices(num_workers, 1), axis=1)
    edges = pairs[rng.random(len(pairs)) < rng.uniform(0.1, 1)]
    edges = edges if len(edges) else pairs[:1]
    check(edges, num_workers, matchings.decompose_matchings(edges, num_workers))
    # The fallback alone, which most graphs never need.
    listed = [tuple(edge) for edge in edges.tolist()]
    most = int(np.bincount(edges.ravel()).max())
    partners = matchings._colour_by_fans(listed, num_workers, most + 1)
    colours = np.array([partners[i].index(j) for i, j in listed])
    assert all(partners[j][colour] == i for (i, j), colour in zip(listed, colours, strict=True))
    check(edges, num_workers, [edges[colours == colour] for colour in np.unique(colours)])


@pytest.mark.parametrize(
    ("graph", "num_matchings"),
    [
        (graphs.ring(1000), 2),
        (graphs.ring(7), 3),
        (graphs.star(9), 8),
        (graphs.torus(16), 4),
        (graphs.complete(8), 7),
        (graphs.complete(7), 7),
        (graphs.random_graph(1000, degree=10), 10),
    ],
)
def test_as_few_matchings_as_possible_where_that_is_known(graph, num_matchings):
    pieces = matchings.decompose_matchings(graph.edges, graph.num_workers)
    check(graph.edges, graph.num_workers, pieces)
    assert len(pieces) == num_matchings


def test_the_petersen_graph_needs_one_more_than_its_degree():
    outer = [(i, (i + 1) % 5) for i in range(5)]
    inner = [(5 + i, 5 + (i + 2) % 5) for i in range(5)]
    graph = graphs.Graph("petersen", 10, outer + inner + [(i, i + 5) for i in range(5)])
    pieces = matchings.decompose_matchings(graph.edges, 10)
    check(graph.edges, 10, pieces)
    assert len(pieces) == 4


def test_the_same_edges_in_any_order_give_the_same_matchings():
    edges = graphs.random_graph(40, degree=5).edges
    first = matchings.decompose_matchings(edges, 40)
    again = matchings.decompose_matchings(edges[::-1, ::-1], 40)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
