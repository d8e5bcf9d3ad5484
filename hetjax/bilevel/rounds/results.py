"""What came of a bilevel run, as `fit_bilevel` returns it."""

import dataclasses
from typing import Any

from hetjax import types
from hetjax.bilevel.rounds import run as run_lib
from hetjax.records import results


@dataclasses.dataclass(frozen=True, repr=False)
class BilevelResult(results.SavedRun):
    """What `fit_bilevel` returns; `params` are `{"x": …, "y": …}`."""

    state: run_lib.BilevelState
    """Of all workers, leaves `[num_workers, ...]`."""
    rounds: list[dict[str, Any]]
    """A dict a round of either level, as the files of rounds have them."""

    def _rounds(self) -> list[dict[str, Any]]:
        return self.rounds

    @property
    def x(self) -> types.PyTree:
        """The upper variable after the last step; a `PerExample` leaf is its plain array."""
        return self.params["x"]

    @property
    def y(self) -> types.PyTree:
        """The lower variable that the last step reached; the mean of replicas with gossip."""
        return self.params["y"]

    @property
    def best_x(self) -> types.PyTree:
        """At the recorded step with the lowest upper loss, before its update."""
        return self.best_params["x"]

    @property
    def best_y(self) -> types.PyTree:
        """The lower variable that was reached there."""
        return self.best_params["y"]
