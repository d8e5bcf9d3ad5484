"""Training on workers that are not equal: quotas, rounds that do not block, balanced orders.

Names are resolved when they are first used, so that parts that need no JAX (`hetjax.quota`,
the launcher) start without it. `hetjax.quota`, `hetjax.gates`, `hetjax.ordering` and
`hetjax.topology` hold the parts of a run.
"""

import importlib
from typing import Any

from hetjax import messages as messages

__version__ = "0.1.0"

_NAMES = {
    "hetjax.adapters.linen": "linen_loss linen_metrics linen_variables",
    "hetjax.adapters.nnx": "nnx_loss nnx_metrics nnx_model",
    "hetjax.adapters.per_example": "per_example",
    "hetjax.bilevel.rounds.fitting": "fit_bilevel",
    "hetjax.bilevel.rounds.outer_report": "OuterReport",
    "hetjax.bilevel.rounds.results": "BilevelResult",
    "hetjax.comm.join": "join_processes leads",
    "hetjax.data.augmenting": "augmented",
    "hetjax.data.iterables": "stream",
    "hetjax.local.clipping": "per_example_clip",
    "hetjax.local.local_steps": "local_steps",
    "hetjax.local.rules": "LocalRule",
    "hetjax.losses.batch_loss": "batch_loss",
    "hetjax.losses.stateful": "StatefulLoss",
    "hetjax.cpu_workers": "use_cpu_workers",
    "hetjax.mesh": "make_worker_mesh",
    "hetjax.records.evaluate": "evaluate",
    "hetjax.records.results": "FitResult SavedRun load",
    "hetjax.reported": "RoundReport",
    "hetjax.rounds.round_report": "NonFiniteError",
    "hetjax.rounds.run": "Run",
    "hetjax.rounds.state": "make_train_state",
    "hetjax.schedules": "scale_by_progress",
    "hetjax.training.callbacks": "STOP",
    "hetjax.training.fitting": "fit",
    "hetjax.training.train_step": "make_train_step",
    "hetjax.types": "Collected Contribution Losses Microbatch OfMeans Shared TrainState",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

_ROOMS = ("bilevel", "gates", "ordering", "parts", "quota", "ray", "slices", "topology", "writers")

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"hetjax.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
