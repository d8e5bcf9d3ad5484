"""Who talks to whom in a synchronisation.

The plan (graphs, matchings, mixing weights) is NumPy alone; the names that need JAX are
resolved when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hetjax.topology.graphs import GRAPHS, Graph, PeriodicGraph, make_graph
from hetjax.topology.matchings import decompose_matchings
from hetjax.topology.mixing import (
    check_mixing_matrix,
    metropolis_weights,
    mixing_matrices,
    spectral_gap,
)
from hetjax.topology.schedules import Schedule, matcha_direct, matcha_schedule

if TYPE_CHECKING:
    from hetjax.topology.reducers import REDUCERS, Options, Reducer, all_reduce

_NEED_JAX = ("REDUCERS", "Options", "Reducer", "all_reduce")

__all__ = [
    "GRAPHS",
    "REDUCERS",
    "Graph",
    "Options",
    "PeriodicGraph",
    "Reducer",
    "Schedule",
    "all_reduce",
    "check_mixing_matrix",
    "decompose_matchings",
    "make_graph",
    "matcha_direct",
    "matcha_schedule",
    "metropolis_weights",
    "mixing_matrices",
    "spectral_gap",
]


def __getattr__(name: str) -> Any:
    if name in _NEED_JAX:
        return getattr(importlib.import_module("hetjax.topology.reducers"), name)
    raise AttributeError(f"module 'hetjax.topology' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NEED_JAX])
