"""Order and quotas become the microbatches of a round, each example exactly once a pass.

Shared data: one order for the whole set, cut by prefix sums of the quotas. Private data: each
worker owns a shard, with an order and passes of its own. Either way a round never spans two
passes of an order, so the next order may depend on all of the last one.

What was planned and not processed (a gate closed, a worker died) goes back to the head of its
order as whole microbatches, in (worker, position) order. Units are committed in that order
too: the realised order, not the planned one, is what the ledger counts and what signs place.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import ledger as ledger_lib
from hetjax.ordering import ordering as ordering_lib
from hetjax.quota import shares

PADDING = -1


class RoundPlan(NamedTuple):
    """The microbatches of one round, in (worker, position) order; host arrays."""

    example_ids: np.ndarray  # i32[total, microbatch_size], -1 = padding
    starts: np.ndarray  # i64[num_workers + 1]: worker w has rows starts[w] to starts[w + 1]
    passes: np.ndarray  # i64[num_workers]: the pass that each worker works through

    def rows(self, worker: int, count: int | None = None) -> np.ndarray:
        """i32[count, microbatch_size]: the first `count` microbatches of a worker (or all)."""
        start, stop = self.starts[worker : worker + 2]
        return self.example_ids[start : stop if count is None else start + count]

    @property
    def quotas(self) -> np.ndarray:
        """i64[num_workers]"""
        return np.diff(self.starts)


class _Pass:
    """One order being worked through: the units still to come, and the order's state."""

    def __init__(
        self,
        method: ordering_lib.Ordering,
        units: np.ndarray,
        microbatch_size: int,
        seed: tuple[int, ...],
        place_of: np.ndarray | None = None,
    ) -> None:
        self._method = method
        self._units = units  # i32[m]: example ids, by position in the shard
        self._place_of = place_of  # i32[N]: the inverse; None where units are 0 .. N - 1
        self._microbatch_size = microbatch_size
        self.state: Any = method.init(len(units), seed)
        self.index = 0
        self.remaining = self.ordered_units

    @property
    def ordered_units(self) -> np.ndarray:
        """i32[m]: all units of the pass, in order."""
        return self._units[self.state.order]

    @property
    def microbatches_left(self) -> int:
        return -(-len(self.remaining) // self._microbatch_size)

    def peek(self, count: int) -> np.ndarray:
        """i32[<= count, microbatch_size]: the next microbatches; the last may hold padding."""
        size = self._microbatch_size
        units = self.remaining[: count * size]
        rows = -(-len(units) // size)
        if len(units) == rows * size:
            return units.reshape(rows, size)
        padding = np.full(rows * size - len(units), PADDING, np.int32)
        return np.concatenate([units, padding]).reshape(rows, size)

    def commit(
        self,
        taken: int,
        processed: np.ndarray,
        returned: np.ndarray,
        unit_signs: np.ndarray | None,
        ledger: ledger_lib.Ledger,
    ) -> bool:
        """Takes `taken` microbatches off the head; True where that completed the pass."""
        self.remaining = self.remaining[taken * self._microbatch_size :]
        units = _without_padding(returned)
        if len(units):
            self.remaining = np.concatenate([units, self.remaining])
        units = _without_padding(processed)
        ledger.commit(units)
        if unit_signs is not None:
            unit_signs = unit_signs.reshape(-1)[processed.reshape(-1) != PADDING]
        positions = units if self._place_of is None else self._place_of[units]
        self.state = self._method.place(self.state, positions, unit_signs)
        if len(self.remaining):
            return False
        ledger.close_pass(self._units)
        self.index += 1
        self.remaining = self.ordered_units
        return True


class SavedPass(NamedTuple):
    """Where a pass stands: arrays and whole numbers alone."""

    state: Any  # the ordering's
    pass_index: int
    remaining: np.ndarray  # i32[k]: example ids still to come


class SavedRounds(NamedTuple):
    """Where a stream stands between two rounds."""

    passes: tuple[SavedPass, ...]
    ledger: ledger_lib.SavedLedger
    examples_processed: int


class _Saving:
    """What both kinds of rounds share: to be saved between two rounds, and to go on from there."""

    _passes: list[_Pass]
    ledger: ledger_lib.Ledger
    examples_processed: int

    def save(self) -> SavedRounds:
        """Everything that the rounds to come depend on."""
        passes = tuple(SavedPass(p.state, p.index, p.remaining) for p in self._passes)
        return SavedRounds(passes, self.ledger.save(), self.examples_processed)

    def restore(self, saved: SavedRounds) -> None:
        """Goes on from `saved`, which a stream made by the same arguments gave."""
        for own, kept in zip(self._passes, saved.passes, strict=True):
            own.state, own.index, own.remaining = kept
        self.ledger.restore(saved.ledger)
        self.examples_processed = saved.examples_processed


def _cut(units: np.ndarray, size: int) -> list[np.ndarray]:
    return [units[start : start + size] for start in range(0, len(units), size)]


def _without_padding(rows: np.ndarray) -> np.ndarray:
    units = rows.reshape(-1)
    return units[units != PADDING]


class SharedRounds(_Saving):
    """Shared data: one order over all examples, whoever processes them.

    Args:
        num_examples: N, at least 1.
        num_workers: W.
        microbatch_size: B, even.
        method: the ordering.
        seed: of the order's random numbers.
    """

    def __init__(
        self,
        num_examples: int,
        num_workers: int,
        *,
        microbatch_size: int,
        method: ordering_lib.Ordering,
        seed: int,
    ) -> None:
        self.num_workers = num_workers
        self.num_examples = num_examples
        self.microbatch_size = microbatch_size
        self.ledger = ledger_lib.Ledger(num_examples)
        self.examples_processed = 0
        self.shares = np.full(num_workers, 1 / num_workers)
        units = np.arange(num_examples, dtype=np.int32)
        self.shards = [units]
        self._pass = _Pass(method, units, microbatch_size, (seed,))
        self._passes = [self._pass]

    @property
    def epoch(self) -> int:
        """The epoch that the next round belongs to."""
        return self._pass.index

    def total(self, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, or what is left of the epoch.

        What a gate leaves over is any number, and an update from a handful of examples does harm.
        So with a gate a rest of less than one and a half budgets is done in two rounds, of which
        no gate closes the last: each of them holds half a budget or more.
        """
        left = self._pass.microbatches_left
        if gated and budget < left < 1.5 * budget:
            return -(-left // 2)
        return min(budget, left)

    def is_last(self, quotas: np.ndarray) -> bool:
        """Whether a round of these quotas ends the epoch, unless some of it is returned."""
        return int(quotas.sum()) >= self._pass.microbatches_left

    def fitted(self, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as this data can serve them: as they are."""
        del present
        return quotas

    def upcoming(self, quotas: np.ndarray, workers: Sequence[int]) -> np.ndarray:
        """i32[k, B]: what these workers do in the next two rounds, if quotas stay as they are."""
        total, stops = int(quotas.sum()), np.cumsum(quotas)
        rows = self._pass.peek(2 * total)
        cuts = [
            rows[start + stops[worker] - quotas[worker] : start + stops[worker]]
            for start in (0, total)
            for worker in workers
        ]
        return np.concatenate(cuts)

    def whole_pass(self, quotas: np.ndarray) -> list[np.ndarray]:
        """The ids i32[k] of each round of a whole pass by the present order and these quotas."""
        size = int(quotas.sum()) * self.microbatch_size
        return _cut(self._pass.ordered_units, size)

    def plan(self, quotas: np.ndarray) -> RoundPlan:
        """Cuts the next `sum(quotas)` microbatches of the order; changes nothing."""
        starts = np.concatenate([[0], np.cumsum(quotas)])
        passes = np.full(self.num_workers, self._pass.index)
        return RoundPlan(self._pass.peek(int(starts[-1])), starts, passes)

    def commit(
        self, plan: RoundPlan, done: np.ndarray, unit_signs: Sequence[Any] | None = None
    ) -> None:
        """Counts and places what was done, and puts the rest back at the head.

        Args:
            plan: of this round.
            done: i64[W]: each worker finished the first `done[w]` of its microbatches.
            unit_signs: for each worker i8[done[w], B]; None where the order takes none.
        """
        position = np.arange(len(plan.example_ids)) - np.repeat(plan.starts[:-1], plan.quotas)
        finished = position < np.repeat(done, plan.quotas)
        processed = plan.example_ids[finished]
        signs = None if unit_signs is None else np.concatenate([np.asarray(s) for s in unit_signs])
        self.examples_processed += int(np.sum(processed != PADDING))
        self._pass.commit(
            len(plan.example_ids), processed, plan.example_ids[~finished], signs, self.ledger
        )


class PrivateRounds(_Saving):
    """Private data: worker w processes shard w alone, pass after pass at its own pace.

    An epoch is examples processed / N. Arguments as `SharedRounds`, and

    Args:
        proportions: f64[W]: the shards' relative sizes (largest remainder); None = equal.
    """

    def __init__(
        self,
        num_examples: int,
        num_workers: int,
        *,
        microbatch_size: int,
        method: ordering_lib.Ordering,
        seed: int,
        proportions: Sequence[float] | None = None,
    ) -> None:
        if num_examples < num_workers:
            raise ValueError(
                f"data.sharing = 'private' with {num_examples} examples for {num_workers} "
                "workers: each worker needs at least one example; take fewer workers"
            )
        self.num_workers = num_workers
        self.num_examples = num_examples
        self.microbatch_size = microbatch_size
        self.ledger = ledger_lib.Ledger(num_examples)
        self.examples_processed = 0
        proportions = [1.0] * num_workers if proportions is None else proportions
        # One example each first: a shard may be small, but never empty.
        sizes = 1 + shares.largest_remainder(proportions, num_examples - num_workers)
        shuffled = np.random.default_rng((seed, 0x5A4D)).permutation(num_examples)
        self.shards = np.split(shuffled.astype(np.int32), np.cumsum(sizes)[:-1])
        self.shares = sizes / num_examples
        place_of = np.empty(num_examples, np.int32)
        for shard in self.shards:
            place_of[shard] = np.arange(len(shard))
        self._passes = [
            _Pass(method, shard, microbatch_size, (seed, worker), place_of)
            for worker, shard in enumerate(self.shards)
        ]

    @property
    def epoch(self) -> int:
        """The epoch that the next round belongs to."""
        return self.examples_processed // self.num_examples

    def total(self, budget: int, *, gated: bool = False) -> int:
        """Microbatches of the next round: the budget, less what `fitted` cuts off."""
        del gated
        return budget

    def is_last(self, quotas: np.ndarray) -> bool:
        """Workers end their passes at different times; no round is a last one for all."""
        del quotas
        return False

    def fitted(self, quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The quotas as the shards can serve them.

        Every worker that is present does one microbatch at least, or its shard would have no
        part in the objective; it is taken from the largest quota. A worker near the end of its
        pass does what is left of it, and the round is smaller: others would take longer for it.
        """
        return np.minimum(with_every_worker(quotas, present), self._left())

    def _left(self) -> np.ndarray:
        return np.asarray([own.microbatches_left for own in self._passes])

    def upcoming(self, quotas: np.ndarray, workers: Sequence[int]) -> np.ndarray:
        """i32[k, B]: what these workers do in the next two rounds, if quotas stay as they are."""
        return np.concatenate([self._passes[w].peek(2 * int(quotas[w])) for w in workers])

    def whole_pass(self, quotas: np.ndarray) -> list[np.ndarray]:
        """The ids i32[k] of each round until each worker with a quota has done its whole pass."""
        parts = [
            _cut(own.ordered_units, int(quota) * self.microbatch_size)
            for own, quota in zip(self._passes, quotas, strict=True)
            if quota
        ]
        return [
            np.concatenate([ids for ids in of_round if ids is not None])
            for of_round in itertools.zip_longest(*parts)
        ]

    def plan(self, quotas: np.ndarray) -> RoundPlan:
        """Takes the next `quotas[w]` microbatches of each shard; changes nothing."""
        rows = [p.peek(int(q)) for p, q in zip(self._passes, quotas, strict=True)]
        starts = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        passes = np.asarray([p.index for p in self._passes])
        return RoundPlan(np.concatenate(rows), starts, passes)

    def commit(
        self, plan: RoundPlan, done: np.ndarray, unit_signs: Sequence[Any] | None = None
    ) -> None:
        """As `SharedRounds.commit`, shard by shard."""
        for worker, own in enumerate(self._passes):
            rows, count = plan.rows(worker), int(done[worker])
            if len(rows) == 0:
                continue
            signs = None if unit_signs is None else np.asarray(unit_signs[worker])
            self.examples_processed += int(np.sum(rows[:count] != PADDING))
            own.commit(len(rows), rows[:count], rows[count:], signs, self.ledger)


def with_every_worker(quotas: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The same sum, and no worker that is present without a microbatch, as far as they go round.

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


Rounds = SharedRounds | PrivateRounds
