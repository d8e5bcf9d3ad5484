"""One order that is being worked through: a queue of examples, and what returns to its head.

A pass is once through the order. A `Shard` holds what never changes, a `PassState` all that does.
`stream` commits what was done of it.
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
        of_round: microbatches of a round, where a pass is of whole rounds; 0: it may end in any.

    Raises:
        ValueError: dropping the rest leaves nothing.
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
        of_round: int = 0,
    ) -> None:
        self._whole = microbatch_size * of_round or (microbatch_size if last == "drop" else 1)
        if len(example_ids) < self._whole:
            name, what = ("last_round", "a round of ") if of_round else ("last", "microbatch_size=")
            raise ValueError(
                f"data.{name}: got 'drop' with {len(example_ids)} examples, fewer than "
                f"{what}{self._whole}: nothing is left"
            )
        self._last, self._comes_once = last, comes_once
        self._length = len(example_ids)  # of a pass, as far as its examples come
        self.num_dropped, self.num_cut = self._length % self._whole, 0  # of a pass; of a cut one
        self.example_ids, self.place_of = example_ids, place_of
        self.microbatch_size, self._seed = microbatch_size, seed
        self._called = f"ordering: {parts.named(ordering)}: "
        self._ordering, self._is_ours = ordering, parts.is_ours(ordering)

    def place(self, order_state: Any, *others: Any) -> Any:
        """As of the ordering; a user's must not change the form of its state."""
        before = None if self._is_ours else leaves.signature(order_state)
        after = self._ordering.place(order_state, *others)
        if before is not None:
            leaves.check_kept(after, before, f"{self._called}{_PLACE}")
        return after

    def init(self) -> PassState:
        """The state at the head of the first pass."""
        order_state = self._ordering.init(len(self.example_ids), self._seed)
        maker = f"{self._called}init({len(self.example_ids)}, {self._seed})"
        leaves.check_begun(order_state, maker)
        return self._begun(order_state, 0, maker)

    def _begun(self, order_state: Any, pass_index: int, maker: str) -> PassState:
        """At the head of a pass; refuses an order that is no permutation of its examples."""
        order = ordering_lib.checked_order(order_state, len(self.example_ids), maker)
        return PassState(order_state, pass_index, self.example_ids[order], 0)

    def next_pass(
        self, own: PassState, ledger: ledger_lib.LedgerState
    ) -> tuple[PassState, ledger_lib.LedgerState]:
        """Begins the pass after one that is over, by the order that was made of it."""
        begun = self._begun(own.order_state, own.pass_index + 1, f"{self._called}{_PLACE}")
        num_dropped = len(own.remaining)
        return begun, ledger_lib.close_pass(ledger, self.example_ids, num_dropped=num_dropped)

    def cut(self, came: int) -> None:
        """The source has ended: of the open pass there are only the first examples, in order."""
        whole = len(self.example_ids)
        self._length = came if came < whole - self.num_dropped else whole
        self.num_cut = came % self._whole if self._length < whole else 0

    def microbatches_left(self, own: PassState) -> int:
        """Microbatches left of this pass; the last may hold padding."""
        left = self._length - self._length % self._whole - own.head
        return -(-left // self.microbatch_size)

    def peek(self, own: PassState, count: int) -> np.ndarray:
        """i32[<= count, microbatch_size]: the next microbatches; the last may hold padding.

        They are a copy: `commit` writes into the queue.
        """
        size = self.microbatch_size
        stop = own.head + min(count, self.microbatches_left(own)) * size
        example_ids = own.queue[own.head : min(stop, self._length)]
        microbatches = np.full((-(-len(example_ids) // size), size), PADDING, np.int32)
        microbatches.reshape(-1)[: len(example_ids)] = example_ids
        of_last = len(example_ids) % size
        if self._last == "fill" and of_last:
            if self._comes_once:  # of the same round
                others = example_ids[:-of_last]
            else:  # of the pass, whatever has returned
                others = self.example_ids[own.order_state.order]
                others = others[~np.isin(others, example_ids[-of_last:])]
            others = others if len(others) else example_ids
            microbatches[-1, of_last:] = filling(np.resize(others, size - of_last))
        return microbatches


def filling(example_ids: np.ndarray) -> np.ndarray:
    """As ids of examples that fill a microbatch up; below `PADDING`, and its own inverse."""
    return -2 - example_ids
