"""One process of two that plan the same exchanges, although their solvers round differently.

    python -m hetjax.launch --workers=2 -- \\
        python -m experiments.benchmarks.agreed_schedules DIRECTORY

Process 1 turns each matrix round before its eigenvalues are found, as another processor's kernel
would add up in another order. Each process writes DIRECTORY/PROCESS.json.
"""

import hashlib
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax

import hetjax
from hetjax.processes import board as board_lib
from hetjax.processes import join, membership, solutions
from hetjax.topology import gossip as gossip_lib
from hetjax.topology import graphs

WORKERS, GRAPHS, ROUNDS = 8, 40, 2000
BUDGETS = (0.25, 0.5)
RUNS = 10


def _turn_matrices() -> None:
    eigh = np.linalg.eigh

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = eigh(matrix[..., ::-1, ::-1])
        return values, vectors[..., ::-1, :]

    np.linalg.eigh = turned  # type: ignore[assignment]


def _plans(solve_once: gossip_lib.SolveOnce) -> tuple[list[str], list[str]]:
    """Digests of the weights of each schedule, and of its exchanges in all rounds."""
    bits, plans = [], []
    for seed in range(GRAPHS):
        graph = graphs.random_graph(WORKERS, degree=3 + seed % 4, seed=seed)
        for budget in BUDGETS:
            for direct in (False, True):
                made = gossip_lib.matcha(
                    graph, budget, seed=seed, direct=direct, solve_once=solve_once
                )
                active = np.array([made.active(round) for round in range(ROUNDS)])
                bits.append(_digest(made.weights))
                plans.append(_digest(active))
    return bits, plans


def _digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _run(seed: int) -> str:
    """200 rounds; a digest of the parameters."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}

    def loss_fn(params: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
        del rng
        return (batch["x"] @ params - batch["y"]) ** 2

    edges = graphs.random_graph(WORKERS, degree=3 + seed % 4, seed=seed).edges
    found = hetjax.fit(
        loss_fn,
        np.zeros(3, np.float32),
        optax.sgd(0.01),
        data,
        epochs=50,
        microbatch_size=2,
        budget=WORKERS,
        cluster={"num_workers": WORKERS},
        quota={"policy": "equal"},
        reducer={
            "name": ("matcha", "matcha_direct")[seed % 2],
            "graph": ",".join(f"{i}-{j}" for i, j in edges),
        },
        progress=False,
    )
    assert found.summary["rounds"] == 200, found.summary["rounds"]
    return _digest(found.params)


def main(directory: str) -> None:
    place = membership.find()
    assert place is not None
    join.join(place)
    hetjax.use_cpu_workers(WORKERS // place.num_processes)
    told: dict[str, Any] = {}
    if place.process_id:
        _turn_matrices()
        told["own_bits"], told["own_plans"] = _plans(gossip_lib.solve_here)
    solved = solutions.Solutions(leads=place.process_id == 0, board=board_lib.Board("solutions"))
    told["bits"], told["plans"] = _plans(solved)
    told["runs"] = [_run(seed) for seed in range(RUNS)]
    path = pathlib.Path(directory) / f"{place.process_id}.json"
    path.write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
