"""A gate of one's own, `gate=after(3)`: a round closes after 3 microbatches of all workers."""

import threading
from typing import Annotated

import numpy as np

import hetjax


class Counting:
    """What the workers' threads ask. The processes of a run count together, over the board."""

    def __init__(self, most, board):
        self._lock, self._most, self._board = threading.Lock(), most, board

    def begin(self, quotas):
        self._done = 0

    def is_open(self):
        return self._count(0) < self._most

    def finished(self, worker, microbatches_done):
        self._count(1)

    def _count(self, more):
        with self._lock:
            self._done += more
        return self._done if self._board is None else self._board.add("done", more)


@hetjax.parts.factory
def after(most: Annotated[int, hetjax.parts.integer(at_least=1, says="microbatches a round")]):
    """Closes after `most` microbatches."""

    def closes_at(ends, quotas):
        flat = np.sort(ends.reshape(*ends.shape[:-2], -1), axis=-1)
        return flat[..., min(most, flat.shape[-1]) - 1]  # when the last one ends, at the latest

    return hetjax.gates.Gate(lambda board, clock: Counting(most, board), closes_at)
