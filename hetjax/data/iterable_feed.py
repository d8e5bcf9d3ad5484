"""Brings the examples of an iterable to the devices: each is read once, and kept until it is done.

Example i of pass p has the position p N + i. Blocks of as many examples as the buffer holds are
shuffled, each by a generator of the run's seed, the pass and the block. So which example has a
position depends on nothing that a run would have to save. A thread reads ahead, never beyond the
pass.
"""

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hetjax import mesh, types
from hetjax.data import feed, iterables, leaves, readers, sources
from hetjax.data import stream as stream_lib

logger = logging.getLogger(__name__)


class IterableFeed(feed.Feed):
    """The feed of what `hetjax.stream` makes.

    Args:
        source: the examples.
        places: of each worker.
        leads: whether this process tells the user.
    """

    reads_ahead = True
    reads_all = True

    def __init__(
        self, source: iterables.Streamed, places: Sequence[mesh.Place], *, leads: bool
    ) -> None:
        super().__init__(None)
        self._source, self._places, self._leads = source, list(places), leads
        self._like = sources.read(source, 0)
        self._readers = readers.Readers(self._read)
        self._lock = threading.Lock()
        self._window: dict[int, list[np.ndarray]] = {}  # by position; what is done is dropped
        self._asked: collections.deque[tuple[int, concurrent.futures.Future]] = collections.deque()
        self._made = 0  # positions before it are in the window, or were
        self._needed = 0  # none before it is asked for any more
        self._end: int | None = None  # where the iterable has ended
        self._is_asked = 0  # positions before it are read, or are being read

    # --- In the thread that reads ---

    def _read(self, example_ids: np.ndarray, pass_index: int) -> None:
        """Reads all positions before `example_ids[0]`."""
        self._source.inputs.remember(self._block_of(self._needed)[0])
        while self._made < example_ids[0] and self._end is None:
            self._read_block()

    def _block_of(self, position: int) -> tuple[int, int]:
        """First and last position of a block, the last exclusive; it is of one pass."""
        length, size = len(self._source), self._source.buffer_size
        start, index = divmod(position, length)
        first = start * length + index // size * size
        return first, min(first + size, (start + 1) * length)

    def _read_block(self) -> None:
        first, stop = self._block_of(self._made)
        found: list[list[np.ndarray]] = []
        try:
            while len(found) < stop - first:
                example = self._source.inputs.next()
                found.append(sources.checked(example, first + len(found), self._like, "stream"))
        except iterables.StreamEnd:
            self._end = first + len(found)
        order = np.arange(len(found))
        if self._source.buffer_size > 1:
            pass_index, index = divmod(first, len(self._source))
            block = index // self._source.buffer_size
            rng = np.random.default_rng((self._source.seed, pass_index, block))
            order = rng.permutation(len(found))
        with self._lock:
            self._window |= {first + place: found[at] for place, at in enumerate(order)}
            self._made = first + len(found)

    # --- In the threads that ask ---

    def _ask(self, stop: int) -> None:
        """Has all positions before `stop` read, and a buffer more; of this pass alone."""
        length = len(self._source)
        stop = min(stop + self._source.buffer_size - 1, -(-stop // length) * length)
        if stop > self._is_asked:
            self._is_asked = stop
            self._asked.append((stop, self._readers.submit(np.array([stop]))))

    def _wait(self, stop: int) -> None:
        """Waits until all positions before `stop` are read, or the iterable has ended."""
        with self._lock:
            waits = list(self._asked)
        for until, future in waits:
            self._readers.result(future)
            if until >= stop:
                break

    def first(self) -> types.PyTree:
        return self._like if self.reads_all else ()

    def end(self, stream: stream_lib.Stream, state: stream_lib.StreamState, budget: int) -> str:
        assert isinstance(stream, stream_lib.SharedStream)  # `feeding.check` refuses private data
        (own,), quotas = state.passes, np.zeros(stream.num_workers, int)
        quotas[0] = stream.total(state, budget)
        length = came = len(self._source)
        first = own.pass_index * length
        stop = first + int(stream.plan(state, quotas).example_ids.max(initial=-1)) + 1
        self._ask(stop)
        self._wait(stop)
        if self._end is not None:
            came = max(0, min(length, self._end - first))
        stream.cut(came)
        return "" if stream.total(state, budget) else self._source.ended(own.pass_index, came)

    def limits(self, plan: stream_lib.Assignment, most: np.ndarray) -> np.ndarray:
        if self.reads_all:  # `end` has said it
            return most
        found, length = most.copy(), len(self._source)
        for worker in self.own.workers(self._places)[self.own.part or 0]:
            start = int(plan.passes[worker]) * length
            rows = feed.rows(plan.microbatches(worker, int(most[worker])), np)
            stops = start - self.own.first + rows.max(axis=1) + 1
            self._wait(int(stops.max(initial=0)))
            found[worker] = most[worker] if self._end is None else np.sum(stops <= self._end)
        if (found < most).any():
            logger.info(self._source.ended(start // length, (self._end or 0) - start))
        return found

    def read_ahead(self, example_ids: np.ndarray, passes: np.ndarray) -> None:
        start = passes[:, None] * len(self._source) - self.own.first
        if not (wanted := set((example_ids + start)[example_ids >= 0].tolist())):
            return
        with self._lock:
            last = max(wanted)
            for position in [p for p in self._window if p < last and p not in wanted]:
                del self._window[position]
            self._needed = min(wanted)
            while len(self._asked) > 1 and self._asked[0][1].done():
                self._asked.popleft()
        self._ask(last + 1)

    def wait(self, example_ids: np.ndarray, pass_index: int = 0) -> None:
        rows = feed.rows(example_ids, np)
        if (rows >= 0).any():
            self._wait(pass_index * len(self._source) + int(rows.max()) - self.own.first + 1)

    def load(
        self, worker: int, example_ids: np.ndarray, passes: feed.Passes = 0
    ) -> types.Microbatch:
        shape = example_ids.shape
        rows = feed.rows(example_ids, np)
        offsets = np.broadcast_to(passes, shape[:-1])[..., None] * len(self._source)
        positions = np.where(rows < 0, -1, rows + offsets - self.own.first).reshape(-1).tolist()
        self._wait(max(positions) + 1)
        padding = [leaf for _, leaf in leaves.walk(self._like)]
        try:
            found = [padding if at < 0 else self._window[at] for at in positions]
        except KeyError as error:
            raise ValueError(
                f"hetjax.stream: position {error} is past, and examples come once; make it anew"
            ) from None
        columns = [np.stack(each) for each in zip(*found, strict=True)]
        feed.check_narrow(leaves.rebuild(self._like, iter(columns)), np.array(positions))
        shaped = iter([column.reshape(*shape, *column.shape[1:]) for column in columns])
        examples = leaves.rebuild(self._like, shaped)
        mask = (example_ids >= 0).astype(np.float32)
        place = mesh.spread(self._places[worker], example_ids.shape)
        return jax.device_put(types.Microbatch(example_ids, mask, examples), place)

    # --- How a run goes on ---

    def _next(self, state: stream_lib.StreamState) -> int:
        """The first position that is not done, or that no buffer can be without."""
        own = state.passes[self.own.part or 0]
        start = own.pass_index * len(self._source) - self.own.first
        return self._block_of(start + int(own.remaining[0]))[0]

    def saved(self, state: stream_lib.StreamState) -> Any:
        return self.own.tell(self._source.inputs.saved(self._next(state)))

    def go_on(self, state: stream_lib.StreamState, saved: Any) -> None:
        position = self._next(state)
        saved = saved[self.own.part or 0] if isinstance(saved, list) else saved
        self._source.inputs.go_to(position, saved, tells=self._leads)
        self._made = self._needed = self._is_asked = position

    def close(self) -> None:
        self._readers.close()
