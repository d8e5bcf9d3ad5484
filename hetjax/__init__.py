"""Training on workers that are not equal: quotas, rounds that do not block, balanced orders.

Names are resolved when they are first used, so that parts that need no JAX (`hetjax.quota`,
the launcher) start without it. `hetjax.quota`, `hetjax.gates`, `hetjax.ordering` and
`hetjax.topology` hold the parts of a run.
"""

import importlib
from typing import Any

from hetjax import messages as messages

__version__ = "0.1.0"

_HOMES = {
    "BilevelResult": "hetjax.bilevel.rounds.results",
    "Collected": "hetjax.types",
    "Contribution": "hetjax.types",
    "FitResult": "hetjax.records.results",
    "LocalRule": "hetjax.local.rules",
    "Losses": "hetjax.types",
    "Microbatch": "hetjax.types",
    "OfMeans": "hetjax.types",
    "NonFiniteError": "hetjax.rounds.round_report",
    "OuterReport": "hetjax.bilevel.rounds.outer_report",
    "Run": "hetjax.rounds.run",
    "STOP": "hetjax.training.callbacks",
    "SavedRun": "hetjax.records.results",
    "RoundReport": "hetjax.reported",
    "Shared": "hetjax.types",
    "StatefulLoss": "hetjax.losses.stateful",
    "TrainState": "hetjax.types",
    "augmented": "hetjax.data.augmenting",
    "batch_loss": "hetjax.losses.batch_loss",
    "evaluate": "hetjax.records.evaluate",
    "fit": "hetjax.training.fitting",
    "fit_bilevel": "hetjax.bilevel.rounds.fitting",
    "join_processes": "hetjax.comm.join",
    "leads": "hetjax.comm.join",
    "load": "hetjax.records.results",
    "linen_loss": "hetjax.adapters",
    "linen_metrics": "hetjax.adapters",
    "linen_variables": "hetjax.adapters",
    "make_train_state": "hetjax.rounds.state",
    "make_train_step": "hetjax.training.train_step",
    "make_worker_mesh": "hetjax.mesh",
    "nnx_loss": "hetjax.adapters",
    "nnx_metrics": "hetjax.adapters",
    "nnx_model": "hetjax.adapters",
    "per_example_clip": "hetjax.local.clipping",
    "per_example": "hetjax.adapters.per_example",
    "scale_by_progress": "hetjax.schedules",
    "stream": "hetjax.data.iterables",
    "use_cpu_workers": "hetjax.mesh",
}

_ROOMS = ("bilevel", "gates", "ordering", "parts", "quota", "ray", "topology", "writers")

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"hetjax.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
