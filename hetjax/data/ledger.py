"""Counts how often each example was processed, so that "exactly once" is measured, not hoped."""

from typing import NamedTuple

import numpy as np


class SavedLedger(NamedTuple):
    counts: np.ndarray  # i32[num_units]
    ever: np.ndarray  # bool[num_units]
    missing: int
    duplicated: int


class Ledger:
    """One count a unit, raised when the round of its finished microbatch is committed.

    `close_pass` judges a finished pass and starts counting anew; what an unfinished pass has not
    reached yet is not missing.
    """

    def __init__(self, num_units: int) -> None:
        self.counts = np.zeros(num_units, np.int32)
        self._ever = np.zeros(num_units, bool)
        self._missing = 0
        self._duplicated = 0

    def commit(self, units: np.ndarray) -> None:
        """Adds one to each of `units` (i32[k], repetitions count)."""
        np.add.at(self.counts, units, 1)
        self._ever[units] = True

    def close_pass(self, units: np.ndarray | None = None) -> None:
        """Judges the pass over `units` (all by default), and sets their counts to zero."""
        counts = self.counts if units is None else self.counts[units]
        self._missing += int(np.sum(counts == 0))
        self._duplicated += int(np.sum(np.maximum(counts - 1, 0)))
        self.counts[slice(None) if units is None else units] = 0

    def save(self) -> SavedLedger:
        """A copy of all counts."""
        return SavedLedger(self.counts.copy(), self._ever.copy(), self._missing, self._duplicated)

    def restore(self, saved: SavedLedger) -> None:
        """Takes the counts of `save`."""
        self.counts, self._ever = saved.counts.copy(), saved.ever.copy()
        self._missing, self._duplicated = saved.missing, saved.duplicated

    @property
    def missing(self) -> int:
        """Units of finished passes that were never processed."""
        return self._missing

    @property
    def duplicated(self) -> int:
        """Superfluous times that a unit was processed in one pass, the open pass included."""
        return self._duplicated + int(np.sum(np.maximum(self.counts - 1, 0)))

    @property
    def never_processed(self) -> int:
        """Units that no pass has reached: in private data, those of a worker that does nothing."""
        return int(np.sum(~self._ever))
