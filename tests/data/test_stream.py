"""Streams and the ledger against lists that say what they do, one example at a time."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.checkpoints import leaves
from hetjax.data import ledger
from hetjax.data import stream as stream_lib
from hetjax.ordering import orders
from tests.ordering import test_orders
from tests.own_parts import order as own_order

ORDERINGS = ("random_reshuffling", "balanced", "fixed_map", "blocks_of_3", "frozen")


class SlowPass:
    """One order, as a list of what is to come; every round makes new lists."""

    def __init__(self, name, examples, seed):
        self.name, self.examples, self.seed = name, list(examples), seed
        self.index, self.placed = 0, []
        self.order = np.random.default_rng((*seed, 0)).permutation(len(examples)).tolist()
        self.remaining, self.num_dropped, self.dropped = self.ordered, 0, 0
        self.ends_early = False

    @property
    def ordered(self):
        return [self.examples[position] for position in self.order]

    def peek(self, count, size):
        kept = len(self.remaining) - self.num_dropped
        examples = self.remaining[: min(count * size, kept)]
        rows = [examples[start : start + size] for start in range(0, len(examples), size)]
        return [row + [-1] * (size - len(row)) for row in rows]

    def commit(self, taken, processed, returned, signs, size):
        """True where that was the end of the pass."""
        self.remaining = returned + self.remaining[taken * size :]
        self.placed += zip(
            [self.examples.index(example) for example in processed], signs, strict=True
        )
        rest = len(self.remaining)
        is_short = self.ends_early and rest < taken * size
        if rest > self.num_dropped and not is_short:
            return False
        self.placed += [(self.examples.index(example), 0) for example in self.remaining]
        self.dropped += rest
        self.index += 1
        self.order, self.placed = self.next_order(), []
        self.remaining = self.ordered
        return True

    def next_order(self):
        if self.name == "frozen" and self.index > 2:
            return self.order
        realised, signs = zip(*self.placed, strict=True)
        return test_orders.order_slowly(
            self.name, len(self.examples), self.seed, list(realised), self.index, signs
        )


class SlowStream:
    """What a stream does, in lists."""

    def __init__(self, name, shards, num_workers, size, seed, *, shared, of_round):
        self.num_workers, self.size, self.shared = num_workers, size, shared
        seeds = [(seed,)] if shared else [(seed, worker) for worker in range(num_workers)]
        self.passes = [SlowPass(name, s, own) for s, own in zip(shards, seeds, strict=True)]
        self.num_examples = sum(len(shard) for shard in shards)
        for own in self.passes if of_round else ():
            own.ends_early = not shared
            own.num_dropped = len(own.examples) % (size * of_round) if shared else 0
        self.counts = dict.fromkeys(range(self.num_examples), 0)
        self.told = {}
        self.ever, self.missing, self.duplicated, self.processed = set(), 0, 0, 0

    @property
    def epoch(self):
        if self.shared:
            return self.passes[0].index
        return self.processed // self.num_examples

    def left(self):
        return [-(-(len(own.remaining) - own.num_dropped) // self.size) for own in self.passes]

    def total(self, budget, gated):
        if not self.shared:
            return budget
        (left,) = self.left()
        if gated and budget < left < 1.5 * budget:
            return -(-left // 2)
        return min(budget, left)

    def fitted(self, quotas, present):
        if self.shared:
            return quotas
        quotas = list(quotas)
        for worker in range(self.num_workers):
            largest = quotas.index(max(quotas))
            if present[worker] and quotas[worker] == 0 and quotas[largest] > 1:
                quotas[largest] -= 1
                quotas[worker] = 1
        return [min(pair) for pair in zip(quotas, self.left(), strict=True)]

    def plan(self, quotas):
        """For each worker its microbatches."""
        if not self.shared:
            pairs = zip(self.passes, quotas, strict=True)
            return [own.peek(quota, self.size) for own, quota in pairs]
        return self.cut(self.passes[0].peek(sum(quotas), self.size), quotas)

    def cut(self, rows, quotas):
        plan = []
        for quota in quotas:
            plan.append(rows[:quota])
            rows = rows[quota:]
        return plan

    def again(self, past, quotas):
        return self.cut([row for rows in past for row in rows], quotas) if self.shared else past

    def upcoming(self, quotas, workers):
        if not self.shared:
            return [
                (row, self.passes[w].index)
                for w in workers
                for row in self.passes[w].peek(2 * quotas[w], self.size)
            ]
        rows, found = self.passes[0].peek(2 * sum(quotas), self.size), []
        for first in (0, sum(quotas)):
            for worker in workers:
                start = first + sum(quotas[:worker])
                found += rows[start : start + quotas[worker]]
        return [(row, self.passes[0].index) for row in found]

    def commit(self, plan, done, signs):
        each = range(self.num_workers)
        of_pass = [each] if self.shared else [[worker] for worker in each]
        for own, workers in zip(self.passes, of_pass, strict=True):
            processed, returned, of_processed = [], [], []
            for worker in workers:
                for index, row in enumerate(plan[worker]):
                    examples = [example for example in row if example >= 0]
                    if index < done[worker]:
                        processed += examples
                        of_processed += signs[worker][index].tolist()[: len(examples)]
                    else:
                        returned += examples
            taken = sum(len(plan[worker]) for worker in workers)
            if not taken:
                continue
            for example in processed:
                self.counts[example] += 1
                self.ever.add(example)
            self.processed += len(processed)
            if own.commit(taken, processed, returned, of_processed, self.size):
                self.missing -= own.dropped - self.told.get(own, 0)
                self.told[own] = own.dropped
                for example in own.examples:
                    self.missing += self.counts[example] == 0
                    self.duplicated += max(self.counts[example] - 1, 0)
                    self.counts[example] = 0


def assert_equal_streams(stream, state, slow):
    for own, other in zip(state.passes, slow.passes, strict=True):
        assert own.remaining.tolist() == other.remaining
        assert own.pass_index == other.index
        assert own.order_state.order.tolist() == other.order
    assert state.ledger.counts.tolist() == list(slow.counts.values())
    assert ledger.missing(state.ledger) == slow.missing
    open_pass = sum(max(count - 1, 0) for count in slow.counts.values())
    assert ledger.duplicated(state.ledger) == slow.duplicated + open_pass
    assert ledger.never_processed(state.ledger) == slow.num_examples - len(slow.ever)
    assert state.examples_processed == slow.processed
    assert stream.dropped(state) == sum(own.dropped for own in slow.passes)
    assert stream.epoch(state) == slow.epoch


def drawn_quotas(rng, total, present):
    weights = np.where(present, rng.exponential(size=len(present)), 0)
    return rng.multinomial(total, weights / weights.sum())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@settings(max_examples=80, deadline=None)
@given(
    num_examples=st.integers(5, 60),
    num_workers=st.integers(1, 5),
    size=st.sampled_from([2, 4, 6]),
    name=st.sampled_from(ORDERINGS),
    gated=st.booleans(),
    drops=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_stream_does_what_lists_do(
    shared, num_examples, num_workers, size, name, gated, drops, seed
):
    """Random quotas, workers that are absent, work that returns; saved and taken up in between."""
    rng = np.random.default_rng(seed)
    budget = int(rng.integers(num_workers, 4 * num_workers + 1))
    if drops and shared:
        budget = min(budget, num_examples // size)
    of_round = budget if drops else 0
    kind = stream_lib.SharedStream if shared else stream_lib.PrivateStream
    fields = {"ordering": test_orders.METHODS[name](), "seed": seed, "of_round": of_round}
    stream = kind(num_examples, num_workers, microbatch_size=size, **fields)
    shards = [shard.tolist() for shard in stream.shards]
    slow = SlowStream(name, shards, num_workers, size, seed, shared=shared, of_round=of_round)
    state = stream.init()
    shapes = jax.tree.map(np.shape, state)
    for _ in range(12):
        assert_equal_streams(stream, state, slow)
        present = rng.random(num_workers) < 0.9
        present[rng.integers(num_workers)] = True
        total = stream.total(state, budget, gated=gated)
        assert total == slow.total(budget, gated)
        asked = drawn_quotas(rng, total, present)
        quotas = stream.fitted(state, asked, present)
        assert quotas.tolist() == slow.fitted(asked.tolist(), present.tolist())
        assert stream.is_last(state, quotas) == (shared and sum(quotas) >= sum(slow.left()))
        some = np.flatnonzero(rng.random(num_workers) < 0.6).tolist() or [0]
        pairs = zip(
            *(array.tolist() for array in stream.upcoming(state, quotas, some)), strict=True
        )
        assert list(pairs) == slow.upcoming(quotas.tolist(), some)

        plan, slow_plan = stream.plan(state, quotas), slow.plan(quotas.tolist())
        assert [plan.microbatches(worker).tolist() for worker in range(num_workers)] == slow_plan
        passes = [own.index for own in slow.passes]
        assert plan.passes.tolist() == passes * (num_workers if shared else 1)
        assert_equal_streams(stream, state, slow)
        done = plan.quotas
        if rng.random() < 0.7:
            done = rng.integers(0, plan.quotas + 1)
        signs = [rng.choice([1, -1, 0], (count, size)).astype(np.int8) for count in done]
        past = stream_lib.done_of(plan, done)
        once_more = stream.again(past, np.roll(done, 1))
        state = stream.commit(state, plan, done, signs)
        slow.commit(slow_plan, done.tolist(), signs)
        slow_past = [rows[:count] for rows, count in zip(slow_plan, done, strict=True)]
        assert [past.microbatches(worker).tolist() for worker in range(num_workers)] == slow_past
        slow_again = slow.again(slow_past, np.roll(done, 1).tolist())
        again = [once_more.microbatches(worker).tolist() for worker in range(num_workers)]
        assert again == slow_again
        # The plan and what is read ahead stay as they were, whatever is written into the queue.
        assert [plan.microbatches(worker).tolist() for worker in range(num_workers)] == slow_plan
        assert jax.tree.map(np.shape, state) == shapes
        if rng.random() < 0.2:
            saved = leaves.flatten(state, "stream")
            state = leaves.unflatten(stream.init(), saved, "stream")
    assert_equal_streams(stream, state, slow)


@pytest.mark.parametrize("kind", [stream_lib.SharedStream, stream_lib.PrivateStream])
def test_within_a_pass_no_array_of_the_length_of_the_data_is_made(kind):
    stream = kind(400, 2, microbatch_size=4, ordering=orders.balanced(), seed=0)
    state = stream.init()
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, np.ndarray)]
    for done in ([3, 4], [0, 0], [4, 1], [2, 2]):  # some of it returns
        plan = stream.plan(state, np.array([4, 4]))
        signs = [np.ones((count, 4), np.int8) for count in done]
        state = stream.commit(state, plan, np.array(done), signs)
        now = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, np.ndarray)]
        assert all(one is other for one, other in zip(now, arrays, strict=True))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda order: order[:-1], r"int32\[7\] \["),
        (lambda order: np.append(order[:-1], order[:1]), r"int32\[8\] \[.*\] without \d"),
        (lambda order: order / 1, r"float64\[8\]"),
        (lambda order: order + 1, r"int32\[8\] \["),
        (lambda order: order - 1, r"int32\[8\] \["),
    ],
    ids=["shorter", "repeated", "floats", "out of range", "negative"],
)
def test_an_order_that_is_no_permutation_is_refused_before_an_example_of_its_pass(change, shown):
    def changed(state):
        return state._replace(order=change(state.order))

    own = own_order.rotated(by=3)
    wrong = own._replace(init=lambda *made: changed(own.init(*made)))
    message = rf"ordering: '.*_of_its_pass.*': init\(8, .* returned {shown}.* permutation i32\[8\]"
    with pytest.raises(ValueError, match=message):
        stream_lib.SharedStream(8, 1, microbatch_size=2, ordering=wrong, seed=0).init()


def test_a_repeated_example_is_refused_when_its_pass_is_made():
    own = own_order.rotated(by=3)
    wrong = own._replace(place=lambda *made: own.place(*made)._replace(order=np.zeros(8, np.int32)))
    stream = stream_lib.PrivateStream(8, 1, microbatch_size=2, ordering=wrong, seed=0)
    state = stream.init()
    plan = stream.plan(state, np.array([4]))
    with pytest.raises(ValueError, match=r"place\(state, realised_examples, .*permutation"):
        stream.commit(state, plan, np.array([4]))


def test_a_state_of_an_order_that_grows_is_refused_when_it_first_does():
    class State(NamedTuple):
        order: np.ndarray
        seen: tuple[int, ...] = ()

    grows = own_order.rotated()._replace(
        init=lambda num_examples, seed: State(np.arange(num_examples)),
        place=lambda state, *done: state._replace(seen=(*state.seen, 0)),
    )
    stream = stream_lib.SharedStream(8, 1, microbatch_size=2, ordering=grows, seed=0)
    state = stream.init()
    plan = stream.plan(state, np.array([1]))
    message = r"place\(state, .*with state/seen/0 int64\[\], where init"
    with pytest.raises(ValueError, match=message):
        stream.commit(state, plan, np.array([1]))


@settings(max_examples=60, deadline=None)
@given(num_examples=st.integers(1, 20), seed=st.integers(0, 10**6), parts=st.integers(1, 3))
def test_the_ledger_counts_every_repetition_and_every_gap(num_examples, seed, parts):
    """Examples at random, as by a fault: twice in a round, again in the next, or never."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, num_examples, parts - 1))
    shards = np.split(rng.permutation(num_examples), cuts)
    state, history = ledger.init(num_examples), [[] for _ in range(num_examples)]
    ever, missing, duplicated = set(), 0, 0
    for _ in range(12):
        examples = rng.integers(0, num_examples, rng.integers(0, 2 * num_examples)).astype(np.int32)
        np.add.at(state.counts, examples, 1)
        for example in examples.tolist():
            history[example].append(example)
            ever.add(example)
        if rng.random() < 0.4:
            shard = shards[rng.integers(parts)]
            state = ledger.close_pass(state, shard)
            for example in shard.tolist():
                missing += not history[example]
                duplicated += max(len(history[example]) - 1, 0)
                history[example] = []
        assert state.counts.tolist() == [len(own) for own in history]
        assert ledger.missing(state) == missing
        in_open = sum(max(len(own) - 1, 0) for own in history)
        assert ledger.duplicated(state) == duplicated + in_open
        assert ledger.never_processed(state) == num_examples - len(ever)
