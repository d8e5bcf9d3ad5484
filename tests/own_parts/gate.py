"""A gate of one's own: a round closes after so many microbatches, whoever did them.

hetjax.fit(…, gate=after(3))
"""

from typing import Annotated

import numpy as np

import hetjax


class Counting:
    """What the workers' threads ask."""

    def __init__(self, most):
        self._most = most

    def begin(self, quotas):
        self._done = 0

    def is_open(self):
        return self._done < self._most

    def finished(self, worker, microbatches_done):
        self._done += 1


@hetjax.parts.factory
def after(
    most: Annotated[int, hetjax.parts.integer(at_least=1, unit="microbatches", says="a round")],
) -> hetjax.gates.Gate:
    """Closes after `most` microbatches."""

    def closes_at(ends, quotas):
        flat = np.sort(ends.reshape(*ends.shape[:-2], -1), axis=-1)
        return flat[..., most - 1] if flat.shape[-1] >= most else np.full(flat.shape[:-1], np.inf)

    return hetjax.gates.Gate(lambda board, clock: Counting(most), closes_at)
