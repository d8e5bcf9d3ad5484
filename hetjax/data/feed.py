"""Brings the examples of a microbatch to the device that will process it.

Resident: the whole set lies on each device and a microbatch carries ids alone. Streamed:
background threads read ahead and pack microbatches on the host. Both give the same `Microbatch`,
to the bit, to the same compiled `accumulate`. `choosing` says which of them a run takes.

Padding repeats the first example of its microbatch; what fills it up is read as it is, and masked,
too. So a loss that is finite for every example is
finite for padding, and masking it leaves no NaN in the gradient (0 * inf).
"""

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout

from hetjax import mesh, types
from hetjax.data import held as held_lib
from hetjax.data import leaves, owned, readers, sources
from hetjax.data import passes as passes_lib
from hetjax.data import stream as stream_lib

_BLOCK_MICROBATCHES = 8  # that one thread reads at a time

Passes = np.ndarray | int
"""Of which pass each microbatch is, i64[k], or all of them are."""


class Feed:
    """What the local phase asks for its data.

    Args:
        held: what the run holds of the source; None: nobody is told of changes.
    """

    reads_ahead = False
    """Whether hints of what comes next are of any use."""

    reads_all = False
    """Whether the hints are to be of what all workers do, those of other processes too."""

    own = owned.Owned((), "shared")
    """Which of the run's examples the source has."""

    def __init__(self, held: held_lib.Held | None) -> None:
        self._held, self._compared = held, 0

    def load(self, worker: int, example_ids: np.ndarray, passes: Passes = 0) -> types.Microbatch:
        """`example_ids i32[..., B]` as a microbatch on the worker's device.

        `passes` i64[...] says of which pass each is, or one number of all of them: a source may
        give another view of an example in each.
        """
        raise NotImplementedError

    def lend(self, worker: int, example_ids: np.ndarray, passes: Passes = 0) -> Any:
        """As `load`, for a program that makes a microbatch of it by `gathered`."""
        return self.load(worker, example_ids, passes)

    def read_ahead(self, example_ids: np.ndarray, passes: np.ndarray) -> None:
        """A hint: these microbatches i32[k, B] of these passes i64[k] come next."""

    def wait(self, example_ids: np.ndarray, pass_index: int = 0) -> None:
        """Returns when these microbatches i32[k, B] are in memory, host or device."""

    def first(self) -> types.PyTree:
        """Of what comes once: the first example, which all processes must have alike."""
        return ()

    def end(self, stream: stream_lib.Stream, state: stream_lib.StreamState, budget: int) -> str:
        """Of what comes once: what to tell where it has ended within an epoch, and all is done.

        The next round of `budget` microbatches is waited for; a stream that is shorter is cut.
        """
        raise NotImplementedError

    def limits(self, plan: stream_lib.Assignment, most: np.ndarray) -> np.ndarray:
        """i64[W]: `most` microbatches of each worker, fewer where a process's part has ended."""
        return most

    def saved(self, state: stream_lib.StreamState) -> Any:
        """What a checkpoint keeps of the source itself, as JSON values."""

    def go_on(self, state: stream_lib.StreamState, saved: dict[str, Any] | None) -> None:
        """Has the source go on where a checkpoint was made, by what `saved` gave."""

    def compare(self, epoch: int) -> None:
        """Tells what of the source has changed since epoch 0; call it once an epoch."""
        if self._held is not None and epoch != self._compared:
            self._compared = epoch
            self._held.compare()

    def close(self) -> None:
        """Frees threads."""


def check_narrow(arrays: types.PyTree, example_ids: np.ndarray | None = None) -> None:
    """Refuses whole numbers of 64 bits that JAX would cut to 32.

    Args:
        arrays: leaves `[k, ...]`.
        example_ids: of these examples; None: 0 to k - 1.
    """
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int32:
        leaves.check_narrow(arrays, example_ids)


def rows(example_ids: Any, xp: Any) -> Any:
    """Which example is read for each id `[..., B]`: of padding the first of its microbatch."""
    of_padding = xp.where(example_ids == stream_lib.PADDING, example_ids[..., :1], example_ids)
    return xp.where(of_padding < stream_lib.PADDING, passes_lib.filling(of_padding), of_padding)


def _gather(arrays: types.PyTree, example_ids: jax.Array, first_id: Any) -> types.Microbatch:
    is_example, ids = example_ids >= 0, rows(example_ids, jnp)
    places = jnp.maximum(ids if first_id is None else ids - first_id, 0)
    with jax.named_scope("gather"):
        examples = jax.tree.map(lambda leaf: jnp.take(leaf, places, 0, mode="clip"), arrays)
    return types.Microbatch(example_ids, is_example.astype(jnp.float32), examples)


class Lent(NamedTuple):
    """All examples on a device, and which of them are a microbatch."""

    arrays: types.PyTree
    example_ids: Any  # i32[B]
    first_id: int | None  # of the arrays; None: 0


def gathered(microbatch: types.Microbatch | Lent) -> types.Microbatch:
    """What a program is given, as a microbatch; traceable.

    The barrier has XLA compile what follows as if the gather were a program of its own, so that
    its numbers are those of a microbatch that was loaded.
    """
    if not isinstance(microbatch, Lent):
        return microbatch
    return jax.lax.optimization_barrier(jax.tree.map(_as_argument, _gather(*microbatch)))


def _as_argument(leaf: jax.Array) -> jax.Array:
    """In an argument's layout, which XLA keeps out of the loops that follow.

    As a part of these a gather finds the place of each number again: a fifth of the time of
    LeNet's microbatch of 32.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return layout.with_layout_constraint(leaf, layout.Layout(tuple(range(leaf.ndim))))


class ResidentFeed(Feed):
    """The data set in the memory of each device.

    Args:
        source: a data source; read once, as a whole.
        places: of each worker. One of several workers holds one copy; other processes fill theirs.
        crew: who reads it; of one thread the calling one does.
        on_read: called with the number of examples that were read since the last call.
        held: what the run holds of the source; None: nobody is told of changes.
    """

    def __init__(
        self,
        source: Any,
        places: Sequence[mesh.Place],
        *,
        crew: readers.Crew = readers.ALONE,
        on_read: Callable[[int], object] = lambda count: None,
        held: held_lib.Held | None = None,
    ) -> None:
        super().__init__(held)
        source = sources.of_epoch(source, 0)
        loaded = sources.load_all(source, crew=crew, on_read=on_read)
        check_narrow(loaded.arrays)
        arrays = loaded.arrays
        if loaded is source:  # the user's own arrays, which a CPU device may use as they are
            arrays = jax.tree.map(np.array, arrays)
        own = {place for place in places if mesh.is_here(place)}
        copies = {place: jax.device_put(arrays, place) for place in own}
        self._arrays = [copies.get(place) for place in places]
        self._gather = jax.jit(_gather)

    def load(self, worker: int, example_ids: np.ndarray, passes: Passes = 0) -> types.Microbatch:
        return self._gather(*ResidentFeed.lend(self, worker, example_ids))

    def lend(self, worker: int, example_ids: np.ndarray, passes: Passes = 0) -> Lent:
        return Lent(self._arrays[worker], example_ids, self.own.first or None)


_Block = list[concurrent.futures.Future]  # examples that are read, each part by one thread


class StreamedFeed(Feed):
    """Reads from the source while training goes on; memory is the microbatches of two rounds.

    Which examples are read, and how often, does not depend on who reads. With one thread, no
    other one ever touches the source, and it reads in the order of the run.

    Args:
        source: anything with `__len__` and `__getitem__`.
        places: of each worker.
        crew: who reads it.
        held: what the run holds of the source, its length; None: nobody is told of changes.
    """

    reads_ahead = True

    def __init__(
        self,
        source: Any,
        places: Sequence[mesh.Place],
        *,
        crew: readers.Crew = readers.ALONE,
        held: held_lib.Held | None = None,
    ) -> None:
        super().__init__(held)
        self._like = like = sources.read(source, 0)
        self._places = list(places)
        self._num_readers = crew.size
        self._readers = readers.Readers(sources.Reading(source, like), crew)
        # Microbatches read or being read: {(pass, bytes of the ids): (the block, its place there)}.
        self._ready: dict[tuple[int, bytes], tuple[_Block, int]] = {}

    def _submit(self, pass_index: int, microbatches: list[np.ndarray]) -> None:
        """Has microbatches i32[B] read as one block: at once, or in parts by several threads."""
        ids = rows(np.stack(microbatches), np).reshape(-1) - self.own.first
        size = -(-len(ids) // self._num_readers)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        block = [self._readers.submit(part, pass_index) for part in parts]
        for place, one in enumerate(microbatches):
            self._ready[pass_index, one.tobytes()] = block, place

    def _block_of(self, ids: np.ndarray, pass_index: int) -> tuple[list[types.PyTree], int]:
        """The parts of the block with a microbatch, and its place there; waits for them."""
        key = pass_index, ids.tobytes()
        if key not in self._ready:
            self._submit(pass_index, [ids])
        block, place = self._ready[key]
        return [self._readers.result(part) for part in block], place

    def _examples(self, ids: np.ndarray, pass_index: int) -> types.PyTree:
        """The examples of one microbatch, `[B, ...]`, on the host."""
        if ids[0] == stream_lib.PADDING:
            return jax.tree.map(lambda leaf: np.stack([leaf] * len(ids)), self._like)
        parts, place = self._block_of(ids, pass_index)
        del self._ready[pass_index, ids.tobytes()]

        def cut(*pieces: np.ndarray) -> np.ndarray:
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            return whole[place * len(ids) : (place + 1) * len(ids)]

        examples = jax.tree.map(cut, *parts)
        check_narrow(examples, rows(ids, np))
        return examples

    def wait(self, example_ids: np.ndarray, pass_index: int = 0) -> None:
        for ids in example_ids:
            if ids[0] != stream_lib.PADDING:
                self._block_of(ids, pass_index)

    def load(self, worker: int, example_ids: np.ndarray, passes: Passes = 0) -> types.Microbatch:
        shape = example_ids.shape
        flat = example_ids.reshape(-1, shape[-1])
        each = np.broadcast_to(passes, shape[:-1]).reshape(-1).tolist()
        examples = [self._examples(*pair) for pair in zip(flat, each, strict=True)]

        def join(*each: np.ndarray) -> np.ndarray:
            joined = each[0] if len(each) == 1 else np.stack(each)
            return joined.reshape(*shape, *each[0].shape[1:])

        mask = (example_ids >= 0).astype(np.float32)
        microbatch = types.Microbatch(example_ids, mask, jax.tree.map(join, *examples))
        return jax.device_put(microbatch, mesh.spread(self._places[worker], shape))

    def read_ahead(self, example_ids: np.ndarray, passes: np.ndarray) -> None:
        pairs = zip(passes.tolist(), example_ids, strict=True)
        wanted = {(pass_index, ids.tobytes()): ids for pass_index, ids in pairs}
        for key in self._ready.keys() - wanted.keys():
            del self._ready[key]
        missing = [(key[0], ids) for key, ids in wanted.items() if key not in self._ready]
        size = _BLOCK_MICROBATCHES if self._num_readers == 1 else 1  # so the first are there soon
        for pass_index, of_pass in itertools.groupby(missing, key=lambda pair: pair[0]):
            own = [ids for _, ids in of_pass]
            for start in range(0, len(own), size):
                self._submit(pass_index, own[start : start + size])

    def close(self) -> None:
        self._readers.close()
