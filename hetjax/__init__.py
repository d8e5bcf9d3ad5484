"""Training on workers that are not equal: quotas, rounds that do not block, balanced orders.

Names are resolved when they are first used, so that parts that need no JAX (`hetjax.quota`,
the launcher) start without it. `hetjax.quota`, `hetjax.gates`, `hetjax.ordering` and
`hetjax.topology` hold the parts of a run.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Contribution": "hetjax.types",
    "FitResult": "hetjax.training.driver",
    "LocalRule": "hetjax.training.rules",
    "Microbatch": "hetjax.types",
    "NonFiniteError": "hetjax.training.reporting",
    "Run": "hetjax.training.run",
    "RoundReport": "hetjax.training.record",
    "Shared": "hetjax.types",
    "TrainState": "hetjax.types",
    "fit": "hetjax.training.fit",
    "join_processes": "hetjax.cluster.processes",
    "linen_loss": "hetjax.models.adapters",
    "linen_metrics": "hetjax.models.adapters",
    "make_train_state": "hetjax.training.state",
    "make_train_step": "hetjax.training.fused",
    "make_worker_mesh": "hetjax.mesh",
    "nnx_loss": "hetjax.models.adapters",
    "nnx_metrics": "hetjax.models.adapters",
    "nnx_model": "hetjax.models.adapters",
    "scale_by_progress": "hetjax.training.schedules",
    "use_cpu_workers": "hetjax.mesh",
}

_ROOMS = ("gates", "ordering", "parts", "quota", "topology")

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"hetjax.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
