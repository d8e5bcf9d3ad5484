"""What closes a round before every quota is done.

Each worker polls the gate between two microbatches. What is in flight when it closes is always
finished: a dispatched program cannot be taken back.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Gate(Protocol):
    """One gate serves all workers of a process, from their own threads."""

    def begin(self, quotas: np.ndarray) -> None:
        """A round begins, with quotas i64[W]."""

    def is_open(self) -> bool:
        """Whether a worker may begin another microbatch."""

    def finished(self, worker: int, microbatches_done: int) -> None:
        """A worker has finished its microbatch number `microbatches_done` of the round."""


class _AlwaysOpen:
    def begin(self, quotas: np.ndarray) -> None:
        pass

    def is_open(self) -> bool:
        return True

    def finished(self, worker: int, microbatches_done: int) -> None:
        pass


def none() -> Gate:
    """Never closes: every worker does its whole quota."""
    return _AlwaysOpen()


GATES: dict[str, Callable[..., Gate]] = {"none": none}
