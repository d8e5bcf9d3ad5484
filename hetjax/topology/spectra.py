"""How small can the largest eigenvalue of a matrix be made that depends on a few numbers?

The numerics of MATCHA's schedules, in float64 on the host. A linear dependence is solved by linear
programs with cutting planes, a quadratic one on a single number by parabolas. No semidefinite
solver is needed.
"""

import numpy as np

GAP = 1e-7  # relative gap of the bounds at which a search ends
_ALPHA_GAP = 1e-13  # the same in a search for one number
_MOST_CUTS = 300  # steps of cutting planes; 5 to 80 are usual
_MOST_PARABOLAS = 60  # 4 to 12 are usual


def eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All eigenvalues, f64[n], ascending, and their vectors, f64[n, n].

    By divide and conquer; if that fails, by QR iterations, which are slower. LAPACK's third solver,
    for a part of the eigenvalues, failed on complete graphs, where nearly all are equal.
    """
    try:
        return np.linalg.eigh(matrix)
    except np.linalg.LinAlgError:
        from scipy import linalg

        return linalg.eigh(matrix, driver="ev")


def top_eigenpairs(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, f64[k], descending, and their vectors, f64[n, k].

    Up to n = 64 these are all but the smallest, k = n − 1; above it 8.
    """
    values, vectors = eigh(matrix)
    count = len(matrix) - 1 if len(matrix) <= 64 else 8
    return values[: -count - 1 : -1], vectors[:, : -count - 1 : -1]


def best_alpha(mean: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """(α, ρ): the α with the least ρ(α), the largest eigenvalue of I − 11ᵀ/n − 2α mean + α² second.

    A unit vector v gives a parabola, 1 − 2α vᵀ mean v + α² vᵀ second v. It is nowhere above ρ(α)
    and meets it where v is the eigenvector. Of the parabolas found so far the last on each side of
    the minimum bound it. The next α is where the larger of the two is least.
    """
    size, best, rho = len(mean), 0.0, np.inf
    rest = np.eye(size) - 1 / size
    sides: list[tuple[float, float] | None] = [None, None]  # one falling at its α, one rising
    alpha = 1 / (float(mean.diagonal().max()) or 1.0)  # 0: no links at all
    for _ in range(_MOST_PARABOLAS):
        values, vectors = top_eigenpairs(rest - 2 * alpha * mean + alpha**2 * second)
        if values[0] < rho:
            best, rho = alpha, float(values[0])
        image = mean @ vectors[:, 0]
        slope, bend = float(vectors[:, 0] @ image), float(vectors[:, 0] @ second @ vectors[:, 0])
        sides[int(alpha * bend > slope)] = slope, bend
        alpha, lower = _lowest([side for side in sides if side is not None])
        if rho - lower <= _ALPHA_GAP:
            break
    return best, max(rho, 0.0)


def _lowest(parabolas: list[tuple[float, float]]) -> tuple[float, float]:
    """Where the larger of one or two 1 − 2αa + α²b is least, and its value there."""
    vertices = [(a / b if b > 0 else 0.0) for a, b in parabolas]  # 0: a graph in two parts
    values = [1 - vertex * a for vertex, (a, _) in zip(vertices, parabolas, strict=True)]
    for vertex, value, (a, b) in zip(vertices, values, reversed(parabolas), strict=True):
        if len(parabolas) == 1 or 1 - 2 * vertex * a + vertex**2 * b <= value:
            return vertex, value
    (a, b), (c, d) = parabolas
    if b == d:  # the parabolas meet only at 0
        return max(zip(vertices, values, strict=True), key=lambda found: found[1])
    crossing = 2 * (a - c) / (b - d)
    return crossing, 1 - 2 * crossing * a + crossing**2 * b


def least_top_eigenvalue(
    slopes: np.ndarray, *, start: np.ndarray, costs: np.ndarray, limit: float
) -> tuple[np.ndarray, float]:
    """Minimises the largest eigenvalue of A(x) = Σ x_j slopes_j, f64[k, k].

    It searches 0 ≤ x ≤ 1, costs·x ≤ limit. Each unit vector v gives a cut, vᵀA(x)v ≤ s.
    Several eigenvalues meet at the optimum, and there eigenvectors alone converge slowly. The sums
    and differences of two of them bring in the entries off the diagonal.

    Returns the best x and a lower bound of the minimum, 1e-7 of it below the value at x.
    """
    from scipy import optimize

    x, best, least, lower, scale = start, start, np.inf, -np.inf, 0.0
    cuts = np.zeros((0, len(x)))
    for _ in range(_MOST_CUTS):
        values, vectors = eigh(np.tensordot(x, slopes, 1))
        if values[-1] < least:
            best, least = x, float(values[-1])
        scale = scale or max(abs(least), 1e-12)  # HiGHS's tolerances are absolute
        if least - lower <= GAP * abs(least):
            break
        top = vectors[:, -8:]
        i, j = np.triu_indices(top.shape[1], 1)
        top = np.concatenate(
            [top, (top[:, i] + top[:, j]) / 2**0.5, (top[:, i] - top[:, j]) / 2**0.5], axis=1
        )
        cuts = np.append(cuts, np.sum(top * (slopes @ top), axis=1).T / scale, axis=0)
        result = optimize.linprog(
            np.append(np.zeros(len(x)), 1.0),
            A_ub=np.block([[cuts, -np.ones((len(cuts), 1))], [costs, np.zeros(1)]]),
            b_ub=np.append(np.zeros(len(cuts)), limit),
            bounds=[*[(0, 1)] * len(x), (None, None)],
            method="highs",
            options={
                "presolve": False,
                "primal_feasibility_tolerance": 1e-10,
                "dual_feasibility_tolerance": 1e-10,
            },
        )
        if result.status != 0:  # numerical trouble; the best x so far is still feasible
            break
        x, lower = np.clip(result.x[:-1], 0, 1), max(lower, float(result.fun) * scale)
        x = x * (limit / max(costs @ x, limit))  # what the program's tolerance allows
        # Cuts half-way to the best point so far took half as many steps as those at the vertex.
        x = 0.5 * (x + best)
        # The tight cuts keep the bound; most of the others never matter again.
        cuts = cuts[np.argsort(-cuts @ x, kind="stable")[: 5 * len(x) + 40]]
    return best, lower


def joined(basis: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """An orthonormal basis of both, f64[n, k]; leaves out vectors that `basis` spans already."""
    rest = vectors - basis @ (basis.T @ vectors)
    left, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    new = left[:, sizes > 1e-7]
    new = np.linalg.qr(new - basis @ (basis.T @ new))[0]
    return np.concatenate([basis, new], axis=1)
