import functools
import itertools

import numpy as np
import pytest

from hetjax.topology import graphs, matchings, mixing, schedules, spectra
from tests import oracles

# MATCHA's first base graph and the values found for it with a semidefinite solver's precision.
BASE = (
    [(1, 5), (6, 7), (0, 4), (2, 3)],
    [(1, 7), (3, 6)],
    [(0, 1), (3, 7), (5, 6)],
    [(1, 2), (0, 7)],
    [(1, 3)],
)


def expected_contraction(pieces, num_workers, probabilities, alpha):
    """‖E[WᵀW] − 11ᵀ/n‖₂, by all combinations of flags."""
    laplacians = [oracles.laplacian(piece, num_workers) for piece in pieces]
    mean = np.zeros((num_workers, num_workers))
    for flags in itertools.product([0, 1], repeat=len(pieces)):
        chance = np.prod(np.where(flags, probabilities, 1 - probabilities))
        used = sum(flag * matrix for flag, matrix in zip(flags, laplacians, strict=True))
        w = np.eye(num_workers) - alpha * used
        mean += chance * w.T @ w
    return np.linalg.norm(mean - 1 / num_workers, 2)


def connectivity(pieces, num_workers, probabilities):
    laplacians = [oracles.laplacian(piece, num_workers) for piece in pieces]
    return np.linalg.eigvalsh(np.tensordot(probabilities, laplacians, 1))[1]


# --- Fixed weights ---


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8, 9, 15, 16])
@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_mixing_matrices_are_doubly_stochastic(name, num_workers):
    graph = graphs.make_graph(name, num_workers)
    for matrix in mixing.mixing_matrices(graph):
        if isinstance(graph, graphs.Graph):
            np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-14)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)
        assert matrix.min() >= -1e-15
    assert mixing.spectral_gap(mixing.mixing_matrices(graph)) > 0.01


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [("complete", n) for n in (1, 2, 3, 8, 15)]
    + [("one_peer_exponential", n) for n in (1, 2, 4, 16, 64)],
)
def test_the_complete_graph_and_a_period_of_one_peer_exponential_average_exactly(name, num_workers):
    matrices = mixing.mixing_matrices(graphs.make_graph(name, num_workers))
    assert len(matrices) == 1 or name != "complete"
    product = functools.reduce(np.matmul, reversed(matrices))
    np.testing.assert_allclose(product, 1 / num_workers, atol=1e-15 * (name == "complete"), rtol=0)
    assert mixing.spectral_gap(matrices) == 1


def test_metropolis_weights_of_a_path_by_hand():
    matrix = mixing.metropolis_weights(graphs.Graph("path", 3, [(0, 1), (1, 2)]))
    np.testing.assert_allclose(matrix, np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3)


def test_the_gap_is_that_of_eigenvalues_and_of_a_period_a_rate_per_round():
    (matrix,) = mixing.mixing_matrices(graphs.torus(12))
    values = np.linalg.eigvalsh(matrix)
    gap = 1 - max(values[-2], -values[0])
    for rounds in (1, 3):
        assert mixing.spectral_gap([matrix] * rounds) == pytest.approx(gap, abs=1e-12)
    assert mixing.spectral_gap([np.eye(4)]) == pytest.approx(0, abs=1e-12)


# --- Schedules ---


def test_matcha_on_the_base_graph_has_the_reference_values():
    half = schedules.matcha_schedule(BASE, 8, 0.5)
    assert half.lambda2 == pytest.approx(0.561202, rel=1e-5)
    assert half.rho == pytest.approx(0.6440, rel=1e-3)
    assert half.alpha == pytest.approx(0.396, rel=2e-3)
    full = schedules.matcha_schedule(BASE, 8, 1.0)
    assert full.lambda2 == pytest.approx(0.670023, rel=1e-5)
    assert full.rho == pytest.approx(0.6538, rel=1e-3)


CASES = [("base", BASE, 8)] + [
    (f"random{n}", matchings.decompose_matchings(graphs.random_graph(n, degree=d).edges, n), n)
    for n, d in [(5, 2), (9, 3), (12, 4)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("pieces", "num_workers"), [case[1:] for case in CASES])
def test_a_schedule_tells_the_rho_and_the_connectivity_of_its_probabilities(pieces, num_workers):
    budgets = np.linspace(0.1, 1, 3)
    for budget in budgets:
        found = schedules.matcha_schedule(pieces, num_workers, budget)
        assert found.probabilities.min() >= 0
        assert found.probabilities.max() <= 1
        assert found.probabilities.mean() <= budget * (1 + 1e-9)
        lambda2 = connectivity(pieces, num_workers, found.probabilities)
        assert found.lambda2 == pytest.approx(lambda2, abs=1e-12)
        rho = expected_contraction(pieces, num_workers, found.probabilities, found.alpha)
        assert found.rho == pytest.approx(rho, abs=1e-12)


@pytest.mark.parametrize("budget", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("num_matchings", [2, 3])
def test_no_probabilities_of_a_grid_connect_better(num_matchings, budget):
    pieces = {
        2: [[(0, 1), (2, 3)], [(1, 2), (3, 4)]],
        3: [[(0, 1), (2, 3)], [(1, 2)], [(0, 3), (1, 4)]],
    }[num_matchings]
    secs = np.array([1.0, 3.0, 2.0][:num_matchings])
    grid = itertools.product(np.linspace(0, 1, 21), repeat=num_matchings)
    inside = [p for p in grid if secs @ p <= budget * secs.sum() + 1e-12]
    best = max(connectivity(pieces, 5, p) for p in inside)
    found = schedules.matcha_schedule(pieces, 5, budget, secs)
    assert secs @ found.probabilities <= budget * secs.sum() * (1 + 1e-9)
    assert best <= found.lambda2 * (1 + 1e-6)
    assert found.lambda2 <= best * 1.05 + 1e-9


def test_the_basis_of_few_eigenvectors_finds_the_same_as_all(monkeypatch):
    graph = graphs.random_graph(48, degree=4)
    pieces = matchings.decompose_matchings(graph.edges, 48)
    whole = schedules.matcha_schedule(pieces, 48, 0.5)
    full = spectra.top_eigenpairs
    monkeypatch.setattr(spectra, "top_eigenpairs", lambda m: tuple(x[..., :8] for x in full(m)))
    few = schedules.matcha_schedule(pieces, 48, 0.5)
    assert few.lambda2 == pytest.approx(whole.lambda2, rel=1e-6)
    assert few.rho == pytest.approx(whole.rho, rel=1e-3)


def test_slow_matchings_are_used_less():
    pieces = matchings.decompose_matchings(graphs.complete(4).edges, 4)
    even = schedules.matcha_schedule(pieces, 4, 0.5)
    costly = schedules.matcha_schedule(pieces, 4, 0.5, [10.0, 1.0, 1.0])
    np.testing.assert_allclose(even.probabilities, 0.5, atol=1e-5)
    assert costly.probabilities[0] < 0.5
    assert costly.probabilities[1:].min() > 0.5


def test_one_worker_has_nothing_to_schedule():
    found = schedules.matcha_schedule((), 1, 0.5)
    assert found.matchings == ()
    assert found.rho == 0
    assert found.flags(0, 0).shape == (0,)


def test_two_workers_by_hand():
    # W = I − αBL: E over the one direction is 1 − p + p(1 − 2α)², least at α = 1/2.
    found = schedules.matcha_schedule([[(0, 1)]], 2, 0.25)
    assert found.probabilities == pytest.approx([0.25])
    assert found.alpha == pytest.approx(0.5, abs=1e-6)
    assert found.rho == pytest.approx(0.75)


def test_flags_are_those_of_the_round_and_the_seed_and_come_as_often_as_planned():
    found = schedules.matcha_schedule(BASE, 8, 0.5)
    drawn = np.array([found.flags(round, 7) for round in range(2000)])
    np.testing.assert_array_equal(drawn[11], found.flags(11, 7))
    assert drawn.dtype == bool
    assert (drawn[:50] != [found.flags(round, 8) for round in range(50)]).any()
    np.testing.assert_allclose(drawn.mean(axis=0), found.probabilities, atol=0.05)


@pytest.mark.parametrize(
    ("pieces", "num_workers", "options", "message"),
    [
        (BASE, 8, {"budget": 0}, "budget: got 0, must be a finite number above 0"),
        (BASE, 8, {"budget": 1.5}, "budget: got 1.5"),
        (BASE, 8, {"budget": float("nan")}, "budget: got nan"),
        ([[(0, 1), (1, 2)]], 3, {}, "matching 0 must have edges"),
        ([[(0, 1)], []], 2, {}, "matching 1 must have edges"),
        ([[(0, 1), (2, 3)]], 4, {}, "worker 2 is not reachable from worker 0"),
        ([[(0, 9)]], 4, {}, "edge 0-9"),
        (BASE, 8, {"link_secs": [1.0]}, r"link_secs is \[1.0\], must be 5 numbers"),
        (BASE, 8, {"link_secs": [1, 1, 1, 1, 0]}, "above 0"),
    ],
)
def test_wrong_arguments_are_named(pieces, num_workers, options, message):
    with pytest.raises(ValueError, match=message):
        schedules.matcha_schedule(pieces, num_workers, **{"budget": 0.5, **options})
