"""Threads that read examples ahead, so that several reads wait for a slow disk or network at once.

Reads are begun in the order in which they were asked for, and each is done once. Python runs one
thread at a time. So threads help as far as a read waits, or computes in a library that lets other
threads run meanwhile, as decoders of images and NumPy do.
"""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_PATIENCE_SECS = 0.2  # between two looks at whether the threads were closed


class Readers:
    """Threads that all call one function.

    They are daemons: a source that blocks for ever must not keep the process alive.

    Args:
        read: `(example_ids i64[k]) -> examples`.
        count: how many threads there are. With one, no other ever calls the function.
    """

    def __init__(self, read: Callable[[np.ndarray], Any], count: int) -> None:
        self._read, self._count = read, count
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        for _ in range(count):
            threading.Thread(target=self._work, name="hetjax-feed", daemon=True).start()

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, example_ids: np.ndarray) -> concurrent.futures.Future:
        """Has examples read, after all that were asked for before."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._wanted.put((future, example_ids))
        return future

    def result(self, future: concurrent.futures.Future) -> Any:
        """Waits for what was read and returns it; raises what the function raised.

        Raises:
            CancelledError: the threads were closed before it was read.
        """
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=_PATIENCE_SECS)
        raise concurrent.futures.CancelledError("the feed was closed")

    def close(self) -> None:
        """Has the threads end after what they are reading now; does not wait for them."""
        self._closing.set()
        for _ in range(self._count):
            self._wanted.put(None)

    def _work(self) -> None:
        while (task := self._wanted.get()) is not None:
            future, example_ids = task
            if self._closing.is_set() or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(example_ids))
            except Exception as error:  # `result` raises it again
                future.set_exception(error)
