"""Order and quotas become the microbatches of a round, each example exactly once a pass.

Shared data: one order for the whole set, cut by prefix sums of the quotas. Private data: each
worker owns a shard, with an order and passes of its own. A pass is once through an order. A round
never spans two passes, so the next order may depend on all of the last one.

What was planned and not processed (a gate closed, a worker died) goes back to the head of its
order as whole microbatches, in (worker, position) order. Examples are committed in that order,
too. The ledger counts the realised order, not the planned one, and signs place that.

A stream holds what never changes in a run. All that changes is a `StreamState`, which goes into
the stream's functions and comes out of them. `commit` spends the state that it is given, as
donation does: it writes into its arrays, so only the state that comes out may be used. So a
round copies nothing that is as long as the data set.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import ledger as ledger_lib
from hetjax.data import passes as passes_lib
from hetjax.ordering import ordering as ordering_lib
from hetjax.quota import shares

PADDING = passes_lib.PADDING


class Assignment(NamedTuple):
    """The microbatches of one round, in (worker, position) order; host arrays."""

    example_ids: np.ndarray  # i32[total, microbatch_size], -1 = padding, below: `passes.filling`
    starts: np.ndarray  # i64[num_workers + 1]: worker w has microbatches starts[w] to starts[w + 1]
    passes: np.ndarray  # i64[num_workers]: the pass that each worker works through

    def microbatches(self, worker: int, count: int | None = None) -> np.ndarray:
        """i32[count, microbatch_size]: the first `count` microbatches of a worker (or all)."""
        start, stop = self.starts[worker : worker + 2]
        return self.example_ids[start : stop if count is None else start + count]

    @property
    def quotas(self) -> np.ndarray:
        """i64[num_workers]"""
        return np.diff(self.starts)


class StreamState(NamedTuple):
    """Where a stream stands between two rounds: arrays, whole numbers and tuples alone.

    The shapes of the arrays do not change in a run.
    """

    passes: tuple[passes_lib.PassState, ...]  # one for the whole set; in private data one a worker
    ledger: ledger_lib.LedgerState
    examples_processed: int


def _cut(example_ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [example_ids[start : start + size] for start in range(0, len(example_ids), size)]


def examples_in(microbatches: np.ndarray) -> int:
    """Examples in microbatches, without padding and what fills up."""
    return int(np.sum(microbatches >= 0))


class SharedStream:
    """Shared data: one order over all examples, whoever processes them.

    Args:
        num_examples: N, at least 1.
        num_workers: W.
        microbatch_size: B.
        ordering: makes the order.
        seed: of the order's random numbers.
        last, comes_once: of a pass: see `passes.Shard`.

    Example:
        >>> from hetjax import ordering
        >>> reshuffled = ordering.random_reshuffling()
        >>> stream = SharedStream(10, 2, microbatch_size=2, ordering=reshuffled, seed=0)
        >>> state = stream.init()
        >>> plan = stream.plan(state, np.array([2, 1]))
        >>> state = stream.commit(state, plan, np.array([1, 1]))  # one microbatch returns
        >>> stream.plan(state, np.array([1, 0])).example_ids.tolist() == [
        ...     plan.microbatches(0)[1].tolist()
        ... ]
        True
        >>> state.examples_processed, stream.epoch(state)
        (4, 0)
    """

    def __init__(
        self,
        num_examples: int,
        num_workers: int,
        *,
        microbatch_size: int,
        ordering: ordering_lib.Ordering,
        seed: int,
        last: str = "pad",
        comes_once: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self.num_examples = num_examples
        self.microbatch_size = microbatch_size
        self.shares = np.full(num_workers, 1 / num_workers)
        example_ids = np.arange(num_examples, dtype=np.int32)
        self.shards = [example_ids]
        self._shard = passes_lib.Shard(
            ordering,
            example_ids,
            microbatch_size=microbatch_size,
            seed=(seed,),
            last=last,
            comes_once=comes_once,
        )
        self.cut = self._shard.cut
        self.examples_per_epoch = num_examples - self._shard.num_dropped

    def init(self) -> StreamState:
        """The state before the first round."""
        return StreamState((self._shard.init(),), ledger_lib.init(self.num_examples), 0)

    def epoch(self, state: StreamState) -> int:
        """The epoch that the next round belongs to."""
        return state.passes[0].pass_index

    def dropped(self, state: StreamState) -> int:
        """Examples that finished passes have left out on purpose."""
        return state.passes[0].pass_index * self._shard.num_dropped

    def total(self, state: StreamState, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, or what is left of the epoch.

        A gate may leave over any number, and an update from a handful of examples does harm. So a
        gated run does a rest of less than one and a half budgets in two rounds. Each has half a
        budget or more, and no gate closes the last one.
        """
        left = self._shard.microbatches_left(state.passes[0])
        if gated and budget < left < 1.5 * budget:
            return -(-left // 2)
        return min(budget, left)

    def is_last(self, state: StreamState, quotas: np.ndarray) -> bool:
        """Whether a round of these quotas ends the epoch, unless some microbatches return."""
        return int(quotas.sum()) >= self._shard.microbatches_left(state.passes[0])

    def fitted(self, state: StreamState, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as this data can serve them: as they are."""
        del state, present
        return quotas

    def upcoming(
        self, state: StreamState, quotas: np.ndarray, workers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What these workers do in the next two rounds, if quotas stay as they are.

        Returns:
            microbatches i32[k, B], and of which pass each is, i64[k].
        """
        total, stops = int(quotas.sum()), np.cumsum(quotas)
        microbatches = self._shard.peek(state.passes[0], 2 * total)
        cuts = [
            microbatches[start + stops[worker] - quotas[worker] : start + stops[worker]]
            for start in (0, total)
            for worker in workers
        ]
        found = np.concatenate(cuts)
        return found, np.full(len(found), state.passes[0].pass_index)

    def whole_pass(self, state: StreamState, quotas: np.ndarray) -> list[np.ndarray]:
        """The ids i32[k] of each round of a whole pass by the present order and these quotas."""
        size = int(quotas.sum()) * self.microbatch_size
        return _cut(self._shard.ordered(state.passes[0].order_state), size)

    def plan(self, state: StreamState, quotas: np.ndarray) -> Assignment:
        """Cuts the next `sum(quotas)` microbatches of the order; changes nothing.

        Args:
            state: where the stream stands.
            quotas: i64[W], at most `total` together.
        """
        (own,) = state.passes
        starts = np.concatenate([[0], np.cumsum(quotas)])
        passes = np.full(self.num_workers, own.pass_index)
        return Assignment(self._shard.peek(own, int(starts[-1])), starts, passes)

    def commit(
        self,
        state: StreamState,
        plan: Assignment,
        done: np.ndarray,
        example_signs: Sequence[Any] | None = None,
    ) -> StreamState:
        """Counts and places what was done, and puts the rest back at the head.

        Args:
            state: the one that the plan was made from; it is spent.
            plan: of this round.
            done: i64[W]: each worker finished the first `done[w]` of its microbatches.
            example_signs: for each worker i8[done[w], B]; None if the order takes none.
        """
        (own,) = state.passes
        position = np.arange(len(plan.example_ids)) - np.repeat(plan.starts[:-1], plan.quotas)
        finished = position < np.repeat(done, plan.quotas)
        processed = plan.example_ids[finished]
        own, ledger = self._shard.commit(
            own,
            state.ledger,
            taken=len(plan.example_ids),
            processed=processed,
            returned=plan.example_ids[~finished],
            example_signs=None
            if example_signs is None
            else np.concatenate([np.asarray(signs) for signs in example_signs]),
        )
        return StreamState((own,), ledger, state.examples_processed + examples_in(processed))

    def again(self, past: Assignment, quotas: np.ndarray) -> Assignment:
        """The microbatches of a past round, cut anew by quotas i64[W] of the same sum."""
        starts = np.concatenate([[0], np.cumsum(quotas)])
        return past._replace(starts=starts)


class PrivateStream:
    """Private data: worker w processes shard w alone, pass after pass at its own pace.

    The epoch is examples processed / N. Arguments as `SharedStream`, and

    Args:
        proportions: f64[W]: the shards' relative sizes (largest remainder); None = equal.

    Raises:
        ValueError: there are more workers than examples.
    """

    def __init__(
        self,
        num_examples: int,
        num_workers: int,
        *,
        microbatch_size: int,
        ordering: ordering_lib.Ordering,
        seed: int,
        proportions: Sequence[float] | None = None,
        last: str = "pad",
    ) -> None:
        if num_examples < num_workers:
            raise ValueError(
                f"data.sharing = 'private' with {num_examples} examples for {num_workers} "
                "workers: each worker needs at least one example; take fewer workers"
            )
        self.num_workers = num_workers
        self.num_examples = num_examples
        self.microbatch_size = microbatch_size
        proportions = [1.0] * num_workers if proportions is None else proportions
        # Each shard gets one example first: it may be small, but never empty.
        sizes = 1 + shares.largest_remainder(proportions, num_examples - num_workers)
        shuffled = np.random.default_rng((seed, 0x5A4D)).permutation(num_examples)
        self.shards = np.split(shuffled.astype(np.int32), np.cumsum(sizes)[:-1])
        self.shares = sizes / num_examples
        place_of = np.empty(num_examples, np.int32)
        for example_ids in self.shards:
            place_of[example_ids] = np.arange(len(example_ids))
        self._shards = [
            passes_lib.Shard(
                ordering,
                example_ids,
                microbatch_size=microbatch_size,
                seed=(seed, worker),
                place_of=place_of,
                last=last,
            )
            for worker, example_ids in enumerate(self.shards)
        ]
        dropped = sum(shard.num_dropped for shard in self._shards)
        self.examples_per_epoch = num_examples - dropped

    def init(self) -> StreamState:
        """The state before the first round."""
        passes = tuple(shard.init() for shard in self._shards)
        return StreamState(passes, ledger_lib.init(self.num_examples), 0)

    def epoch(self, state: StreamState) -> int:
        """The epoch that the next round belongs to."""
        return state.examples_processed // self.examples_per_epoch

    def dropped(self, state: StreamState) -> int:
        """Examples that finished passes have left out on purpose."""
        pairs = zip(self._shards, state.passes, strict=True)
        return sum(own.pass_index * shard.num_dropped for shard, own in pairs)

    def total(self, state: StreamState, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, of which `fitted` may cut some off."""
        del gated
        return budget

    def is_last(self, state: StreamState, quotas: np.ndarray) -> bool:
        """Workers end their passes at different times; no round is a last one for all."""
        del quotas
        return False

    def fitted(self, state: StreamState, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as the shards can serve them.

        Every worker that is present does one microbatch at least, taken from the largest quota.
        With none, its shard would have no part in the objective. A worker near the end of its pass
        does what is left of it. The round is smaller then: others would take longer for the rest.
        """
        return np.minimum(with_every_worker(quotas, present), self._left(state))

    def _left(self, state: StreamState) -> np.ndarray:
        pairs = zip(self._shards, state.passes, strict=True)
        return np.asarray([shard.microbatches_left(own) for shard, own in pairs])

    def upcoming(
        self, state: StreamState, quotas: np.ndarray, workers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `SharedStream.upcoming`."""
        microbatches = [self._shards[w].peek(state.passes[w], 2 * int(quotas[w])) for w in workers]
        passes = [state.passes[w].pass_index for w in workers]
        return np.concatenate(microbatches), np.repeat(passes, [len(own) for own in microbatches])

    def whole_pass(self, state: StreamState, quotas: np.ndarray) -> list[np.ndarray]:
        """The ids i32[k] of each round until each worker with a quota has done its whole pass."""
        parts = [
            _cut(shard.ordered(own.order_state), int(quota) * self.microbatch_size)
            for shard, own, quota in zip(self._shards, state.passes, quotas, strict=True)
            if quota
        ]
        return [
            np.concatenate([ids for ids in of_round if ids is not None])
            for of_round in itertools.zip_longest(*parts)
        ]

    def plan(self, state: StreamState, quotas: np.ndarray) -> Assignment:
        """Takes the next `quotas[w]` microbatches of each shard; changes nothing."""
        triples = zip(self._shards, state.passes, quotas, strict=True)
        microbatches = [shard.peek(own, int(quota)) for shard, own, quota in triples]
        starts = np.concatenate([[0], np.cumsum([len(own) for own in microbatches])])
        passes = np.asarray([own.pass_index for own in state.passes])
        return Assignment(np.concatenate(microbatches), starts, passes)

    def commit(
        self,
        state: StreamState,
        plan: Assignment,
        done: np.ndarray,
        example_signs: Sequence[Any] | None = None,
    ) -> StreamState:
        """As `SharedStream.commit`, shard by shard."""
        passes, ledger, examples = list(state.passes), state.ledger, state.examples_processed
        for worker, shard in enumerate(self._shards):
            microbatches, count = plan.microbatches(worker), int(done[worker])
            if len(microbatches) == 0:
                continue
            passes[worker], ledger = shard.commit(
                passes[worker],
                ledger,
                taken=len(microbatches),
                processed=microbatches[:count],
                returned=microbatches[count:],
                example_signs=None if example_signs is None else np.asarray(example_signs[worker]),
            )
            examples += examples_in(microbatches[:count])
        return StreamState(tuple(passes), ledger, examples)

    def again(self, past: Assignment, quotas: np.ndarray) -> Assignment:
        """The microbatches of a past round as they were: each worker has its own."""
        del quotas
        return past


def done_of(plan: Assignment, done: np.ndarray) -> Assignment:
    """What was done of a round: the first `done[w]` microbatches of each worker."""
    microbatches = [plan.microbatches(worker, int(count)) for worker, count in enumerate(done)]
    starts = np.concatenate([[0], np.cumsum(done)])
    return plan._replace(example_ids=np.concatenate(microbatches), starts=starts)


def with_every_worker(quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Quotas of the same sum that give each present worker a microbatch, if there are enough.

    Example:
        >>> with_every_worker(np.array([5, 3, 0, 0]), np.array([True, True, True, False])).tolist()
        [4, 3, 1, 0]
    """
    quotas = np.array(quotas)
    for worker in np.flatnonzero(present & (quotas == 0)):
        largest = int(np.argmax(quotas))
        if quotas[largest] > 1:
            quotas[largest] -= 1
            quotas[worker] = 1
    return quotas


Stream = SharedStream | PrivateStream
