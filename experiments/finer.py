"""Are microbatches too large to divide well among the workers, and what would smaller ones save?

Eight microbatches among speeds 4 : 2 : 1 : 1 go as 4 2 1 1, and all end together. Four go as
3 1 0 0 at best, in half as long again as their examples need. This module predicts, by the
exact solver on costs that the clocks have shown, what the same examples would take in smaller
microbatches, and in rounds of more microbatches. Assumes that a microbatch takes in proportion to
its examples; a device that small ones do not keep busy takes longer.
"""

from typing import Any, NamedTuple

import numpy as np

from hetjax.quota import solver

_ROUNDS = 40  # the last full ones, by which the workers' costs are told
_DIVISORS = 2, 4, 8
_LEAST = 0.1  # part of the round below which nothing is said
_ENOUGH = 0.02  # part by which a finer division must save more to be named


class Finer(NamedTuple):
    """What a finer division would save."""

    quotas: tuple[int, ...]  # the best for the costs, in microbatches as they are
    round_secs: float  # of these
    divisor: int  # of the size of a microbatch; as many times the budget
    saved: float  # part of the round
    saved_by_budget: float  # part of an example's time, with microbatches as they are


def measured(
    done: np.ndarray, compute_secs: np.ndarray, host_secs: np.ndarray
) -> solver.WorkerCosts | None:
    """What a round costs each worker: medians over rounds. None where one never computed.

    Args:
      done: i64[rounds, n], microbatches.
      compute_secs: f64[rounds, n], of these.
      host_secs: f64[rounds, n], what a worker's process needs beside them: the overhead.
    """
    busy = done > 0
    if not busy.any(axis=0).all():
        return None
    each = np.where(busy, compute_secs / np.maximum(done, 1), np.nan)
    secs = np.nanmedian(each, axis=0)
    if not (secs > 0).all():
        return None
    return solver.WorkerCosts(np.nanmedian(np.where(busy, host_secs, np.nan), axis=0), secs)


def advice(costs: solver.WorkerCosts, budget: int, *, most: int = 8) -> Finer | None:
    """What smaller microbatches would save; None where that is less than a tenth of the round.

    Args:
      costs: of n workers, in seconds.
      budget: microbatches of a round.
      most: the largest divisor that a microbatch's size has.
    """
    quotas = solver.solve_quotas(costs, budget)
    now = float(costs.round_secs(quotas).max())
    found: Finer | None = None
    for divisor in _DIVISORS:
        if divisor > most:
            break
        smaller = solver.WorkerCosts(costs.overhead_secs, costs.secs_per_microbatch / divisor)
        saved = 1.0 - solver.optimal_round_secs(smaller, divisor * budget) / now
        by_budget = 1.0 - solver.optimal_round_secs(costs, divisor * budget) / divisor / now
        if saved > (_LEAST if found is None else found.saved + _ENOUGH):
            found = Finer(tuple(quotas.tolist()), now, divisor, saved, by_budget)
    return found


def of_run(run: Any) -> Finer | None:
    """What they would save in a run that quotas by speed and no gate had; None: too little.

    Args:
      run: what `fit` returned, or `hetjax.load(workdir)`. Of its last full rounds those count
        whose workers were the same as in the last one.
    """
    here = run.history[-1]["present"] if run.history else []
    lines = [line for line in run.history if line["full"] and line["present"] == here]
    lines = lines[-_ROUNDS:]
    if len(lines) < _ROUNDS:
        return None
    own = np.flatnonzero(here)
    done = np.array([line["microbatches_done"] for line in lines])[:, own]
    secs = np.array([line["compute_secs"] for line in lines])[:, own]
    host = np.array([line.get("host_secs") or np.zeros(len(here)) for line in lines])[:, own]
    if (costs := measured(done, secs, host)) is None:
        return None
    size = run.config["microbatch_size"]
    return advice(costs, run.config["budget"], most=size & -size)
