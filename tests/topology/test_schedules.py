"""The best α, and eigensolvers that fail."""

import functools

import numpy as np
import pytest

from hetjax.topology import activation, graphs, matchings, schedules, spectra
from tests import oracles


@functools.cache
def pieces_of(name, num_workers, degree=4, seed=0):
    graph = graphs.make_graph(name, num_workers, degree=degree, seed=seed)
    return matchings.decompose_matchings(graph.edges, num_workers)


def rhos(pieces, num_workers, probabilities, alphas):
    """‖E[WᵀW] − 11ᵀ/n‖₂, f64[len(alphas)], from the moments of the flags."""
    laplacians = np.array([oracles.laplacian(piece, num_workers) for piece in pieces])
    mean = np.tensordot(probabilities, laplacians, 1)
    spread = np.tensordot(probabilities * (1 - probabilities), laplacians @ laplacians, 1)
    second = mean @ mean + spread
    rest = np.eye(num_workers) - 1 / num_workers
    matrices = rest - 2 * alphas[:, None, None] * mean + alphas[:, None, None] ** 2 * second
    return np.abs(np.linalg.eigvalsh(matrices)).max(axis=1)


def fails(*args, **options):
    raise np.linalg.LinAlgError("Internal Error.")


@pytest.mark.parametrize(
    ("num_workers", "budget"), [(5, 0.3), (10, 0.9), (16, 0.9), (32, 0.5), (64, 0.5)]
)
def test_complete_graphs_do_without_the_first_eigensolver(num_workers, budget, monkeypatch):
    pieces = pieces_of("complete", num_workers)
    found = schedules.matcha_schedule(pieces, num_workers, budget)
    monkeypatch.setattr(np.linalg, "eigh", fails)
    other = schedules.matcha_schedule(pieces, num_workers, budget)
    assert other.rho == pytest.approx(found.rho, abs=1e-9)
    assert other.alpha == pytest.approx(found.alpha, abs=1e-6)
    (rho,) = rhos(pieces, num_workers, found.probabilities, np.array([found.alpha]))
    assert found.rho == pytest.approx(rho, abs=1e-12)


def test_eigenvalues_of_both_solvers_are_those_of_the_matrix(monkeypatch):
    matrix = np.random.default_rng(0).normal(size=(6, 6))
    matrix += matrix.T
    first = spectra.eigh(matrix)
    monkeypatch.setattr(np.linalg, "eigh", fails)
    for values, vectors in (first, spectra.eigh(matrix)):
        np.testing.assert_allclose((vectors * values) @ vectors.T, matrix, atol=1e-13)
        assert (np.diff(values) >= 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_alpha_is_the_best_of_a_fine_grid(seed):
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(3, 12))
    pieces = pieces_of("random", num_workers, degree=3, seed=seed)
    probabilities = rng.random(len(pieces))
    problem = activation.Problem(pieces, num_workers, 1.0, None)
    alpha, least = problem.best_alpha(probabilities)
    near = alpha * (1 + np.linspace(-1e-3, 1e-3, 201))
    grid = np.concatenate([np.linspace(0, 1, 2001), near])
    values = rhos(pieces, num_workers, probabilities, grid)
    assert least <= values.min() + 1e-12
    (rho,) = rhos(pieces, num_workers, probabilities, np.array([alpha]))
    assert least == pytest.approx(rho, abs=1e-12)


def test_of_a_graph_in_two_parts_rho_is_1():
    problem = activation.Problem([[(0, 1), (2, 3)], [(1, 2)]], 4, 1.0, None)
    assert problem.best_alpha(np.array([1.0, 0.0]))[1] == pytest.approx(1)
    assert problem.best_alpha(np.zeros(2))[1] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(20))
def test_along_a_ray_rho_never_rises(seed):
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(3, 10))
    pieces = pieces_of("random", num_workers, degree=4, seed=seed)
    problem = activation.Problem(pieces, num_workers, 1.0, None)
    direction = rng.random(len(pieces)) ** 3
    scales = np.sort(rng.random(12)) / direction.max()
    found = [problem.best_alpha(direction * scale)[1] for scale in scales]
    assert np.diff(found).max() <= 1e-12
