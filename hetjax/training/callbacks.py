"""The user's callbacks, one after the other, any of which may end the run."""

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax import parts

logger = logging.getLogger(__name__)


class _Stop(enum.Enum):
    STOP = "hetjax.STOP"


STOP = _Stop.STOP
"""A callback that returns it, or True, ends the run after the round that is computing."""


class Callbacks:
    """The user's callbacks, one after the other; any of them may end the run.

    Args:
        callbacks: called with each line.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = callbacks
        self._warned: set[int] = set()  # ids of callbacks already warned about
        self.stopper = ""  # the one that ended the run, in this process

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __call__(self, line: Any) -> bool:
        """Whether one of them ends the run; says once what else one answers."""
        ends = False
        for callback in self._callbacks:
            answer = callback(line)
            name = getattr(callback, "__name__", type(callback).__name__)
            is_truth = getattr(answer, "dtype", None) == np.bool_ and answer.size == 1
            says = isinstance(answer, bool) or is_truth
            if answer is STOP or (says and answer):
                ends, self.stopper = True, self.stopper or name
            elif answer is not None and not says and id(callback) not in self._warned:
                self._warned.add(id(callback))
                logger.warning(
                    f"callback {name} returned {parts.shown(answer)}; only True or hetjax.STOP "
                    "ends the run"
                )
        return ends
