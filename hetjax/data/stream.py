"""Order and quotas become the microbatches of a round, each example exactly once a pass.

Shared data: one order for the whole set, cut by prefix sums of the quotas. Private data: each
worker owns a shard, with an order and passes of its own; where each process has a part of the data,
its workers divide that part, or share it if its examples come once. A pass is once through an
order. A round never spans two passes, so the next order may depend on all of the last one.

What was planned and not processed (a gate closed, a worker died) goes back to the head of its
order as whole microbatches, in (worker, position) order. Examples are committed in that order,
too. The ledger counts the realised order, not the planned one, and signs place that.

A stream holds what never changes in a run. All that changes is a `StreamState`, which goes into
the stream's functions and comes out of them. `commit` spends the state that it is given, as
donation does: it writes into its arrays, so only the state that comes out may be used. So a
round copies nothing that is as long as the data set.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import ledger as ledger_lib
from hetjax.data import passes as passes_lib
from hetjax.quota import solver

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
    """Where a stream stands between two rounds: only arrays, whole numbers and tuples.

    The shapes of the arrays do not change in a run.
    """

    passes: tuple[passes_lib.PassState, ...]  # one for the whole set; in private data one a worker
    ledger: ledger_lib.LedgerState
    examples_processed: int


class _Stream:
    """Shards, each of which some workers go through: all of them, or one."""

    def __init__(
        self, shards: list[passes_lib.Shard], workers: list[np.ndarray], *, ends_early: bool = False
    ) -> None:
        self._shards, self._workers = shards, workers  # of each shard, one after the other
        self._sizes, self._firsts = [len(some) for some in workers], [some[0] for some in workers]
        self.num_workers, self._ends_early = sum(self._sizes), ends_early
        self.shards = [shard.example_ids for shard in shards]
        self.num_examples = sum(map(len, self.shards))
        self.microbatch_size = shards[0].microbatch_size
        self.examples_per_epoch = self.num_examples - sum(shard.num_dropped for shard in shards)

    def init(self) -> StreamState:
        """The state before the first round."""
        passes = tuple(shard.init() for shard in self._shards)
        return StreamState(passes, ledger_lib.init(self.num_examples), 0)

    def epoch(self, state: StreamState) -> int:
        """The epoch that the next round belongs to."""
        return state.examples_processed // self.examples_per_epoch

    def counted(self, state: StreamState) -> dict[str, int]:
        """Examples that were processed, and what the ledger says of them."""
        return {
            "examples_processed": state.examples_processed,
            "examples_missing": ledger_lib.missing(state.ledger),
            "examples_duplicated": ledger_lib.duplicated(state.ledger),
            "examples_never_processed": ledger_lib.never_processed(state.ledger),
        }

    def dropped(self, state: StreamState) -> int:
        """Examples that passes have left out on purpose."""
        seen = sum(own.pass_index * len(own.queue) + own.head for own in state.passes)
        return seen - state.examples_processed + sum(shard.num_cut for shard in self._shards)

    def upcoming(
        self, state: StreamState, quotas: np.ndarray, workers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What these workers do in the next two rounds, if quotas stay as they are.

        Returns:
            microbatches i32[k, B], and of which pass each is, i64[k].
        """
        found, passes = [], []
        for shard, own, members in zip(self._shards, state.passes, self._workers, strict=True):
            total, stops = int(quotas[members].sum()), np.cumsum(quotas[members])
            microbatches = shard.peek(own, 2 * total)
            for start in (0, total):
                for stop, worker in zip(start + stops, members.tolist(), strict=True):
                    if worker in workers:
                        found.append(microbatches[stop - quotas[worker] : stop])
                        passes += [own.pass_index] * len(found[-1])
        return np.concatenate(found), np.asarray(passes, int)

    def plan(self, state: StreamState, quotas: np.ndarray) -> Assignment:
        """Takes the next microbatches of each order; changes nothing.

        Args:
            state: where the stream stands.
            quotas: i64[W], at most `total` together, and as `fitted` gives them.
        """
        counts = np.add.reduceat(quotas, self._firsts).tolist()
        triples = zip(self._shards, state.passes, counts, strict=True)
        microbatches = [shard.peek(own, count) for shard, own, count in triples]
        passes = np.repeat([own.pass_index for own in state.passes], self._sizes)
        return Assignment(np.concatenate(microbatches), _starts(quotas), passes)

    def commit(
        self,
        state: StreamState,
        plan: Assignment,
        done: np.ndarray,
        example_signs: Sequence[Any] | None = None,
    ) -> StreamState:
        """Counts and places what was done, and puts the rest back at the head of its order.

        Args:
            state: the one that the plan was made from; it is spent.
            plan: of this round.
            done: i64[W]: each worker finished the first `done[w]` of its microbatches.
            example_signs: for each worker i8[done[w], B]; None if the order takes none.
        """
        quotas = np.diff(plan.starts)
        position = np.arange(len(plan.example_ids)) - np.repeat(plan.starts[:-1], quotas)
        is_finished = position < np.repeat(done, quotas)
        passes, ledger, examples = list(state.passes), state.ledger, state.examples_processed
        for index, (shard, members) in enumerate(zip(self._shards, self._workers, strict=True)):
            rows = slice(plan.starts[members[0]], plan.starts[members[-1] + 1])
            taken, is_done, own = plan.example_ids[rows], is_finished[rows], passes[index]
            if len(taken) == 0:
                continue
            processed, back = taken[is_done].reshape(-1), taken[~is_done]
            signs = None
            if example_signs is not None:
                signs = np.concatenate([np.asarray(example_signs[w]) for w in members])
                signs = signs.reshape(-1)[processed >= 0]
            processed, back = processed[processed >= 0], back[back >= 0]
            # Of the counts' dtype: with a Python 1 this takes 15 times as long.
            np.add.at(ledger.counts, processed, np.int32(1))
            examples += len(processed)
            head = own.head + len(processed)
            own.queue[head : head + len(back)] = back
            now = own._replace(head=head)
            is_over = len(now.remaining) == shard.num_dropped
            is_over |= self._ends_early and len(now.remaining) < taken.size
            if is_over:  # the order has a place for what is dropped all the same
                processed = np.concatenate([processed, now.remaining])
                signs = None if signs is None else np.pad(signs, (0, len(now.remaining)))
            places = processed if shard.place_of is None else shard.place_of[processed]
            passes[index] = now._replace(order_state=shard.place(own.order_state, places, signs))
            if is_over:
                passes[index], ledger = shard.next_pass(passes[index], ledger)
        return StreamState(tuple(passes), ledger, examples)


class SharedStream(_Stream):
    """Shared data: one order over all examples, whichever worker processes them.

    Args:
        num_examples: N, at least 1.
        num_workers: W.
        seed: of the order's random numbers.
        **of_pass: `microbatch_size`, `ordering`, and what else `passes.Shard` takes.

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

    def __init__(self, num_examples: int, num_workers: int, *, seed: int, **of_pass: Any) -> None:
        ids = np.arange(num_examples, dtype=np.int32)
        whole = passes_lib.Shard(example_ids=ids, seed=(seed,), **of_pass)
        super().__init__([whole], [np.arange(num_workers)])
        self.shares = np.full(num_workers, 1 / num_workers)
        self.cut = whole.cut

    def total(self, state: StreamState, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, or what is left of the epoch.

        A gate may leave over any number, and an update from a handful of examples does harm. So a
        gated run does a rest of less than one and a half budgets in two rounds. Each has half a
        budget or more, and no gate closes the last one.
        """
        left = self._shards[0].microbatches_left(state.passes[0])
        if gated and budget < left < 1.5 * budget:
            return -(-left // 2)
        return min(budget, left)

    def is_last(self, state: StreamState, quotas: np.ndarray) -> bool:
        """Whether a round of these quotas ends the epoch, unless some microbatches return."""
        return int(quotas.sum()) >= self._shards[0].microbatches_left(state.passes[0])

    def fitted(self, state: StreamState, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as this data can serve them: as they are."""
        return quotas

    def again(self, past: Assignment, quotas: np.ndarray) -> Assignment:
        """The microbatches of a past round, cut anew by quotas i64[W] of the same sum."""
        return past._replace(starts=_starts(quotas))


class PrivateStream(_Stream):
    """Private data: worker w processes shard w alone, pass after pass at its own pace.

    The epoch is examples processed / N. Arguments as `SharedStream`, and

    Args:
        proportions: f64[W]: the shards' relative sizes (largest remainder); None = equal.
        parts: of the data, whose ids follow each other: the examples of each and the workers that
            divide it, or share it in its own order where examples come once; (): there is one.
        of_round: not 0: a worker's pass ends where less is left of it than its last quota.

    Raises:
        ValueError: there are more workers than examples.
    """

    def __init__(
        self,
        num_examples: int,
        num_workers: int,
        *,
        seed: int,
        proportions: Sequence[float] | None = None,
        parts: Sequence[tuple[int, np.ndarray]] = (),
        comes_once: bool = False,
        of_round: int = 0,
        **of_pass: Any,
    ) -> None:
        weights = np.ones(num_workers) if proportions is None else np.asarray(proportions, float)
        place_of, first, shares = np.empty(num_examples, np.int32), 0, []
        shards: list[passes_lib.Shard] = []
        of_shards: list[np.ndarray] = []
        for index, (size, workers) in enumerate(parts or [(num_examples, np.arange(num_workers))]):
            if size < len(workers):
                whose = f"process {index} gives its" if parts else "got 'private' for"
                raise ValueError(f"data.sharing: {whose} {len(workers)} workers, {size} examples")
            ids, groups = np.arange(first, first + size, dtype=np.int32), [workers]
            if not comes_once:
                ids = ids[np.random.default_rng((seed, 0x5A4D)).permutation(size)]
                groups = np.split(workers, len(workers))
            amounts = np.array([weights[group].sum() for group in groups])
            # Each shard gets one example first: it may be small, but never empty.
            sizes = 1 + solver.largest_remainder(amounts + (not amounts.any()), size - len(groups))
            for own in np.split(ids, np.cumsum(sizes)[:-1]):
                place_of[own] = np.arange(len(own))
                of_shard = {"seed": (seed, len(shards)), "place_of": place_of, **of_pass}
                shards.append(passes_lib.Shard(example_ids=own, comes_once=comes_once, **of_shard))
            shares += [*np.resize(sizes, len(workers)) * len(groups) / len(workers)]
            of_shards, first = of_shards + groups, first + size
        super().__init__(shards, of_shards, ends_early=of_round > 0)
        self.shares = np.array(shares) / num_examples

    def total(self, state: StreamState, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, of which `fitted` may cut some off."""
        return budget

    def is_last(self, state: StreamState, quotas: np.ndarray) -> bool:
        """Workers end their passes at different times; no round is a last one for all."""
        return False

    def fitted(self, state: StreamState, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as the shards can serve them.

        Every worker that is present does one microbatch at least, taken from the largest quota.
        With none, its shard would have no part in the objective. A worker near the end of its pass
        does what is left of it. The round is smaller then: others would take longer for the rest.
        """
        pairs = zip(self._shards, state.passes, strict=True)
        left = [shard.microbatches_left(own) for shard, own in pairs]
        quotas = with_every_worker(quotas, present)
        if len(left) < len(quotas):  # workers share what is left of their part
            before = [np.cumsum(quotas[some]) - quotas[some] for some in self._workers]
            left = [max(m - b, 0) for m, each in zip(left, before, strict=True) for b in each]
        return np.minimum(quotas, left)

    def again(self, past: Assignment, quotas: np.ndarray) -> Assignment:
        """The microbatches of a past round as they were: each worker has its own."""
        return past


def done_of(plan: Assignment, done: np.ndarray) -> Assignment:
    """What was done of a round: the first `done[w]` microbatches of each worker."""
    microbatches = [plan.microbatches(worker, int(count)) for worker, count in enumerate(done)]
    return plan._replace(example_ids=np.concatenate(microbatches), starts=_starts(done))


def _starts(counts: np.ndarray) -> np.ndarray:
    """`Assignment.starts` of so many microbatches of each worker."""
    return np.concatenate([[0], np.cumsum(counts)])


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
