"""One order that is being worked through: a queue of examples, and what returns to its head.

A pass is once through the order. A `Shard` holds what never changes, a `PassState` all that does.
`Shard.commit` spends the state that it is given: it writes into its arrays.
"""

from typing import Any, NamedTuple

import numpy as np

from hetjax import parts
from hetjax.checkpoints import leaves
from hetjax.data import ledger as ledger_lib
from hetjax.ordering import ordering as ordering_lib

PADDING = -1
_PLACE = "place(state, realised_examples, example_signs)"


class PassState(NamedTuple):
    """Where an order stands that is being worked through."""

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
        example_ids: i32[m]: the id of the example at each position of the shard.
        microbatch_size: B.
        seed: names the order's stream of random numbers.
        place_of: i32[N]: the inverse of `example_ids`; None if those are 0 .. N - 1.
        last: what becomes of a last microbatch that is not full: 'pad', 'fill' it up with other
            examples of the pass, which do not count, or 'drop' it.
        comes_once: examples of earlier rounds cannot be had again, and a pass may have fewer than
            it was to have: `cut` says so.

    Raises:
        ValueError: dropping it leaves nothing.
    """

    def __init__(
        self,
        ordering: ordering_lib.Ordering,
        example_ids: np.ndarray,
        *,
        microbatch_size: int,
        seed: tuple[int, ...],
        place_of: np.ndarray | None = None,
        last: str = "pad",
        comes_once: bool = False,
    ) -> None:
        if last == "drop" and len(example_ids) < microbatch_size:
            raise ValueError(
                f"data.last='drop': {len(example_ids)} examples are fewer than microbatch_size="
                f"{microbatch_size}, so that nothing would be left of a pass; take 'pad' or 'fill'"
            )
        self._last, self._comes_once = last, comes_once
        self._came: int | None = None
        self.num_dropped = len(example_ids) % microbatch_size if last == "drop" else 0
        self._ordering = ordering
        self._example_ids = example_ids
        self._place_of = place_of
        self._microbatch_size = microbatch_size
        self._seed = seed
        self._is_ours = parts.is_ours(ordering)
        self._called = f"ordering: {parts.named(ordering)}: "

    def init(self) -> PassState:
        """The state at the head of the first pass."""
        order_state = self._ordering.init(len(self._example_ids), self._seed)
        maker = f"{self._called}init({len(self._example_ids)}, {self._seed})"
        leaves.check_begun(order_state, maker)
        return PassState(order_state, 0, self._queue(order_state, maker), 0)

    def ordered(self, order_state: Any) -> np.ndarray:
        """i32[m]: all examples of the pass, in order; a copy."""
        return self._example_ids[order_state.order]

    def cut(self, came: int) -> None:
        """The source has ended: of the open pass there are only the first examples, in order."""
        self._came = came if came < len(self._example_ids) else None

    def _left(self, own: PassState) -> int:
        """Examples left of this pass."""
        if self._came is None:
            return len(own.remaining) - self.num_dropped
        left = int(np.sum(own.remaining < self._came))
        return left - left % self._microbatch_size if self._last == "drop" else left

    def microbatches_left(self, own: PassState) -> int:
        """Microbatches left of this pass; the last may hold padding."""
        return -(-self._left(own) // self._microbatch_size)

    def peek(self, own: PassState, count: int) -> np.ndarray:
        """i32[<= count, microbatch_size]: the next microbatches; the last may hold padding.

        They are a copy: `commit` writes into the queue.
        """
        size = self._microbatch_size
        stop = min(count, self.microbatches_left(own)) * size
        example_ids = own.remaining[: stop if self._came is None else min(stop, self._left(own))]
        microbatches = np.full((-(-len(example_ids) // size), size), PADDING, np.int32)
        microbatches.reshape(-1)[: len(example_ids)] = example_ids
        if self._last == "fill" and len(example_ids) % size:
            of_last = len(example_ids) % size
            if self._comes_once:  # of the same round
                others = example_ids[:-of_last]
            else:
                others = self.ordered(own.order_state)  # of the pass, whatever has returned
                others = others[~np.isin(others, example_ids[-of_last:])]
            others = others if len(others) else example_ids
            microbatches[-1, of_last:] = filling(np.resize(others, size - of_last))
        return microbatches

    def commit(
        self,
        own: PassState,
        ledger: ledger_lib.LedgerState,
        *,
        taken: int,
        processed: np.ndarray,
        returned: np.ndarray,
        example_signs: np.ndarray | None,
    ) -> tuple[PassState, ledger_lib.LedgerState]:
        """Takes `taken` microbatches off the head, and begins the next pass if none is left.

        What returns goes to the places before the new head, where it came from.
        """
        example_ids, back = without_padding(processed), without_padding(returned)
        if example_signs is not None:
            example_signs = example_signs.reshape(-1)[processed.reshape(-1) >= 0]
        ledger = ledger_lib.commit(ledger, example_ids)
        of_pass = len(own.queue) - self.num_dropped
        end = own.head + min(taken * self._microbatch_size, self._left(own))
        head = end - len(back)
        own.queue[head:end] = back
        is_over = head == of_pass
        if is_over and self.num_dropped:  # the order has a place for them all the same
            example_ids = np.concatenate([example_ids, own.queue[of_pass:]])
            if example_signs is not None:
                example_signs = np.pad(example_signs, (0, self.num_dropped))
        before = None if self._is_ours else leaves.signature(own.order_state)
        maker = f"{self._called}{_PLACE}"
        positions = example_ids if self._place_of is None else self._place_of[example_ids]
        order_state = self._ordering.place(own.order_state, positions, example_signs)
        queue = self._queue(order_state, maker) if is_over else own.queue
        if before is not None:
            leaves.check_kept(order_state, before, maker)
        if not is_over:
            return PassState(order_state, own.pass_index, queue, head), ledger
        of_shard = None if self._place_of is None else self._example_ids
        ledger = ledger_lib.close_pass(ledger, of_shard, num_dropped=self.num_dropped)
        return PassState(order_state, own.pass_index + 1, queue, 0), ledger

    def _queue(self, order_state: Any, maker: str) -> np.ndarray:
        """All examples of a new pass, in order; refuses what is no permutation of them."""
        order = ordering_lib.checked_order(order_state, len(self._example_ids), maker)
        return self._example_ids[order]


def without_padding(microbatches: np.ndarray) -> np.ndarray:
    """i[k]: the examples in microbatches, without padding and what fills up."""
    example_ids = microbatches.reshape(-1)
    return example_ids[example_ids >= 0]


def filling(example_ids: np.ndarray) -> np.ndarray:
    """As ids of examples that fill a microbatch up; below `PADDING`, and its own inverse."""
    return -2 - example_ids
