"""Brings the examples of a microbatch to the device that will process it.

Resident: the whole set lies on each device and a microbatch carries ids alone. Streamed: a
background thread reads ahead and packs microbatches on the host. Both give the same
`Microbatch`, to the bit, to the same compiled `accumulate`.

Padding repeats the first example of its microbatch: a loss that is finite for every example is
finite for padding, so that masking it leaves no NaN in the gradient (0 * inf).
"""

import concurrent.futures
import contextlib
import operator
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import sources, stream

_BLOCK_ROWS = 8  # microbatches that are read at a time


class Feed(Protocol):
    """What the local phase asks for its data."""

    reads_ahead: bool
    """Whether hints of what comes next are of any use."""

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        """`example_ids i32[..., B]` as a microbatch on the worker's device."""

    def read_ahead(self, example_ids: np.ndarray) -> None:
        """A hint: these rows i32[k, B] come next."""

    def wait(self, example_ids: np.ndarray) -> None:
        """Returns when these rows i32[k, B] are in memory, host or device."""

    def close(self) -> None:
        """Frees threads."""


def _gather(arrays: types.PyTree, example_ids: jax.Array) -> types.Microbatch:
    is_example = example_ids >= 0
    rows = jnp.maximum(jnp.where(is_example, example_ids, example_ids[..., :1]), 0)
    with jax.named_scope("gather"):
        examples = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), arrays)
    return types.Microbatch(example_ids, is_example.astype(jnp.float32), examples)


class ResidentFeed:
    """The data set in the memory of each device; a gather is a program of its own.

    Args:
        source: a data source; read once, as a whole.
        devices: the device of each worker; one that serves several holds one copy, and those of
            other processes are theirs to fill.
    """

    reads_ahead = False

    def __init__(self, source: Any, devices: Sequence[jax.Device]) -> None:
        arrays = sources.load_all(source).arrays
        own = {device for device in devices if device.process_index == jax.process_index()}
        copies = {device: jax.device_put(arrays, device) for device in own}
        self._arrays = [copies.get(device) for device in devices]
        self._gather = jax.jit(_gather)

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        return self._gather(self._arrays[worker], example_ids)

    def read_ahead(self, example_ids: np.ndarray) -> None:
        pass

    def wait(self, example_ids: np.ndarray) -> None:
        pass

    def close(self) -> None:
        pass


class StreamedFeed:
    """Reads from the source while training goes on; memory is the microbatches of two rounds.

    One thread reads, and no other ever touches the source.

    Args:
        source: anything with `__len__` and `__getitem__`.
        devices: the device of each worker.
    """

    reads_ahead = True

    def __init__(self, source: Any, devices: Sequence[jax.Device]) -> None:
        self._source, self._like = source, sources.read(source, 0)
        self._devices = list(devices)
        # Rows read or being read: {its bytes: (the block's future, its place in the block)}.
        self._ready: dict[bytes, tuple[concurrent.futures.Future, int]] = {}
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        # A daemon: a source that blocks for ever must not keep the process alive.
        threading.Thread(target=self._read, name="hetjax-feed", daemon=True).start()

    def _read(self) -> None:
        while (task := self._wanted.get()) is not None:
            block, ids = task
            if self._closing.is_set() or not block.set_running_or_notify_cancel():
                continue
            try:
                block.set_result(sources.fetch(self._source, ids.reshape(-1), like=self._like))
            except Exception as error:  # raised again where the block is needed
                block.set_exception(error)

    def _submit(self, rows: list[np.ndarray]) -> None:
        """Has rows i32[B] read, as one block: a source reads many records faster than one."""
        block: concurrent.futures.Future = concurrent.futures.Future()
        ids = np.stack(rows)
        self._wanted.put((block, np.where(ids == stream.PADDING, ids[:, :1], ids)))
        self._ready |= {row.tobytes(): (block, place) for place, row in enumerate(rows)}

    def _read_row(self, row: np.ndarray) -> types.PyTree:
        """The examples of one microbatch, `[B, ...]`, on the host; waits for them."""
        if row.tobytes() not in self._ready:
            self._submit([row])
        block, place = self._ready[row.tobytes()]
        part = operator.itemgetter(slice(place * len(row), (place + 1) * len(row)))
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                return jax.tree.map(part, block.result(timeout=0.2))
        raise concurrent.futures.CancelledError("the feed was closed")

    def _row(self, row: np.ndarray) -> types.PyTree:
        if row[0] == stream.PADDING:
            return jax.tree.map(lambda leaf: np.stack([leaf] * len(row)), self._like)
        examples = self._read_row(row)
        del self._ready[row.tobytes()]
        return examples

    def wait(self, example_ids: np.ndarray) -> None:
        for row in example_ids:
            if row[0] != stream.PADDING:
                self._read_row(row)

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        rows = [self._row(row) for row in example_ids.reshape(-1, example_ids.shape[-1])]
        shape = example_ids.shape

        def join(*leaves: np.ndarray) -> np.ndarray:
            joined = leaves[0] if len(leaves) == 1 else np.stack(leaves)
            return joined.reshape(*shape, *leaves[0].shape[1:])

        mask = (example_ids != stream.PADDING).astype(np.float32)
        microbatch = types.Microbatch(example_ids, mask, jax.tree.map(join, *rows))
        return jax.device_put(microbatch, self._devices[worker])

    def read_ahead(self, example_ids: np.ndarray) -> None:
        wanted = {row.tobytes(): row for row in example_ids}
        for key in self._ready.keys() - wanted.keys():
            del self._ready[key]
        missing = [row for key, row in wanted.items() if key not in self._ready]
        for start in range(0, len(missing), _BLOCK_ROWS):  # so that the first are there soon
            self._submit(missing[start : start + _BLOCK_ROWS])

    def close(self) -> None:
        self._closing.set()
        self._wanted.put(None)


FEEDS: dict[str, Callable[..., Feed]] = {"resident": ResidentFeed, "streamed": StreamedFeed}
