"""Brings the examples of a microbatch to the device that will process it.

Resident: the whole set lies on each device and a microbatch carries ids alone. Streamed:
background threads read ahead and pack microbatches on the host. Both give the same `Microbatch`,
to the bit, to the same compiled `accumulate`. `choosing` says which of them a run takes.

Padding repeats the first example of its microbatch; what fills it up is read as it is, and masked,
too. So a loss that is finite for every example is
finite for padding, and masking it leaves no NaN in the gradient (0 * inf).
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import held as held_lib
from hetjax.data import passes, readers, sources, stream

_BLOCK_MICROBATCHES = 8  # that one thread reads at a time


class Feed:
    """What the local phase asks for its data.

    Args:
        held: what the run holds of the source; None: nobody is told of changes.
    """

    reads_ahead = False
    """Whether hints of what comes next are of any use."""

    def __init__(self, held: held_lib.Held | None) -> None:
        self._held = held

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        """`example_ids i32[..., B]` as a microbatch on the worker's device."""
        raise NotImplementedError

    def read_ahead(self, example_ids: np.ndarray) -> None:
        """A hint: these microbatches i32[k, B] come next."""

    def wait(self, example_ids: np.ndarray) -> None:
        """Returns when these microbatches i32[k, B] are in memory, host or device."""

    def compare(self, epoch: int) -> None:
        """Tells what of the source has changed since epoch 0; call it once an epoch."""
        if self._held is not None:
            self._held.compare(epoch)

    def close(self) -> None:
        """Frees threads."""


def _rows(example_ids: Any, xp: Any) -> Any:
    """Which example is read for each id `[..., B]`: of padding the first of its microbatch."""
    of_padding = xp.where(example_ids == stream.PADDING, example_ids[..., :1], example_ids)
    return xp.where(of_padding < stream.PADDING, passes.filling(of_padding), of_padding)


def _gather(arrays: types.PyTree, example_ids: jax.Array) -> types.Microbatch:
    is_example = example_ids >= 0
    rows = jnp.maximum(_rows(example_ids, jnp), 0)
    with jax.named_scope("gather"):
        examples = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), arrays)
    return types.Microbatch(example_ids, is_example.astype(jnp.float32), examples)


class ResidentFeed(Feed):
    """The data set in the memory of each device; a gather is a program of its own.

    Args:
        source: a data source; read once, as a whole.
        devices: the device of each worker. One that serves several workers holds one copy; other
            processes fill theirs.
        num_readers: threads that read it; 1: the calling thread does.
        on_read: called with the number of examples that were read since the last call.
        held: what the run holds of the source; None: nobody is told of changes.
    """

    def __init__(
        self,
        source: Any,
        devices: Sequence[jax.Device],
        *,
        num_readers: int = 1,
        on_read: Callable[[int], object] = lambda count: None,
        held: held_lib.Held | None = None,
    ) -> None:
        super().__init__(held)
        loaded = sources.load_all(source, num_readers=num_readers, on_read=on_read)
        arrays = loaded.arrays
        if loaded is source:  # the user's own arrays, which a CPU device may use as they are
            arrays = jax.tree.map(np.array, arrays)
        own = {device for device in devices if device.process_index == jax.process_index()}
        copies = {device: jax.device_put(arrays, device) for device in own}
        self._arrays = [copies.get(device) for device in devices]
        self._gather = jax.jit(_gather)

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        return self._gather(self._arrays[worker], example_ids)


class _Block(NamedTuple):
    """Examples that are read or being read, each part by one thread."""

    parts: list[concurrent.futures.Future]

    def examples(self, start: int, stop: int) -> types.PyTree:
        """The examples from one place to another; all parts have to be read."""

        def cut(*leaves: np.ndarray) -> np.ndarray:
            return (leaves[0] if len(leaves) == 1 else np.concatenate(leaves))[start:stop]

        return jax.tree.map(cut, *[part.result() for part in self.parts])


class StreamedFeed(Feed):
    """Reads from the source while training goes on; memory is the microbatches of two rounds.

    Which examples are read, and how often, does not depend on the number of threads. With one, no
    other thread ever touches the source, and it reads in the order of the run.

    Args:
        source: anything with `__len__` and `__getitem__`.
        devices: the device of each worker.
        num_readers: threads that read it.
        held: what the run holds of the source, its length; None: nobody is told of changes.
    """

    reads_ahead = True

    def __init__(
        self,
        source: Any,
        devices: Sequence[jax.Device],
        *,
        num_readers: int = 1,
        held: held_lib.Held | None = None,
    ) -> None:
        super().__init__(held)
        self._like = like = sources.read(source, 0)
        self._devices = list(devices)
        self._num_readers = num_readers
        self._readers = readers.Readers(
            lambda ids: sources.fetch(source, ids, like=like), num_readers
        )
        # Microbatches read or being read: {bytes of the ids: (the block, the place in it)}.
        self._ready: dict[bytes, tuple[_Block, int]] = {}

    def _submit(self, microbatches: list[np.ndarray]) -> None:
        """Has microbatches i32[B] read as one block: at once, or in parts by several threads."""
        ids = np.stack(microbatches)
        ids = _rows(ids, np).reshape(-1)
        size = -(-len(ids) // self._num_readers)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        block = _Block([self._readers.submit(part) for part in parts])
        self._ready |= {one.tobytes(): (block, place) for place, one in enumerate(microbatches)}

    def _block_of(self, ids: np.ndarray) -> tuple[_Block, int]:
        """The block with the examples of a microbatch, and its place there; waits for them."""
        if ids.tobytes() not in self._ready:
            self._submit([ids])
        block, place = self._ready[ids.tobytes()]
        for part in block.parts:
            self._readers.result(part)
        return block, place

    def _examples(self, ids: np.ndarray) -> types.PyTree:
        """The examples of one microbatch, `[B, ...]`, on the host."""
        if ids[0] == stream.PADDING:
            return jax.tree.map(lambda leaf: np.stack([leaf] * len(ids)), self._like)
        block, place = self._block_of(ids)
        del self._ready[ids.tobytes()]
        return block.examples(place * len(ids), (place + 1) * len(ids))

    def wait(self, example_ids: np.ndarray) -> None:
        for ids in example_ids:
            if ids[0] != stream.PADDING:
                self._block_of(ids)

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        examples = [self._examples(ids) for ids in example_ids.reshape(-1, example_ids.shape[-1])]
        shape = example_ids.shape

        def join(*leaves: np.ndarray) -> np.ndarray:
            joined = leaves[0] if len(leaves) == 1 else np.stack(leaves)
            return joined.reshape(*shape, *leaves[0].shape[1:])

        mask = (example_ids >= 0).astype(np.float32)
        microbatch = types.Microbatch(example_ids, mask, jax.tree.map(join, *examples))
        return jax.device_put(microbatch, self._devices[worker])

    def read_ahead(self, example_ids: np.ndarray) -> None:
        wanted = {ids.tobytes(): ids for ids in example_ids}
        for key in self._ready.keys() - wanted.keys():
            del self._ready[key]
        missing = [ids for key, ids in wanted.items() if key not in self._ready]
        size = _BLOCK_MICROBATCHES if self._num_readers == 1 else 1  # so the first are there soon
        for start in range(0, len(missing), size):
            self._submit(missing[start : start + size])

    def close(self) -> None:
        self._readers.close()


FEEDS: dict[str, Callable[..., Feed]] = {"resident": ResidentFeed, "streamed": StreamedFeed}
