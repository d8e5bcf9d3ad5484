"""The least ρ, and eigensolvers that fail."""

import functools
import itertools

import numpy as np
import pytest

from hetjax.topology import activation, contraction, graphs, matchings, mixing, schedules, spectra


@functools.cache
def pieces_of(name, num_workers, degree=4, seed=0):
    graph = graphs.make_graph(name, num_workers, degree=degree, seed=seed)
    return matchings.decompose_matchings(graph.edges, num_workers)


def rhos(pieces, num_workers, probabilities, alphas):
    """‖E[WᵀW] − 11ᵀ/n‖₂, f64[len(alphas)], from the moments of the flags."""
    laplacians = np.array([mixing.laplacian(piece, num_workers) for piece in pieces])
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
    assert found.rho == pytest.approx(
        rhos(pieces, num_workers, found.probabilities, np.array([found.alpha]))[0], abs=1e-12
    )


def test_the_search_for_the_least_rho_does_without_the_first_eigensolver(monkeypatch):
    monkeypatch.setattr(np.linalg, "eigh", fails)
    found = schedules.matcha_direct(pieces_of("complete", 4), 4, 0.1)
    assert found.rho == pytest.approx(0.818182, abs=1e-6)


def test_eigenvalues_of_both_solvers_are_those_of_the_matrix(monkeypatch):
    matrices = np.random.default_rng(0).normal(size=(3, 6, 6))
    matrices += matrices.transpose(0, 2, 1)
    first = spectra.eigh(matrices)
    monkeypatch.setattr(np.linalg, "eigh", fails)
    for values, vectors in (first, spectra.eigh(matrices)):
        rebuilt = (vectors * values[:, None, :]) @ vectors.transpose(0, 2, 1)
        np.testing.assert_allclose(rebuilt, matrices, atol=1e-13)
        assert (np.diff(values) >= 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_alpha_is_the_best_of_a_fine_grid(seed):
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(3, 12))
    pieces = pieces_of("random", num_workers, degree=3, seed=seed)
    probabilities = rng.random(len(pieces))
    problem = activation.Problem(pieces, num_workers, 1.0, None)
    found = problem.best_alpha(probabilities)
    near = found.alpha * (1 + np.linspace(-1e-3, 1e-3, 201))
    grid = np.concatenate([np.linspace(0, 1, 2001), near])
    values = rhos(pieces, num_workers, probabilities, grid)
    assert found.rho <= values.min() + 1e-12
    assert found.rho == pytest.approx(
        rhos(pieces, num_workers, probabilities, np.array([found.alpha]))[0], abs=1e-12
    )


def test_of_a_graph_in_two_parts_rho_is_1():
    problem = activation.Problem([[(0, 1), (2, 3)], [(1, 2)]], 4, 1.0, None)
    assert problem.best_alpha(np.array([1.0, 0.0])).rho == pytest.approx(1)
    assert problem.best_alpha(np.zeros(2)).rho == pytest.approx(1)


@pytest.mark.parametrize("seed", range(20))
def test_along_a_ray_rho_never_rises(seed):
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(3, 10))
    pieces = pieces_of("random", num_workers, degree=4, seed=seed)
    problem = activation.Problem(pieces, num_workers, 1.0, None)
    direction = rng.random(len(pieces)) ** 3
    scales = np.sort(rng.random(12)) / direction.max()
    found = [problem.best_alpha(direction * scale).rho for scale in scales]
    assert np.diff(found).max() <= 1e-12


@pytest.mark.parametrize(
    ("name", "num_workers", "budgets"),
    [("complete", 4, (0.3, 0.4, 0.5, 0.6, 0.7)), ("torus", 6, (0.5, 0.6, 1.0))],
)
def test_no_probabilities_of_a_grid_contract_faster(name, num_workers, budgets):
    """On these graphs equal probabilities are a stationary point, and far from the best."""
    pieces = pieces_of(name, num_workers)
    assert len(pieces) == 3
    search = contraction.Search(activation.Problem(pieces, num_workers, 1.0, None))
    alphas = np.linspace(0.1, 1, 37)
    grid = [np.array(p) for p in itertools.product(np.linspace(0, 1, 11), repeat=3)]
    values = np.array([rhos(pieces, num_workers, p, alphas).min() for p in grid])
    for budget in budgets:
        best = values[[p.mean() <= budget + 1e-12 for p in grid]].min()
        p = search.at(budget)
        assert p.mean() <= budget * (1 + 1e-9)
        assert search_rho(pieces, num_workers, p) <= best + 1e-9


def search_rho(pieces, num_workers, p):
    return activation.Problem(pieces, num_workers, 1.0, None).best_alpha(p).rho


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_workers", "degree", "seed"),
    [("complete", 4, 0, 0), ("complete", 5, 0, 0), ("random", 6, 3, 2), ("random", 8, 6, 1)],
)
def test_rho_never_rises_with_the_budget(name, num_workers, degree, seed):
    pieces = pieces_of(name, num_workers, degree, seed)
    costs = np.random.default_rng(seed).uniform(1, 3, len(pieces)) if seed == 2 else None
    problem = activation.Problem(pieces, num_workers, 1.0, costs)
    search = contraction.Search(problem)
    rng = np.random.default_rng(1)
    budgets = np.sort([*rng.random(40) ** 2, 1e-3, *np.arange(1, 11) / 10])
    found = [search.at(budget) for budget in budgets]
    for budget, p in zip(budgets, found, strict=True):
        assert problem.secs @ p <= budget * (1 + 1e-9)
        assert p.min() >= 0
        assert p.max() <= 1
    assert np.diff([problem.best_alpha(p).rho for p in found]).max() <= 1e-12
    for budget in (0.1, 0.4, 1.0):  # where it is proven; and asking in order changes nothing
        alone = schedules.matcha_direct(pieces, num_workers, budget, costs)
        np.testing.assert_array_equal(alone.probabilities, search.at(budget))
        assert alone.rho <= schedules.matcha_schedule(pieces, num_workers, budget, costs).rho


@pytest.mark.parametrize(
    ("name", "num_workers", "budget"), [("complete", 8, 0.5), ("exponential", 9, 1.0)]
)
def test_no_random_start_ends_much_lower(name, num_workers, budget):
    """Each start improved alone, by linear programs, without the descent of many at once."""
    pieces = pieces_of(name, num_workers)
    problem = activation.Problem(pieces, num_workers, budget, None)
    found = contraction.Search(problem).at(budget)
    rng = np.random.default_rng(99)
    starts = [problem.scaled(rng.dirichlet(np.ones(len(pieces))) + 1e-9) for _ in range(25)]
    best = min(contraction.improved(problem, start, tolerance=1e-2).rho for start in starts)
    assert problem.best_alpha(found).rho <= 1.01 * best
