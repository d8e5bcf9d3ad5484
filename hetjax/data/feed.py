"""Brings the examples of a microbatch to the device that will process it.

Resident: the whole set lies on each device and a microbatch carries ids alone. Streamed: a
background thread reads ahead and packs microbatches on the host. Both give the same
`Microbatch`, to the bit, to the same compiled `accumulate`; padding is zeros.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import rounds, sources


class Feed(Protocol):
    """What the local phase asks for its data."""

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        """`example_ids i32[..., B]` as a microbatch on the worker's device."""

    def read_ahead(self, example_ids: np.ndarray) -> None:
        """A hint: these rows i32[k, B] come next."""

    def close(self) -> None:
        """Frees threads."""


def _gather(arrays: types.PyTree, example_ids: jax.Array) -> types.Microbatch:
    is_example = example_ids >= 0
    rows = jnp.where(is_example, example_ids, 0)

    def take(leaf: jax.Array) -> jax.Array:
        found = jnp.take(leaf, rows, axis=0)
        mask = is_example.reshape(is_example.shape + (1,) * (found.ndim - rows.ndim))
        return jnp.where(mask, found, jnp.zeros((), found.dtype))

    with jax.named_scope("gather"):
        examples = jax.tree.map(take, arrays)
    return types.Microbatch(example_ids, is_example.astype(jnp.float32), examples)


class ResidentFeed:
    """The data set in the memory of each device; a gather is a program of its own.

    Args:
        source: a data source; read once, as a whole.
        devices: the device of each worker; one that serves several holds one copy.
    """

    def __init__(self, source: Any, devices: Sequence[jax.Device]) -> None:
        arrays = sources.load_all(source).arrays
        copies = {device: jax.device_put(arrays, device) for device in set(devices)}
        self._arrays = [copies[device] for device in devices]
        self._gather = jax.jit(_gather)

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        return self._gather(self._arrays[worker], example_ids)

    def read_ahead(self, example_ids: np.ndarray) -> None:
        pass

    def close(self) -> None:
        pass


class StreamedFeed:
    """Reads from the source while training goes on; memory is a few microbatches.

    Args:
        source: anything with `__len__` and `__getitem__`.
        devices: the device of each worker.
    """

    def __init__(self, source: Any, devices: Sequence[jax.Device]) -> None:
        self._source, self._like = source, sources.read(source, 0)
        self._devices = list(devices)
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "hetjax-feed")
        # Rows read or being read: {its bytes: (the block's future, its place in the block)}.
        self._ready: dict[bytes, tuple[concurrent.futures.Future, int]] = {}

    def _pack(self, example_ids: np.ndarray) -> types.Microbatch:
        is_example = example_ids.reshape(-1) != rounds.PADDING
        ids = np.where(is_example, example_ids.reshape(-1), 0)
        found = sources.fetch(self._source, ids, like=self._like)

        def shape(leaf: np.ndarray) -> np.ndarray:
            leaf[~is_example] = 0
            return leaf.reshape(*example_ids.shape, *leaf.shape[1:])

        mask = is_example.reshape(example_ids.shape).astype(np.float32)
        return types.Microbatch(example_ids, mask, jax.tree.map(shape, found))

    def load(self, worker: int, example_ids: np.ndarray) -> types.Microbatch:
        block, place = self._ready.pop(example_ids.tobytes(), (None, 0))
        if block is None:
            packed = self._pack(example_ids)
        else:
            packed = jax.tree.map(lambda leaf: leaf[place], block.result())
        return jax.device_put(packed, self._devices[worker])

    def read_ahead(self, example_ids: np.ndarray) -> None:
        wanted = {row.tobytes(): row for row in example_ids}
        for key in self._ready.keys() - wanted.keys():
            del self._ready[key]
        missing = {key: row for key, row in wanted.items() if key not in self._ready}
        if missing:  # one block: a source reads many records faster than one
            block = self._reader.submit(self._pack, np.stack(list(missing.values())))
            self._ready |= {key: (block, place) for place, key in enumerate(missing)}

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)


FEEDS: dict[str, Callable[..., Feed]] = {"resident": ResidentFeed, "streamed": StreamedFeed}
