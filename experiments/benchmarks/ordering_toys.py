"""How far do balanced orders bring the herding bound down? Fixed vectors, no training.

The figure is H, the parallel herding bound of `hetjax.ordering.herding` in the ∞-norm, of the order
that an epoch leaves for the next one.
The vectors stay as they are, so this is the most that an order can gain: in training, gradients
move. n is the number of workers, m that of examples a worker.

References:
  Guo, Cooper, De Sa et al., "CD-GraB: Coordinating Distributed Example Orders for Provably
  Accelerated Training", 2023, arXiv 2302.00845 (D-GraB, and the toy of 10⁶ vectors).
  Lu, Guo, De Sa, "GraB: Finding Provably Better Data Permutations than Random Reshuffling",
  2022, arXiv 2205.10733.
  Alweiss, Liu, Sawhney, "Discrepancy Minimization via a Self-Balancing Walk", 2020,
  arXiv 2006.14009 (random signs).
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.rows import Found, Row
from hetjax.ordering import balance, herding, orders

# (vectors f32[s, n, m, d] of s seeds as this epoch visits them, what the method has kept from the
# epoch before, None in the first) -> (signs i8[s, n, m], what it keeps). None: draw each order.
Method = Callable[[np.ndarray, Any], tuple[np.ndarray, Any]] | None

_NUM_WORKERS = (5, 20, 50)
_SCALE = 0.3  # up to here random signs cost nothing, above they do
_KNOWN = {  # at n = 5, 20, 50: measured before with 10⁴ vectors, published with 10⁶
    "independent GraB": ((3.5, 6.3, 10.3), (4.2, 8.5, 12.7)),
    "independent PairBalance": ((4.3, 9.3, 15.0), (5.8, 11.8, 18.0)),
    "random reshuffling": ((34.0, 34.0, 34.0), (350.0, 350.0, 350.0)),
}


def small_toy_rows(num_seeds: int = 20, num_epochs: int = 10) -> Found:
    """10⁴ vectors of unit length in Gaussian directions, d = 16: mean over the seeds."""
    for index, num_workers in enumerate(_NUM_WORKERS):
        vectors = _unit_vectors(num_seeds, num_workers, 10_000 // num_workers, 16)
        for name, method in _toy_methods().items():
            bounds = _bounds(vectors, _last(_epochs(vectors, method, num_epochs)))
            target = {"D-GraB": "≤ 2.6", "fixed map": "27 to 45"}.get(name, "none")
            if name in _KNOWN:
                target = f"{_KNOWN[name][0][index]:g} ± 10 %"
            reached = f"{bounds.mean():.2f} ({bounds.min():.2f} to {bounds.max():.2f})"
            yield Row(f"{name}, n = {num_workers}", target, reached, num_seeds)
    yield f"10⁴ vectors, d = 16, after {num_epochs} epochs: mean over seeds, least and most."
    yield f"Random signs: those of independent GraB, c = {_SCALE}."


def large_toy_rows(num_examples: int = 1_000_000, num_epochs: int = 15) -> Found:
    """The published toy: 10⁶ vectors of unit length in Gaussian directions, d = 16; one seed."""
    d_grab_secs = 0.0
    for index, num_workers in enumerate(_NUM_WORKERS):
        vectors = _unit_vectors(1, num_workers, num_examples // num_workers, 16)
        for name, method in _toy_methods().items():
            if name != "D-GraB" and name not in _KNOWN:
                continue
            start = time.perf_counter()
            bound = _bounds(vectors, _last(_epochs(vectors, method, num_epochs))).mean()
            secs = time.perf_counter() - start
            target = "≤ 2.7"
            if name == "D-GraB":
                d_grab_secs += secs
            else:
                target = f"none (published: {_KNOWN[name][1][index]:g})"
            reached = f"{bound:.2f}, in {secs:.1f} s"
            yield Row(f"{name}, n = {num_workers}", target, reached)
    yield Row("D-GraB, all three n", "< 60 s", f"{d_grab_secs:.1f} s", len(_NUM_WORKERS))
    yield f"{num_examples:,} vectors, d = 16, after {num_epochs} epochs, one seed."


def low_rank_rows(num_seeds: int = 6, num_epochs: int = 12, num_examples: int = 512) -> Found:
    """Exact, two-level and stale signs: mean of the last 3 epochs and of the seeds.

    On unit vectors, and on vectors with coordinate i scaled 1/i, their mean length 1: these
    are nearly of low rank, as gradients are. Random reshuffling's mean is of all epochs.
    """
    for decay, num_workers, num_pairs, dim, blocks in (
        (False, 8, 8, 16, (1, 4)),
        (True, 8, 8, 512, (1, 4)),
        (True, 32, 4, 512, (1, 2, 4)),
        (True, 8, 16, 512, (2, 4, 8, 16)),
        (True, 32, 16, 512, (2, 4, 8, 16)),
    ):
        make = _decaying_vectors if decay else _unit_vectors
        vectors = make(num_seeds, num_workers, num_examples, dim)
        methods: dict[str, Method] = {
            "random reshuffling": None,
            "exact": d_grab,
            "one stale sum": one_stale_sum(num_pairs),
            **{f"two-level, blocks of {size}": two_level(num_pairs, size) for size in blocks},
        }
        random = 0.0
        for name, method in methods.items():
            epochs = list(_epochs(vectors, method, num_epochs))
            counted = epochs[-3:] if method else epochs
            plateau = np.mean([_bounds(vectors, visited) for visited in counted])
            random = random or plateau  # the first of the methods
            wanted = name.startswith("two-level") and decay and (num_workers, num_pairs) == (32, 4)
            kind = "scaled" if decay else "unit"
            target = "≥ 8x below random" if wanted else "none"
            reached = f"{plateau:.2f} ({random / plateau:.1f}x below random)"
            name = f"{kind}, n={num_workers}, {num_pairs} pairs: {name}"
            yield Row(name, target, reached, num_seeds)
    yield f"m = {num_examples} examples a worker; pairs are a worker's of a round."
    yield "Unit vectors: d = 16. Scaled: coordinate i by 1/i, d = 512."


def d_grab(vectors: np.ndarray, kept: Any) -> tuple[np.ndarray, Any]:
    """Pairs, one running sum for all workers, which take turns in rank order."""
    diffs = _pair_diffs(vectors)
    num_seeds, num_workers, num_pairs, dim = diffs.shape
    turns = diffs.transpose(2, 1, 0, 3).reshape(-1, num_seeds, dim)
    signs = np.asarray(_signs(turns)).reshape(num_pairs, num_workers, num_seeds)
    return _unit_signs(signs.transpose(2, 1, 0)), kept


def pair_balance(vectors: np.ndarray, kept: Any) -> tuple[np.ndarray, Any]:
    """Pairs, a running sum for each worker."""
    return _unit_signs(_independent(_signs, _pair_diffs(vectors))), kept


def grab(vectors: np.ndarray, mean: Any) -> tuple[np.ndarray, Any]:
    """GraB on each worker: single examples, less the worker's mean of the epoch before, first 0."""
    centred = vectors if mean is None else vectors - mean
    return _independent(_signs, centred), vectors.mean(axis=2, keepdims=True)


def random_sign_grab(scale: float) -> Method:
    """As `grab`, with P(s = +1) = ½ − ⟨r, v⟩ / 2c, v and r over the largest ‖v‖ so far."""

    def signs(vectors, kept):
        key, mean = (jax.random.key(0), 0.0) if kept is None else kept
        draw = functools.partial(_random_signs, key=key, scale=scale)
        mean_next = vectors.mean(axis=2, keepdims=True)
        return _independent(draw, vectors - mean), (jax.random.split(key)[0], mean_next)

    return signs


def fixed_map(vectors: np.ndarray, kept: Any) -> tuple[np.ndarray, Any]:
    """Even positions ascending, then odd ones descending, whatever the vectors are."""
    num_seeds, num_workers, num_examples, _ = vectors.shape
    return _unit_signs(np.ones((num_seeds, num_workers, num_examples // 2), np.int8)), kept


def two_level(num_pairs: int, block_pairs: int) -> Method:
    """Each worker balances its own pairs of a round in blocks; the workers' sums take turns."""

    def signs(vectors, kept):
        return _by_rounds(_two_level_signs, vectors, num_pairs, block_pairs), kept

    return signs


def one_stale_sum(num_pairs: int) -> Method:
    """All pairs of all workers in a round get their signs from the r at its start."""

    def signs(vectors, kept):
        return _by_rounds(_stale_signs, vectors, num_pairs, num_pairs), kept

    return signs


def _toy_methods() -> dict[str, Method]:
    return {
        "D-GraB": d_grab,
        "independent GraB": grab,
        "independent PairBalance": pair_balance,
        "random reshuffling": None,
        "fixed map": fixed_map,
        "random signs": random_sign_grab(_SCALE),
    }


def _epochs(vectors: np.ndarray, method: Method, num_epochs: int) -> Iterator[np.ndarray]:
    """The order i[s, n, m] that each epoch leaves; the first epoch's own order is random."""
    rng = np.random.default_rng(1)
    visited = rng.permuted(np.broadcast_to(np.arange(vectors.shape[2]), vectors.shape[:3]), axis=2)
    kept = None
    for _ in range(num_epochs):
        if method is None:
            visited = rng.permuted(visited, axis=2)
        else:
            signs, kept = method(np.take_along_axis(vectors, visited[..., None], axis=2), kept)
            rows = zip(_rows(visited), _rows(signs), strict=True)
            placed = [
                orders.place_signed(examples, example_signs) for examples, example_signs in rows
            ]
            visited = np.stack(placed).reshape(visited.shape)
        yield visited


def _last(epochs: Iterator[np.ndarray]) -> np.ndarray:
    *_, visited = epochs
    return visited


def _bounds(vectors: np.ndarray, visited: np.ndarray) -> np.ndarray:
    """f64[s]: H of each seed in the ∞-norm."""
    pairs = zip(vectors, visited, strict=True)
    return np.array([herding.parallel_herding_bound(*pair)[0] for pair in pairs])


def _unit_vectors(num_seeds: int, num_workers: int, num_examples: int, dim: int) -> np.ndarray:
    vectors = _gaussian(num_seeds, num_workers, num_examples, dim)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _decaying_vectors(num_seeds: int, num_workers: int, num_examples: int, dim: int) -> np.ndarray:
    vectors = _gaussian(num_seeds, num_workers, num_examples, dim)
    vectors /= np.arange(1, dim + 1, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1).mean()


def _gaussian(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _pair_diffs(vectors: np.ndarray) -> np.ndarray:
    return vectors[:, :, 0::2] - vectors[:, :, 1::2]


def _unit_signs(pair_signs: np.ndarray) -> np.ndarray:
    """s i8[s, n, m / 2] -> i8[s, n, m]: s for the first example of each pair, −s for the second."""
    signs = np.stack([pair_signs, -pair_signs], axis=-1)
    return signs.reshape(*signs.shape[:2], -1)


def _independent(scan: Callable[[np.ndarray], jax.Array], vectors: np.ndarray) -> np.ndarray:
    """The scan for each seed and worker by itself: f32[s, n, t, d] -> i8[s, n, t]."""
    num_seeds, num_workers, num_steps, dim = vectors.shape
    steps = vectors.reshape(-1, num_steps, dim).swapaxes(0, 1)
    return np.asarray(scan(steps)).T.reshape(num_seeds, num_workers, num_steps)


def _by_rounds(
    scan: Callable[[np.ndarray], jax.Array], vectors: np.ndarray, num_pairs: int, block_pairs: int
) -> np.ndarray:
    """The scan over the rounds, f32[rounds, n, blocks, pairs, d], for each seed."""
    diffs = _pair_diffs(vectors)
    num_seeds, num_workers, _, dim = diffs.shape
    shape = (num_seeds, num_workers, -1, num_pairs // block_pairs, block_pairs, dim)
    rounds = diffs.reshape(shape).swapaxes(1, 2)
    signs = np.stack([np.asarray(scan(seed)) for seed in rounds])
    return _unit_signs(signs.swapaxes(1, 2).reshape(num_seeds, num_workers, -1))


def _sign(product: jax.Array) -> jax.Array:
    """The papers' rule for ⟨r, v⟩: +1 at 0."""
    return jnp.where(product <= 0, 1.0, -1.0)


@jax.jit
def _signs(vectors: jax.Array) -> jax.Array:
    """f32[t, w, d], w sequences side by side -> i8[t, w]."""
    scan = jax.vmap(balance.balance_scan, in_axes=(1, 0), out_axes=(1, 0))
    return scan(vectors, jnp.zeros_like(vectors[0]))[0]


@jax.jit
def _random_signs(vectors: jax.Array, *, key: jax.Array, scale: float) -> jax.Array:
    def step(carry, inputs):
        running_sum, most = carry
        vector, uniform = inputs
        most = jnp.maximum(most, (vector * vector).sum(axis=-1))
        share = 0.5 - (running_sum * vector).sum(axis=-1) / (2 * scale * most)
        signs = jnp.where(uniform < share, 1.0, -1.0)
        return (running_sum + signs[:, None] * vector, most), signs.astype(jnp.int8)

    uniforms = jax.random.uniform(key, vectors.shape[:2])
    start = jnp.zeros_like(vectors[0]), jnp.full(vectors.shape[1], 1e-30)
    return jax.lax.scan(step, start, (vectors, uniforms))[1]


@jax.jit
def _two_level_signs(rounds: jax.Array) -> jax.Array:
    """f32[rounds, n, blocks, pairs, d] -> i8[rounds, n, blocks, pairs]."""

    def block(carry, diffs):
        own_sum, signed_sum = carry
        signs = _sign(diffs @ own_sum)
        return (own_sum + signs @ diffs, signed_sum + signs @ diffs), signs

    def worker_round(running_sum, diffs):
        start = running_sum, jnp.zeros_like(running_sum)
        (_, signed_sum), signs = jax.lax.scan(block, start, diffs)
        return signed_sum, signs

    def worker_turn(running_sum, signed_sum):
        turn = _sign(running_sum @ signed_sum)
        return running_sum + turn * signed_sum, turn

    def one_round(running_sum, diffs):
        signed_sums, signs = jax.vmap(worker_round, in_axes=(None, 0))(running_sum, diffs)
        running_sum, turns = jax.lax.scan(worker_turn, running_sum, signed_sums)
        return running_sum, (turns[:, None, None] * signs).astype(jnp.int8)

    return jax.lax.scan(one_round, jnp.zeros_like(rounds[0, 0, 0, 0]), rounds)[1]


@jax.jit
def _stale_signs(rounds: jax.Array) -> jax.Array:
    """f32[rounds, n, blocks, pairs, d] -> i8[rounds, n, blocks, pairs]."""

    def one_round(running_sum, diffs):
        signs = _sign(diffs @ running_sum)
        return running_sum + jnp.tensordot(signs, diffs, axes=3), signs.astype(jnp.int8)

    return jax.lax.scan(one_round, jnp.zeros_like(rounds[0, 0, 0, 0]), rounds)[1]
