"""Which process reads which examples: each all of them, or a part of its own.

The ids of the parts follow each other: those of process 0 come first. Each process tells the others
how many examples it has, and alone reads them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hetjax import mesh
from hetjax.comm import key_value_store, runtime
from hetjax.data import sources

LOCAL = "process_local"  # of `data.sharing`


def alike(source: Any, sharing: str) -> Any:
    """What of their data all processes must have alike: how many, or the form of one of a part."""
    if sharing != LOCAL:
        return len(source)
    return str(jax.eval_shape(lambda first: first, sources.read(source, 0)))


def seed(config: Any) -> int:
    """Of what a source draws by the number of an example: other numbers in each part."""
    return config.seed + (runtime.current().process_id << 32) * (config.data.sharing == LOCAL)


class Owned:
    """What this process reads of the data; all processes of a run make it together.

    Args:
        source: that this process is given.
        sharing: as `data.sharing`.
        several: whether the run has several processes.
    """

    def __init__(self, source: Any, sharing: str, *, several: bool = False) -> None:
        self.part = 0 if sharing == LOCAL else None  # the process whose own part it is
        self.source, self._num_told, self._board = source, 0, None
        if self.part is not None and several and not runtime.current().seats:  # else refused
            self._board = key_value_store.RoundStore("parts", lambda: self._num_told)
            self.part = runtime.current().process_id
        self.sizes = self.tell(len(source))  # of each part
        self.num_examples, self.first = sum(self.sizes), sum(self.sizes[: self.part or 0])

    def tell(self, value: Any) -> list[Any]:
        """What the process of each part tells, as JSON values; they all call it together."""
        if self._board is None:
            return [value]
        self._num_told += 1
        each = range(runtime.current().num_processes)
        return [*self._board.gather(self.part or 0, value, each, what="tell of its data").values()]

    def workers(self, places: Sequence[mesh.Place]) -> list[np.ndarray]:
        """Those, in these places, that divide each part."""
        devices = [mesh.devices_at(place)[0] for place in places]
        parts = [device.process_index if self._board else 0 for device in devices]
        return [np.flatnonzero(np.equal(parts, own)) for own in range(len(self.sizes))]
