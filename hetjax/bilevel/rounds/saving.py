"""What of a bilevel run is saved between two outer steps, and how it goes on from it."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from hetjax import digests as digests_lib
from hetjax import mesh, types
from hetjax.bilevel import per_example
from hetjax.bilevel.problem import LOWER, UPPER
from hetjax.bilevel.rounds import level, setup
from hetjax.bilevel.rounds import run as run_lib
from hetjax.checkpoints import checkpoint, leaves
from hetjax.rounds import resume
from hetjax.rounds import state as state_lib

_COMMON = ("cluster", "checkpoint", "local", "reducer", "nonfinite", "seed", "quota", "gate")
"""Recorded once, and again of a level where it differs."""
_OF_LEVEL = ("examples", "values", "loss", "rule", "frozen")  # of digests
_ROWS = ("x", "opt", "kept")  # of `BilevelState`, leaves [W, ...]


def recorded(run: run_lib.BilevelRun, outer_steps: int) -> dict[str, Any]:
    """The configuration, as `config.json` has it."""
    own = {name: dict(run.levels[name].run.recorded) for name in (UPPER, LOWER)}
    own[UPPER]["seed"] -= setup.SEED_OF_UPPER
    common = {name: own[LOWER][name] for name in _COMMON}
    rest = {
        name: {
            k: v
            for k, v in of_level.items()
            if k not in ("rule", "rules") and (k not in common or v != common[k])
        }
        for name, of_level in own.items()
    }
    about = {"kind": "bilevel", "outer_steps": outer_steps}
    cost = dataclasses.asdict(run.cost)
    return json.loads(json.dumps(about | {"estimator": cost} | common | rest))


def to_arrays(
    run: run_lib.BilevelRun, state: run_lib.BilevelState, params: types.PyTree, best: types.PyTree
) -> dict[str, np.ndarray]:
    """All that the outer steps to come depend on, and what `load` reads; every process calls it."""
    arrays: dict[str, np.ndarray] = {}
    for name in _ROWS:
        arrays |= leaves.flatten(_rows(run, getattr(state, name)), name)
    for level_name, at in state.levels.items():
        found = resume.rounds_to_arrays(at.rounds)
        arrays |= {f"{level_name}/{name}": array for name, array in found.items()}
        arrays[f"{level_name}/revisits"] = np.array(at.revisits)
    arrays |= leaves.flatten(params, "train/params")
    arrays["train/progress_rounds"] = np.zeros(())  # one copy, which `hetjax.load` reads
    return arrays | leaves.flatten(best, "best_params")


def _rows(run: run_lib.BilevelRun, tree: types.PyTree) -> types.PyTree:
    if run.setup.methods.reducer.keeps_replicas_equal:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[None], mesh.own_row(tree))
    return state_lib.all_rows(tree)


def from_arrays(run: run_lib.BilevelRun, saved: checkpoint.Saved) -> run_lib.BilevelState:
    """The state of a checkpoint; the number of workers may be another.

    Raises:
        ValueError: it is of another problem or estimator.
    """
    fresh, kept = run.init(), run.kept_shapes()
    state = fresh._replace(kept=kept)
    found = {}
    for name in _ROWS:
        like = jax.tree.map(
            lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), getattr(state, name)
        )
        rows = leaves.unflatten(like, saved.arrays, name, check_shapes=False)
        rows = resume.fitted(rows, run.lower.run.num_workers)
        found[name] = mesh.place(rows, run.setup.where.mesh)
    levels: dict[str, Any] = {}
    for name, at in fresh.levels.items():
        prefix = f"{name}/"
        items = saved.arrays.items()
        arrays = {n.removeprefix(prefix): a for n, a in items if n.startswith(prefix)}
        revisits = arrays.pop("revisits")
        about = saved.about | {
            "rounds": saved.about["level_rounds"][name],
            "quota": saved.about["quota"][name],
        }
        rounds = resume.rounds_from_arrays(
            checkpoint.Saved(saved.step, arrays, about), at.rounds, run.levels[name].run.setup
        )
        levels[name] = level.LevelState(rounds, np.array(revisits))
    return run_lib.BilevelState(**found, **levels, steps_done=saved.about["rounds"])


def best_of(run: run_lib.BilevelRun, saved: checkpoint.Saved) -> types.PyTree:
    """The best x and y so far, as a checkpoint has them; None: there are none."""
    if not saved.about["has_best"]:
        return None
    like = jax.device_get({"x": per_example.plain(run.x), "y": run.y0})
    return leaves.unflatten(like, saved.arrays, "best_params")


def digests(run: run_lib.BilevelRun) -> dict[str, Any]:
    """Of what the run depends on beside its configuration, as `rounds.fingerprint` compares."""
    found: dict[str, Any] = {}
    for of, name in (("", LOWER), ("upper ", UPPER)):
        own = run.levels[name].run.digests
        found |= {of + part: own[part] for part in _OF_LEVEL if part in own}
    params = digests_lib.of_arrays((run.x, run.y0))
    return found | run.digests | {"params": params, "jax": run.lower.run.digests["jax"]}
