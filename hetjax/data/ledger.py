"""Counts how often each example was processed, so that "exactly once" is measured, not hoped.

`stream` raises a count when it commits the round of a finished microbatch. `close_pass` judges a
finished pass and starts counting anew. Examples that an unfinished pass has not reached yet are not
missing.

`close_pass` spends the state that it is given: it writes into its arrays.
"""

from typing import NamedTuple

import numpy as np


class LedgerState(NamedTuple):
    """How often each example was processed, in the open pass and in the finished ones."""

    counts: np.ndarray  # i32[num_examples]: in the open pass
    reached: np.ndarray  # bool[num_examples]: in a finished pass
    closed_missing: int  # of the finished passes
    closed_duplicated: int  # of the finished passes


def init(num_examples: int) -> LedgerState:
    """A ledger in which nothing was processed.

    Example:
        >>> state = init(4)
        >>> np.add.at(state.counts, [0, 2, 2], 1)
        >>> missing(state), duplicated(state), never_processed(state)
        (0, 1, 2)
        >>> missing(close_pass(state, np.arange(4)))
        2
    """
    return LedgerState(np.zeros(num_examples, np.int32), np.zeros(num_examples, bool), 0, 0)


def close_pass(state: LedgerState, example_ids: np.ndarray, *, num_dropped: int = 0) -> LedgerState:
    """Judges the pass over `example_ids`, and sets their counts to zero.

    Of these, `num_dropped` were left out on purpose: they are not missing.
    """
    counts = state.counts[example_ids]
    state.reached[example_ids] |= counts > 0
    closed = state._replace(
        closed_missing=state.closed_missing + int(np.sum(counts == 0)) - num_dropped,
        closed_duplicated=state.closed_duplicated + _superfluous(counts),
    )
    state.counts[example_ids] = 0
    return closed


def missing(state: LedgerState) -> int:
    """Examples of finished passes that were never processed."""
    return state.closed_missing


def duplicated(state: LedgerState) -> int:
    """Superfluous times that an example was processed in one pass, the open pass included."""
    return state.closed_duplicated + _superfluous(state.counts)


def never_processed(state: LedgerState) -> int:
    """Examples that no pass has reached: in private data, those of a worker that does nothing."""
    return int(np.sum(~state.reached & (state.counts == 0)))


def _superfluous(counts: np.ndarray) -> int:
    return int(np.sum(np.maximum(counts - 1, 0)))
