"""Is a source still what a run holds of it? Compares its length and a few examples each epoch.

A run takes the number of examples once, and a resident feed their values. What changes afterwards
(a buffer that grows, an epoch that is set) is no part of the run. Its user has to hear of that.
"""

import logging
from typing import Any

import numpy as np

from hetjax.data import sources, trial

logger = logging.getLogger(__name__)

_MOST = 4  # examples that are read again


class Held:
    """What a run holds of a source. Tells the first change of each kind on stderr.

    Args:
        source: a data source.
        name: what messages call the source.
        values: whether a run holds its values, too: read once, and the same when read again.
        way: how to have the new values read, for the message.
    """

    def __init__(self, source: Any, *, name: str, values: bool, way: str) -> None:
        self._source, self._name, self._way = source, name, way
        self._length = len(source)
        self._ids = np.unique(np.linspace(0, self._length - 1, _MOST).astype(np.int64))
        self._examples = self._read() if values else None
        self._has_told_length = False

    def compare(self) -> None:
        """Looks at the source as it is now."""
        try:
            length = len(self._source)
        except Exception:  # it was closed, as a file may be: it is not needed any more
            return
        if length != self._length and not self._has_told_length:
            self._has_told_length = True
            self._tell(f"has {length} examples now; this run stays with the {self._length} it had")
        if self._examples is None:
            return
        try:
            difference = trial.difference(self._examples, self._read(), self._ids)
        except ValueError as error:
            changed = str(error)
        else:
            if difference is None:
                return
            of_it = difference.field or "the item"
            changed = f"example {difference.example_id} is another one than before ({of_it})"
        self._examples = None
        self._tell(f"changes while it is used: {changed}. The values read once stay. {self._way}")

    def _read(self) -> Any:
        if isinstance(self._source, sources.ArraySource):  # draws nothing: 0.2 ms less an epoch
            return sources.fetch(self._source, self._ids)
        with trial.global_generators_as_they_are():
            return sources.fetch(self._source, self._ids)

    def _tell(self, what: str) -> None:
        logger.warning(f"{self._name} ({type(self._source).__name__}) {what}")
