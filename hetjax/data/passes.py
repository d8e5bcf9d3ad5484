"""One order that is being worked through: a queue of examples and what returns to its head.

A `Shard` holds what never changes of it, a `PassState` all that does. `Shard.commit` spends the
state that it is given: it writes into its arrays.
"""

from typing import Any, NamedTuple

import numpy as np

from hetjax.data import ledger as ledger_lib
from hetjax.ordering import ordering as ordering_lib

PADDING = -1


class PassState(NamedTuple):
    """One order that is being worked through."""

    order_state: Any  # the ordering's
    pass_index: int
    queue: np.ndarray  # i32[m]: example ids; those from `head` on are still to come
    head: int

    @property
    def remaining(self) -> np.ndarray:
        """i32[m - head]: the example ids still to come, a view."""
        return self.queue[self.head :]


class Shard:
    """The examples that one order goes through: what never changes of them.

    Args:
        ordering: makes the order.
        units: i32[m]: the example ids, by position in the shard.
        microbatch_size: B.
        seed: names the order's stream of random numbers.
        place_of: i32[N]: the inverse of `units`; None where those are 0 .. N - 1.
    """

    def __init__(
        self,
        ordering: ordering_lib.Ordering,
        units: np.ndarray,
        *,
        microbatch_size: int,
        seed: tuple[int, ...],
        place_of: np.ndarray | None = None,
    ) -> None:
        self._ordering = ordering
        self._units = units
        self._place_of = place_of
        self._microbatch_size = microbatch_size
        self._seed = seed

    def init(self) -> PassState:
        """At the head of the first pass."""
        order_state = self._ordering.init(len(self._units), self._seed)
        return PassState(order_state, 0, self.ordered_units(order_state), 0)

    def ordered_units(self, order_state: Any) -> np.ndarray:
        """i32[m]: all units of the pass, in order; a copy."""
        return self._units[order_state.order]

    def microbatches_left(self, own: PassState) -> int:
        """Of this pass; the last may hold padding."""
        return -(-len(own.remaining) // self._microbatch_size)

    def peek(self, own: PassState, count: int) -> np.ndarray:
        """i32[<= count, microbatch_size]: the next microbatches; the last may hold padding.

        They are a copy: `commit` writes into the queue.
        """
        size = self._microbatch_size
        units = own.remaining[: count * size]
        rows = np.full((-(-len(units) // size), size), PADDING, np.int32)
        rows.reshape(-1)[: len(units)] = units
        return rows

    def commit(
        self,
        own: PassState,
        ledger: ledger_lib.LedgerState,
        *,
        taken: int,
        processed: np.ndarray,
        returned: np.ndarray,
        unit_signs: np.ndarray | None,
    ) -> tuple[PassState, ledger_lib.LedgerState]:
        """Takes `taken` microbatches off the head, and begins the next pass where none is left.

        What returns takes the places before the new head, where it came from.
        """
        units, back = without_padding(processed), without_padding(returned)
        if unit_signs is not None:
            unit_signs = unit_signs.reshape(-1)[processed.reshape(-1) != PADDING]
        positions = units if self._place_of is None else self._place_of[units]
        order_state = self._ordering.place(own.order_state, positions, unit_signs)
        ledger = ledger_lib.commit(ledger, units)
        end = min(own.head + taken * self._microbatch_size, len(own.queue))
        head = end - len(back)
        own.queue[head:end] = back
        if head < len(own.queue):
            return PassState(order_state, own.pass_index, own.queue, head), ledger
        ledger = ledger_lib.close_pass(ledger, None if self._place_of is None else self._units)
        queue = self.ordered_units(order_state)
        return PassState(order_state, own.pass_index + 1, queue, 0), ledger


def without_padding(rows: np.ndarray) -> np.ndarray:
    """i[k]: the units in rows of microbatches."""
    units = rows.reshape(-1)
    return units[units != PADDING]
